"""Runs and searches at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from accelopt_ray.analysis.progress import SEARCH, correct_latency_ms, was_run


def run_states(
    runs: pd.DataFrame, settings: pd.DataFrame, iterations: pd.DataFrame, evaluations: pd.DataFrame
) -> pd.DataFrame:
    """Tells how far each run is.

    Returns:
        One row a run: ``run_id``, ``created_at``, ``preset``, ``seed``, ``device``, ``iterations_planned``,
        ``iterations_done`` (of the task that is least far), ``evaluations``, ``last_row_at``, and ``state``:
        ``finished`` when the planned iterations are done, ``empty`` without an evaluation, else ``unfinished``: the run
        goes on, was stopped early, or was killed.
    """
    frame = runs[["run_id", "created_at", "preset", "seed", "device"]].copy()
    planned = pd.to_numeric(settings.get("search.iterations", pd.Series(dtype="float64")), errors="coerce").dropna()
    done = iterations.groupby(SEARCH, observed=True)["iteration"].max().groupby("run_id").min()
    rows = evaluations.groupby("run_id")["ended_at"]
    frame["iterations_planned"] = _whole_numbers(frame["run_id"], planned.round().to_dict())
    frame["iterations_done"] = _whole_numbers(frame["run_id"], done.to_dict())
    frame["evaluations"] = _whole_numbers(frame["run_id"], rows.size().to_dict()).fillna(0).astype("int64")
    frame["last_row_at"] = frame["run_id"].map(rows.max().to_dict())
    ended = (frame["iterations_done"] >= frame["iterations_planned"]).fillna(False).to_numpy(bool)
    empty = frame["evaluations"].eq(0).to_numpy(bool)
    frame["state"] = np.select([empty, ended], ["empty", "finished"], "unfinished")
    return frame


def summary(evaluations: pd.DataFrame, llm_calls: pd.DataFrame, iterations: pd.DataFrame) -> pd.DataFrame:
    """Sums each search up.

    Returns:
        One row for each run and task: ``run_id``, ``task``, ``device``, ``simulated``, ``baseline_latency_ms``,
        ``best_latency_ms``, ``speedup`` (baseline over best), ``baseline_percent_of_peak``, ``best_percent_of_peak``,
        ``best_candidate_id``, ``best_iteration``, ``evaluations`` (rows), ``evaluations_run`` (that took a device's
        time), ``correct``, ``duplicates``, ``calls``, ``tokens``, ``cost_usd``, ``unpriced_calls``,
        ``iterations_done``, ``wall_s`` (first call or evaluation to the last).
    """
    frame = evaluations[
        [*SEARCH, "iteration", "candidate_id", "device", "simulated", "outcome", "percent_of_peak", "ended_at"]
    ].copy()
    frame["latency_ms"] = correct_latency_ms(evaluations)
    frame["ran"] = was_run(evaluations)
    frame["correct"] = frame["outcome"].eq("correct").to_numpy(bool)
    frame["duplicate"] = frame["outcome"].eq("duplicate").to_numpy(bool)
    groups = frame.groupby(SEARCH, sort=False, observed=True)
    rows = groups.agg(
        device=("device", "first"),
        simulated=("simulated", "max"),
        evaluations=("ran", "size"),
        evaluations_run=("ran", "sum"),
        correct=("correct", "sum"),
        duplicates=("duplicate", "sum"),
        ended_at=("ended_at", "max"),
        first_at=("ended_at", "min"),
    )
    valid = frame.dropna(subset=["latency_ms"])
    baseline = valid[valid["iteration"].eq(0)].drop_duplicates(SEARCH).set_index(SEARCH)
    best = valid.sort_values("latency_ms", kind="stable").drop_duplicates(SEARCH).set_index(SEARCH)
    rows["baseline_latency_ms"] = baseline["latency_ms"]
    rows["best_latency_ms"] = best["latency_ms"]
    rows["speedup"] = rows["baseline_latency_ms"] / rows["best_latency_ms"]
    rows["baseline_percent_of_peak"] = baseline["percent_of_peak"]
    rows["best_percent_of_peak"] = best["percent_of_peak"]
    rows["best_candidate_id"] = best["candidate_id"]
    rows["best_iteration"] = best["iteration"]
    calls = llm_calls.assign(
        tokens=llm_calls["prompt_tokens"].fillna(0) + llm_calls["completion_tokens"].fillna(0),
        unpriced=(~llm_calls["price_known"].fillna(True)).to_numpy(bool),
    ).groupby(SEARCH, observed=True)
    spent = calls.agg(
        calls=("call_id", "size"),
        tokens=("tokens", "sum"),
        cost_usd=("cost_usd", "sum"),
        unpriced_calls=("unpriced", "sum"),
        started_at=("started_at", "min"),
    ).reindex(rows.index)
    for name in ("calls", "tokens", "unpriced_calls"):
        rows[name] = spent[name].fillna(0).astype("int64")
    rows["cost_usd"] = spent["cost_usd"].fillna(0.0)
    rows["iterations_done"] = iterations.groupby(SEARCH, observed=True)["iteration"].max()
    started = spent["started_at"].where(spent["started_at"].lt(rows["first_at"]), rows["first_at"])
    rows["wall_s"] = (rows["ended_at"] - started).dt.total_seconds()
    return rows.drop(columns=["ended_at", "first_at"]).reset_index()


def _whole_numbers(run_ids: pd.Series[str], known: Mapping[Any, object]) -> pd.Series[int]:
    return pd.Series([known.get(run_id) for run_id in run_ids], index=run_ids.index, dtype="Int64")
