"""What model calls took: tokens, dollars, time."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd


def costs(llm_calls: pd.DataFrame) -> pd.DataFrame:
    """Sums calls up by run, task, role and model.

    Returns:
        ``run_id``, ``task``, ``role``, ``model``, ``calls``, ``failed_calls``, ``retries``, ``prompt_tokens``,
        ``cached_tokens`` (of these), ``completion_tokens``, ``reasoning_tokens`` (of these), ``cost_usd``,
        ``unpriced_calls`` (calls without a known price, which ``cost_usd`` counts as 0), ``mean_latency_s``.
    """
    frame = llm_calls.assign(
        failed=llm_calls["outcome"].ne("ok").to_numpy(bool),
        unpriced=(~llm_calls["price_known"].fillna(True)).to_numpy(bool),
    )
    sums = frame.groupby(["run_id", "task", "role", "model"], observed=True, dropna=False, sort=True).agg(
        calls=("call_id", "size"),
        failed_calls=("failed", "sum"),
        retries=("retries", "sum"),
        prompt_tokens=("prompt_tokens", "sum"),
        cached_tokens=("cached_tokens", "sum"),
        completion_tokens=("completion_tokens", "sum"),
        reasoning_tokens=("reasoning_tokens", "sum"),
        cost_usd=("cost_usd", "sum"),
        unpriced_calls=("unpriced", "sum"),
        mean_latency_s=("latency_s", "mean"),
    )
    return sums.reset_index()


def spending(llm_calls: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Sums calls up by some of their columns.

    Args:
        llm_calls: Calls of any number of runs.
        by: Columns such as ``role``, ``model``, ``iteration``; none for one row of totals.

    Returns:
        Those columns, then ``calls``, ``failed_calls``, ``prompt_tokens``, ``cached_tokens`` (of these),
        ``completion_tokens``, ``reasoning_tokens`` (of these), ``cost_usd``, ``unpriced_calls``, ``estimated_calls``
        (whose tokens the endpoint did not count) and ``lost_calls`` (in flight at a kill).
    """
    frame = llm_calls.assign(
        everything="all",
        failed=llm_calls["outcome"].ne("ok").to_numpy(bool),
        lost=llm_calls["outcome"].eq("lost").to_numpy(bool),
        unpriced=(~llm_calls["price_known"].fillna(True)).to_numpy(bool),
        estimated=llm_calls["usage_estimated"].fillna(False).to_numpy(bool),
    )
    groups = frame.groupby(list(by) or ["everything"], observed=True, dropna=False, sort=True)
    sums = groups.agg(
        calls=("call_id", "size"),
        failed_calls=("failed", "sum"),
        prompt_tokens=("prompt_tokens", "sum"),
        cached_tokens=("cached_tokens", "sum"),
        completion_tokens=("completion_tokens", "sum"),
        reasoning_tokens=("reasoning_tokens", "sum"),
        cost_usd=("cost_usd", "sum"),
        unpriced_calls=("unpriced", "sum"),
        estimated_calls=("estimated", "sum"),
        lost_calls=("lost", "sum"),
    )
    return sums.reset_index(drop=not by)


def price_of_speedup(summary: pd.DataFrame) -> pd.DataFrame:
    """What each search paid for its speed-up.

    Args:
        summary: As :meth:`~accelopt_ray.analysis.trajectory.Trajectory.summary` gives it.

    Returns:
        ``run_id``, ``task``, ``speedup``, ``simulated``, ``cost_usd`` and ``usd_per_point``: dollars for each
        hundredth by which the best kernel is faster than the baseline, NaN if it is not.
    """
    frame = summary[["run_id", "task", "speedup", "simulated", "cost_usd"]].copy()
    points = (frame["speedup"] - 1.0) * 100.0
    frame["usd_per_point"] = frame["cost_usd"].div(points.where(points > 0))
    return frame
