"""Where a run stands at this moment, read from its folder alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import pandas as pd

from accelopt_ray.analysis.progress import call_ended_at
from accelopt_ray.analysis.trajectory import Trajectory, load

RATE_WINDOW = timedelta(minutes=5)
FAILURES_SHOWN = 4


@dataclass(frozen=True)
class Standing:
    """A kernel's standing.

    Attributes:
        candidate_id: The kernel.
        latency_ms: Its latency in milliseconds.
        speedup: Baseline's latency over its own; None without a baseline.
    """

    candidate_id: str
    latency_ms: float
    speedup: float | None


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Attributes:
        run_id: The run.
        task: Its task, or several joined by commas.
        device: Device that evaluates.
        state: ``running``, ``finished``, ``stopped``, ``unfinished`` (not known which) or ``empty``.
        iterations_done: Iterations whose end is recorded.
        iterations_planned: Iterations asked for; None if not known.
        baseline: The baseline, once it proved correct.
        best: The fastest correct kernel.
        best_percent_of_peak: Its percent of peak; None if not known.
        beam: The last beam, best first.
        outcomes: Evaluations by outcome, the most frequent first.
        waiting: Kernels that a model has written and whose evaluation is not recorded yet.
        calls_under_way: Model calls that were made and whose end is not recorded yet.
        evaluations_per_minute: Over the last minutes that have rows.
        calls_per_minute: Model calls that ended, over the same.
        calls: Model calls so far.
        failed_calls: Of these, not ``ok``.
        tokens: Prompt and completion tokens.
        cost_usd: What the calls cost.
        failures: First lines of the last failures, the latest first.
        last_row_at: When the last row was recorded; None without rows.
        simulated: Whether latencies are predictions.
    """

    run_id: str
    task: str
    device: str
    state: str
    iterations_done: int
    iterations_planned: int | None
    baseline: Standing | None
    best: Standing | None
    best_percent_of_peak: float | None
    beam: Sequence[Standing]
    outcomes: Sequence[tuple[str, int]]
    waiting: int
    calls_under_way: int
    evaluations_per_minute: float
    calls_per_minute: float
    calls: int
    failed_calls: int
    tokens: int
    cost_usd: float
    failures: Sequence[str]
    last_row_at: datetime | None
    simulated: bool


def look(location: str, run_id: str) -> Snapshot:
    """Reads where a run stands now.

    Args:
        location: Folder or URI of the run, or of the sweep that it belongs to.
        run_id: Which run.

    Raises:
        UserError: It has written nothing yet, or there is no such run.
    """
    return snapshot(load(location, run_ids=[run_id]), run_id)


def snapshot(trajectory: Trajectory, run_id: str) -> Snapshot:
    """Reads where a run stands.

    Args:
        trajectory: Freshly loaded, best with this run alone.
        run_id: The run.
    """
    evaluations = trajectory.evaluations[trajectory.evaluations["run_id"].eq(run_id)].sort_values("ended_at")
    calls = trajectory.llm_calls[trajectory.llm_calls["run_id"].eq(run_id)]
    states = trajectory.states()
    state = states[states["run_id"].eq(run_id)]
    row = state.iloc[0] if len(state) else None
    valid = evaluations[evaluations["outcome"].eq("correct")].dropna(subset=["latency_ms"])
    first = valid[valid["iteration"].eq(0)]
    baseline_ms = float(first["latency_ms"].iloc[0]) if len(first) else None
    ranked = valid.sort_values("latency_ms", kind="stable")
    ended = call_ended_at(calls)
    last = max([time for time in (evaluations["ended_at"].max(), ended.max()) if pd.notna(time)], default=None)
    evaluated = set(evaluations["call_id"].dropna())
    written = calls[calls["role"].isin(["executor", "fixer"]) & calls["outcome"].eq("ok")]
    percent = ranked["percent_of_peak"].iloc[0] if len(ranked) else None
    tokens = calls["prompt_tokens"].fillna(0).sum() + calls["completion_tokens"].fillna(0).sum()
    return Snapshot(
        run_id=run_id,
        task=", ".join(dict.fromkeys(evaluations["task"].dropna())) or "?",
        device=str(row["device"]) if row is not None else "?",
        state=str(row["state"]) if row is not None else "empty",
        iterations_done=int(row["iterations_done"]) if row is not None and pd.notna(row["iterations_done"]) else 0,
        iterations_planned=(
            int(row["iterations_planned"]) if row is not None and pd.notna(row["iterations_planned"]) else None
        ),
        baseline=_standing(first, 0, baseline_ms),
        best=_standing(ranked, 0, baseline_ms),
        best_percent_of_peak=None if percent is None or pd.isna(percent) else float(percent),
        beam=_beam(trajectory, run_id, baseline_ms),
        outcomes=[(str(name), int(count)) for name, count in evaluations["outcome"].value_counts().items()],
        waiting=int((~written["call_id"].isin(evaluated)).sum()),
        calls_under_way=_under_way(trajectory, run_id),
        evaluations_per_minute=_rate(evaluations["ended_at"], last),
        calls_per_minute=_rate(ended, last),
        calls=len(calls),
        failed_calls=int(calls["outcome"].ne("ok").sum()),
        tokens=int(tokens),
        cost_usd=float(calls["cost_usd"].sum()),
        failures=_failures(evaluations, calls),
        last_row_at=None if last is None else last.to_pydatetime(),
        simulated=bool(evaluations["simulated"].fillna(False).any()),
    )


def _standing(rows: pd.DataFrame, place: int, baseline_ms: float | None) -> Standing | None:
    if len(rows) <= place:
        return None
    latency_ms = float(rows["latency_ms"].iloc[place])
    return Standing(
        str(rows["candidate_id"].iloc[place]), latency_ms, baseline_ms / latency_ms if baseline_ms else None
    )


def _beam(trajectory: Trajectory, run_id: str, baseline_ms: float | None) -> list[Standing]:
    selections = trajectory.selections[trajectory.selections["run_id"].eq(run_id)]
    last = selections[selections["iteration"].eq(selections["iteration"].max())].sort_values("rank")
    known = last.dropna(subset=["latency_ms"])
    standings = [_standing(known, place, baseline_ms) for place in range(len(known))]
    return [standing for standing in standings if standing is not None]


def _under_way(trajectory: Trajectory, run_id: str) -> int:
    keys = ["call_id", "asking"]
    starts = trajectory.call_starts[trajectory.call_starts["run_id"].eq(run_id)][keys]
    ends = trajectory.llm_calls[trajectory.llm_calls["run_id"].eq(run_id)][keys]
    return int((~pd.MultiIndex.from_frame(starts).isin(pd.MultiIndex.from_frame(ends))).sum())


def _rate(times: pd.Series[pd.Timestamp], last: pd.Timestamp | None) -> float:
    """Rows a minute in the window that ends with the run's last row."""
    known = times.dropna()
    if last is None or known.empty:
        return 0.0
    recent = known[known.gt(last - RATE_WINDOW)]
    minutes = min(RATE_WINDOW, max(last - known.min(), timedelta(seconds=1))) / timedelta(minutes=1)
    return len(recent) / minutes


def _failures(evaluations: pd.DataFrame, calls: pd.DataFrame) -> list[str]:
    bad = evaluations[~evaluations["outcome"].isin(["correct", "duplicate", "cancelled"])]
    lines = [
        (time, f"{candidate}: {outcome} {_first_line(text)}".rstrip())
        for time, candidate, outcome, text in bad[["ended_at", "candidate_id", "outcome", "error_text"]]
        .tail(FAILURES_SHOWN)
        .itertuples(index=False)
    ]
    failed = calls[calls["outcome"].ne("ok")].sort_values("started_at").tail(FAILURES_SHOWN)
    lines += [
        (time, f"call {call}: {outcome} {_first_line(text)}".rstrip())
        for time, call, outcome, text in failed[["started_at", "call_id", "outcome", "error_text"]].itertuples(
            index=False
        )
    ]
    known = [line for line in lines if pd.notna(line[0])]
    return [text for _, text in sorted(known, reverse=True)[:FAILURES_SHOWN]]


def _first_line(text: object) -> str:
    lines = text.strip().splitlines() if isinstance(text, str) else []
    return lines[0][:160] if lines else ""
