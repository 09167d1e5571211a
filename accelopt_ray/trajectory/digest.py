"""When two trajectories are the same: a hash over the columns that follow from the search alone.

Left out are times and durations, money and token counts of the calls, who evaluated, whether a store of earlier
evaluations answered, and error texts (of two copies of one kernel the one that arrives first is evaluated, and its text
may name that copy's variables). A call that was asked several times counts with its last reply; calls that were lost
do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from accelopt_ray.outcome import CallOutcome
from accelopt_ray.trajectory.reader import read_table

DIGEST_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "iterations": ("task", "iteration", "beam_candidate_ids", "counted_candidate_ids"),
        "llm_calls": (
            "task",
            "iteration",
            "call_id",
            "role",
            "system_prompt_sha256",
            "user_prompt",
            "reply_text",
            "reasoning_text",
            "finish_reason",
            "outcome",
            "sample_index",
            "seed",
        ),
        "plans": (
            "task",
            "iteration",
            "plan_id",
            "parent_candidate_id",
            "call_id",
            "sample_index",
            "plan_text",
            "memory_item_ids",
            "repeats_plan_id",
        ),
        "sources": ("task", "iteration", "source_sha256", "source"),
        "evaluations": (
            "task",
            "iteration",
            "evaluation_id",
            "candidate_id",
            "parent_candidate_id",
            "plan_id",
            "call_id",
            "attempt_index",
            "source_sha256",
            "canonical_sha256",
            "outcome",
            "reason",
            "check",
            "check_stage",
            "precision_tier",
            "device",
            "simulated",
            "latency_ms",
            "latency_samples_ms",
            "latency_spread",
            "baseline_latency_ms",
            "parent_latency_ms",
            "speedup_vs_parent",
            "speedup_vs_baseline",
            "percent_of_peak",
            "prediction_confidence",
            "counters",
            "answered_from",
        ),
        "memory_items": (
            "task",
            "iteration",
            "item_id",
            "kind",
            "slow_candidate_id",
            "fast_candidate_id",
            "speedup",
            "title",
            "summary_text",
            "call_id",
            "evicted_iteration",
        ),
        "selections": ("task", "iteration", "rank", "candidate_id", "latency_ms", "rule"),
    }
)
"""What counts, by table. Tables that are not named say how a run went, not what it came to."""


def trajectory_digest(location: str | Path, run_id: str) -> str:
    """Returns the hash of a run's trajectory; equal for two runs that made the same search.

    Args:
        location: The run's folder or its ``trajectory`` folder.
        run_id: The run; its name is no part of the hash.

    Raises:
        UserError: The folder holds no trajectory.
    """
    digest = hashlib.sha256()
    for table in DIGEST_COLUMNS:
        for line in digest_lines(location, run_id, table):
            digest.update(f"{table} {line}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def digest_lines(location: str | Path, run_id: str, table: str) -> list[str]:
    """Returns what one table contributes, one line for each row, sorted: what to compare when two hashes differ."""
    columns = DIGEST_COLUMNS[table]
    wanted = [*columns, "asking"] if table == "llm_calls" else list(columns)
    rows: Iterable[Mapping[str, object]] = read_table(location, table, run_id, columns=wanted).to_pylist()
    if table == "llm_calls":
        rows = last_askings(rows)
    return sorted(json.dumps([_counted(name, row[name]) for name in columns], default=str) for row in rows)


def _counted(name: str, value: object) -> object:
    """A result from the store of earlier evaluations is what evaluating again would have given."""
    return "" if name == "answered_from" and str(value).startswith("store:") else value


def last_askings(rows: Iterable[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Returns each call's last finished row from rows with ``call_id``, ``outcome`` and ``asking``."""
    last: dict[object, Mapping[str, object]] = {}
    for row in rows:
        if row["outcome"] == str(CallOutcome.LOST):
            continue
        known = last.get(row["call_id"])
        if known is None or _asking(known) <= _asking(row):
            last[row["call_id"]] = row
    return list(last.values())


def _asking(row: Mapping[str, object]) -> int:
    asking = row.get("asking")
    return asking if isinstance(asking, int) else 0
