"""What model calls took: tokens, dollars, time."""

from __future__ import annotations

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
