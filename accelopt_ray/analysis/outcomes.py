"""How evaluations ended, by whom and when; and in whose words they failed."""

from __future__ import annotations

import pandas as pd

MESSAGE_CHARACTERS = 160


def outcomes(evaluations: pd.DataFrame, llm_calls: pd.DataFrame) -> pd.DataFrame:
    """Counts outcomes.

    Returns:
        ``run_id``, ``task``, ``iteration``, ``model`` (that wrote the kernel; empty for baselines and repeated
        measurements), ``outcome``, ``reason``, ``count``.
    """
    models = llm_calls[["run_id", "call_id", "model"]].drop_duplicates(["run_id", "call_id"])
    frame = evaluations[["run_id", "task", "iteration", "call_id", "outcome", "reason"]].merge(
        models, on=["run_id", "call_id"], how="left"
    )
    keys = ["run_id", "task", "iteration", "model", "outcome", "reason"]
    frame = frame.fillna({"model": "", "reason": ""})
    return frame.groupby(keys, observed=True, dropna=False).size().rename("count").reset_index()


def failures(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Groups failed evaluations by what their message begins with.

    Returns:
        The most frequent first: ``outcome``, ``reason``, ``message`` (first line, shortened), ``count``,
        ``example_candidate_id``, ``example_run_id``, ``example_text``. Duplicates and cancelled evaluations, which are
        no failures, are left out.
    """
    failed = evaluations[~evaluations["outcome"].isin(["correct", "duplicate", "cancelled"])]
    text = failed["error_text"].fillna("").astype(str)
    frame = failed[["run_id", "outcome", "reason", "candidate_id"]].assign(
        reason=failed["reason"].fillna(""),
        text=text,
        message=text.str.strip().str.split("\n").str[0].str.slice(0, MESSAGE_CHARACTERS).fillna(""),
    )
    grouped = frame.groupby(["outcome", "reason", "message"], observed=True, sort=False).agg(
        count=("text", "size"),
        example_candidate_id=("candidate_id", "first"),
        example_run_id=("run_id", "first"),
        example_text=("text", "first"),
    )
    return grouped.reset_index().sort_values("count", ascending=False, kind="stable", ignore_index=True)
