"""The experience memory: how full it was, and what became of plans that had seen it."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc


def memory_use(evaluations: pd.DataFrame, plans: pd.DataFrame) -> pd.DataFrame:
    """Joins each attempt with the experience its planner was shown.

    Returns:
        One row for each attempt at a plan: ``run_id``, ``task``, ``iteration``, ``candidate_id``, ``plan_id``,
        ``memory_items`` (items shown), ``outcome``, ``speedup_vs_parent`` (NaN unless correct), ``simulated``.
    """
    shown = plans[["run_id", "plan_id"]].assign(memory_items=_lengths(plans["memory_item_ids"]))
    attempts = evaluations.dropna(subset=["call_id"])
    columns = ["run_id", "task", "iteration", "candidate_id", "plan_id", "outcome", "speedup_vs_parent", "simulated"]
    joined = attempts[columns].merge(shown.drop_duplicates(["run_id", "plan_id"]), on=["run_id", "plan_id"], how="left")
    joined["memory_items"] = joined["memory_items"].fillna(0).astype("int64")
    return joined


def memory_size(memory_items: pd.DataFrame, iterations: pd.DataFrame) -> pd.DataFrame:
    """Counts the items that each search's memory held at the end of each iteration.

    Returns:
        ``run_id``, ``task``, ``iteration``, ``positive``, ``negative``.
    """
    entered = memory_items[memory_items["evicted_iteration"].isna()]
    left = memory_items[memory_items["evicted_iteration"].notna()]
    leaving = left[["run_id", "item_id", "evicted_iteration"]].rename(columns={"evicted_iteration": "left_in"})
    items = entered.drop(columns="evicted_iteration").merge(
        leaving.drop_duplicates(["run_id", "item_id"]), on=["run_id", "item_id"], how="left"
    )
    steps = iterations[["run_id", "task", "iteration"]].drop_duplicates()
    pairs = steps.merge(
        items[["run_id", "task", "kind", "iteration", "left_in"]].rename(columns={"iteration": "entered_in"}),
        on=["run_id", "task"],
        how="left",
    )
    inside = pairs["entered_in"].le(pairs["iteration"]) & (
        pairs["left_in"].isna() | pairs["left_in"].gt(pairs["iteration"])
    )
    held = inside.fillna(False).to_numpy(bool)
    pairs["positive"] = held & pairs["kind"].eq("positive").to_numpy(bool)
    pairs["negative"] = held & pairs["kind"].eq("negative").to_numpy(bool)
    keys = ["run_id", "task", "iteration"]
    return pairs.groupby(keys, observed=True)[["positive", "negative"]].sum().reset_index()


def _lengths(lists: pd.Series[Any]) -> pd.Series[int]:
    if lists.empty:  # Arrow gives an empty column of lists the type of nothing
        return pd.Series(0, index=lists.index, dtype="int64")
    lengths = pc.list_value_length(pa.chunked_array([pa.array(lists)])).fill_null(0)
    return pd.Series(lengths.to_numpy().astype("int64"), index=lists.index)
