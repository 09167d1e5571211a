"""How busy devices and models were: from rows with an end and durations to a number of busy slots over time.

The start of a stage is not recorded. It is taken to be its end less its duration, running coming last; the time that a
result takes to travel is thus counted as running.
"""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from accelopt_ray.analysis.progress import call_ended_at, was_run

_STAY = ["run_id", "outcome", "answered_from", "core", "compile_s", "run_s", "ended_at"]


def stays(evaluations: pd.DataFrame, results: pd.DataFrame) -> pd.DataFrame:
    """One row for each time that a kernel was on a slot.

    A kernel that is checked in two stages is there twice, and its row in ``evaluations`` follows when the search needs
    it; ``results`` tells of each stay when it ended.

    Args:
        evaluations: ``evaluations``; used for runs that have no ``results``.
        results: ``results`` of the same runs.

    Returns:
        ``run_id``, ``outcome``, ``answered_from``, ``core``, ``compile_s``, ``run_s`` and ``ended_at``.
    """
    told = [
        {**{name: content.get(name) for name in _STAY[1:-1]}, "run_id": run_id, "ended_at": ended_at}
        for run_id, content, ended_at in zip(
            results["run_id"], map(_content, results["result_json"]), results["ended_at"], strict=True
        )
        if content
    ]
    without = evaluations[~evaluations["run_id"].isin([row["run_id"] for row in told])][_STAY]
    if not told:
        return without
    frame = pd.DataFrame(told, columns=_STAY).astype({"ended_at": evaluations["ended_at"].dtype})
    return pd.concat([frame, without], ignore_index=True) if len(without) else frame


def _content(text: object) -> dict[str, object]:
    try:
        content = json.loads(text) if isinstance(text, str) else {}
    except json.JSONDecodeError:
        return {}
    return content if isinstance(content, dict) else {}


def utilisation(evaluations: pd.DataFrame, llm_calls: pd.DataFrame, bins: int = 120) -> pd.DataFrame:
    """Averages over equal slices of the time from the first start to the last end of all given rows.

    Args:
        evaluations: As of :func:`stays`, of one run or of runs that shared machines.
        llm_calls: Their ``llm_calls``.
        bins: Number of slices.

    Returns:
        One row a slice: ``elapsed_s`` (its middle), ``running`` and ``compiling`` (busy slots, averaged), ``calling``
        (model calls under way), ``slots`` (distinct cores; the runs of a sweep share theirs). Empty without a timed
        row.
    """
    ran = evaluations[was_run(evaluations)].dropna(subset=["ended_at"])
    run_s = ran["run_s"].astype("float64").fillna(0.0)
    ended = ran["ended_at"]
    run_started = ended - _seconds(run_s)
    compile_started = run_started - _seconds(ran["compile_s"].astype("float64").fillna(0.0))
    calls = llm_calls.dropna(subset=["started_at"])
    intervals = {
        "running": (run_started, ended),
        "compiling": (compile_started, run_started),
        "calling": (calls["started_at"], call_ended_at(calls)),
    }
    bounds = [(start.min(), end.max()) for start, end in intervals.values() if len(start)]
    if not bounds:
        return pd.DataFrame(columns=["elapsed_s", *intervals, "slots"], dtype="float64")
    first = min(start for start, _ in bounds)
    length_s = max((max(end for _, end in bounds) - first).total_seconds(), 1e-6)
    edges = np.linspace(0.0, length_s, bins + 1)
    columns = {
        name: _busy((start - first).dt.total_seconds().to_numpy(), (end - first).dt.total_seconds().to_numpy(), edges)
        for name, (start, end) in intervals.items()
    }
    return pd.DataFrame({"elapsed_s": (edges[:-1] + edges[1:]) / 2, **columns, "slots": ran["core"].nunique()})


def _seconds(values: pd.Series[float]) -> pd.Series[pd.Timedelta]:
    return pd.to_timedelta((values * 1e6).round(), unit="us")


def _busy(start: np.ndarray, end: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean number of intervals under way in each slice: the integral of their count over the slice's length."""

    def covered(limit: np.ndarray) -> np.ndarray:
        # Sum over the intervals of the part before the limit.
        return _clipped(np.sort(start), limit) - _clipped(np.sort(end), limit)

    total = covered(edges)
    return np.asarray(np.diff(total) / np.diff(edges))


def _clipped(times: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """For each limit, the sum of ``max(0, limit - time)`` over sorted times."""
    counts = np.searchsorted(times, limits, side="right")
    sums = np.concatenate([[0.0], np.cumsum(times)])
    return np.asarray(counts * limits - sums[counts])
