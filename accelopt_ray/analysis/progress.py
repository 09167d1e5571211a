"""How a search advances: best so far, evaluation by evaluation, iteration by iteration, dollar by dollar."""

from __future__ import annotations

import numpy as np
import pandas as pd

SEARCH = ["run_id", "task"]
"""Key of one search."""

BEST_SO_FAR_COLUMNS = (
    *SEARCH,
    "iteration",
    "ended_at",
    "baseline_latency_ms",
    "percent_of_peak",
    "simulated",
    "latency_ms",
    "outcome",
    "answered_from",
)
"""What :func:`best_so_far` needs of ``evaluations``."""

_NOT_RUN = ("duplicate", "no_code", "cancelled")


def was_run(evaluations: pd.DataFrame) -> pd.Series[bool]:
    """Tells which evaluations took a device's time: neither known before, nor without code, nor cancelled."""
    answered = evaluations["answered_from"].fillna("").ne("").to_numpy(bool)
    skipped = evaluations["outcome"].isin(_NOT_RUN).to_numpy(bool)
    return pd.Series(~answered & ~skipped, index=evaluations.index)


def correct_latency_ms(evaluations: pd.DataFrame) -> pd.Series[float]:
    """Latency in ms of correct kernels, NaN for all others: a kernel that is wrong is not fast."""
    return evaluations["latency_ms"].where(evaluations["outcome"].eq("correct").to_numpy(bool))


def best_so_far(evaluations: pd.DataFrame, llm_calls: pd.DataFrame | None = None) -> pd.DataFrame:
    """Follows the best kernel of each search through its evaluations.

    Args:
        evaluations: ``evaluations`` of any number of runs, :data:`BEST_SO_FAR_COLUMNS` at least.
        llm_calls: ``llm_calls`` of the same runs, to add what had been spent.

    Returns:
        One row for each evaluation, ordered by run, task and time, with ``run_id``, ``task``, ``iteration``,
        ``ended_at``, ``evaluations`` (how many evaluations the search had run by then; the baseline is not counted),
        ``latency_ms`` (of this one, NaN unless correct), ``best_latency_ms``, ``best_speedup`` over the baseline,
        ``best_percent_of_peak``, ``improved`` (whether this one is the new best), ``simulated``, and with calls
        ``cost_usd`` and ``tokens`` of all calls that had ended by then.
    """
    columns = [*SEARCH, "iteration", "ended_at", "baseline_latency_ms", "percent_of_peak", "simulated"]
    frame = evaluations[columns].copy()
    frame["latency_ms"] = correct_latency_ms(evaluations)
    frame["ran"] = was_run(evaluations)
    frame["search"] = frame.groupby(SEARCH, sort=True, observed=True).ngroup()
    frame = frame.sort_values(["search", "ended_at"], kind="stable", ignore_index=True)
    groups = frame.groupby("search", sort=False)
    frame["evaluations"] = (groups["ran"].cumsum() - groups["ran"].transform("first")).astype("int64")
    best = groups["latency_ms"].cummin()
    frame["best_latency_ms"] = best.groupby(frame["search"], sort=False).ffill()
    frame["improved"] = frame["latency_ms"].notna() & frame["latency_ms"].lt(
        frame.groupby("search", sort=False)["best_latency_ms"].shift().fillna(np.inf)
    )
    baseline = groups["baseline_latency_ms"].transform("first")
    frame["best_speedup"] = baseline / frame["best_latency_ms"]
    peak = frame["percent_of_peak"].where(frame["improved"])
    frame["best_percent_of_peak"] = peak.groupby(frame["search"], sort=False).ffill()
    if llm_calls is not None:
        frame = _with_spending(frame, llm_calls)
    kept = ["iteration", "ended_at", "evaluations", "latency_ms", "best_latency_ms", "best_speedup"]
    spent = ["cost_usd", "tokens"] if llm_calls is not None else []
    return frame[[*SEARCH, *kept, "best_percent_of_peak", "improved", "simulated", *spent]]


def _with_spending(frame: pd.DataFrame, llm_calls: pd.DataFrame) -> pd.DataFrame:
    """Adds the running sums of dollars and tokens over the calls that had ended at each row's time."""
    calls = pd.DataFrame(
        {
            "run_id": llm_calls["run_id"],
            "task": llm_calls["task"],
            "time": call_ended_at(llm_calls),
            "cost_usd": llm_calls["cost_usd"].fillna(0.0),
            "tokens": (llm_calls["prompt_tokens"].fillna(0) + llm_calls["completion_tokens"].fillna(0)).astype("int64"),
        }
    )
    keys = frame[[*SEARCH, "search"]].drop_duplicates()
    calls = calls.merge(keys, on=SEARCH, how="inner").dropna(subset=["time"]).sort_values("time", kind="stable")
    sums = calls.groupby("search", sort=False)[["cost_usd", "tokens"]].cumsum()
    spent = pd.DataFrame({"search": calls["search"], "time": calls["time"], **{name: sums[name] for name in sums}})
    timed = frame.assign(row=np.arange(len(frame)), time=frame["ended_at"]).dropna(subset=["time"])
    joined = pd.merge_asof(timed.sort_values("time", kind="stable"), spent, on="time", by="search").set_index("row")
    for name in ("cost_usd", "tokens"):
        frame[name] = joined[name].reindex(np.arange(len(frame))).fillna(0)
    return frame


def call_ended_at(llm_calls: pd.DataFrame) -> pd.Series[pd.Timestamp]:
    """When each call's reply was complete: start plus ``latency_s``, in UTC."""
    seconds = llm_calls["latency_s"].fillna(0.0).astype("float64")
    return llm_calls["started_at"] + pd.to_timedelta((seconds * 1e6).round(), unit="us").astype("timedelta64[us]")


def frontier(points: pd.DataFrame, by: str = "cost_usd") -> pd.DataFrame:
    """Finds what was never beaten: for each task, points with more speed-up than all that cost as little or less.

    Args:
        points: Rows of :func:`best_so_far`.
        by: Column that counts as cost, ``cost_usd``, ``tokens`` or ``evaluations``.

    Returns:
        The points on the frontier, by task and rising cost.

    Raises:
        ValueError: There is no such column.
    """
    if by not in points.columns:
        raise ValueError(f"no column {by!r} to weigh cost by")
    ordered = points.dropna(subset=["best_speedup"]).sort_values(
        ["task", by, "best_speedup"], ascending=[True, True, False], kind="stable"
    )
    before = ordered.groupby("task", sort=False)["best_speedup"].cummax()
    previous = before.groupby(ordered["task"], sort=False).shift()
    return ordered[ordered["best_speedup"].gt(previous.fillna(0.0))].reset_index(drop=True)


def iteration_progress(evaluations: pd.DataFrame, selections: pd.DataFrame) -> pd.DataFrame:
    """Sums up each iteration of each search.

    Returns:
        ``run_id``, ``task``, ``iteration``, ``evaluations`` (rows), ``correct``, ``best_speedup`` (over the baseline,
        by any kernel up to this iteration), and of the beam that the iteration handed on ``beam_best_speedup``,
        ``beam_worst_speedup``, ``beam_mean_speedup`` (NaN where no beam was recorded), ``simulated``.
    """
    keys = [*SEARCH, "iteration"]
    frame = evaluations[[*keys, "baseline_latency_ms", "simulated"]].copy()
    frame["latency_ms"] = correct_latency_ms(evaluations)
    frame["correct"] = evaluations["outcome"].eq("correct").to_numpy(bool)
    grouped = frame.groupby(keys, sort=True, observed=True).agg(
        evaluations=("correct", "size"),
        correct=("correct", "sum"),
        latency_ms=("latency_ms", "min"),
        simulated=("simulated", "max"),
    )
    baseline = frame.groupby(SEARCH, observed=True)["baseline_latency_ms"].first().rename("baseline_ms")
    rows = grouped.reset_index().merge(baseline.reset_index(), on=SEARCH, how="left")
    rows["best_speedup"] = rows["baseline_ms"] / rows.groupby(SEARCH)["latency_ms"].cummin()
    rows["best_speedup"] = rows.groupby(SEARCH)["best_speedup"].ffill()
    beam = (
        selections.dropna(subset=["latency_ms"])
        .groupby(keys, observed=True)["latency_ms"]
        .agg(beam_best="min", beam_worst="max", beam_mean="mean")
    )
    rows = rows.merge(beam.reset_index(), on=keys, how="left")
    for name in ("best", "worst", "mean"):
        rows[f"beam_{name}_speedup"] = rows["baseline_ms"] / rows[f"beam_{name}"]
    return rows.drop(columns=["beam_best", "beam_worst", "beam_mean", "baseline_ms", "latency_ms"])
