"""Descent: how the best kernel came about, step by step."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from accelopt_ray.analysis.trajectory import Trajectory

_SENTENCE_WORDS = 4
"""A line of fewer words is taken for a heading, as long as there is a longer one."""


@dataclass(frozen=True)
class Step:
    """One step of a descent; the first is the baseline, which has neither plan nor diff.

    Attributes:
        candidate_id: The kernel.
        parent_candidate_id: The kernel it was made from; empty for the baseline.
        iteration: Iteration in which it was made.
        latency_ms: Its latency in milliseconds.
        speedup_vs_parent: Parent's latency over its own; 1 for the baseline.
        speedup_vs_baseline: Baseline's latency over its own.
        percent_of_peak: Roofline time over latency, in percent; None where unknown.
        plan_text: The plan that it carries out.
        diff: Unified diff of parent and kernel.
        source: The kernel's text; empty if it was not recorded.
        source_sha256: Its hash.
        simulated: Whether the latency is a prediction.
    """

    candidate_id: str
    parent_candidate_id: str
    iteration: int
    latency_ms: float
    speedup_vs_parent: float
    speedup_vs_baseline: float
    percent_of_peak: float | None
    plan_text: str
    diff: str
    source: str
    source_sha256: str
    simulated: bool


def lineage(trajectory: Trajectory, run_id: str, task: str) -> list[Step]:
    """Follows the best kernel of a search back to the baseline.

    Returns:
        Steps from the baseline to the best kernel. It is the baseline alone if nothing faster was found.

    Raises:
        UserError: The search has no correct kernel.
    """
    evaluations = trajectory.evaluations
    rows = evaluations[evaluations["run_id"].eq(run_id) & evaluations["task"].eq(task)]
    valid = rows[rows["outcome"].eq("correct") & rows["latency_ms"].notna()]
    if valid.empty:
        raise UserError(f"run {run_id} has no correct kernel for task {task}")
    best = str(valid.sort_values("latency_ms", kind="stable")["candidate_id"].iloc[0])
    chain = ancestry(rows, best)
    # A kernel that was measured again counts with its fastest valid measurement, as the best of all does.
    measured = valid.sort_values("latency_ms", kind="stable").drop_duplicates("candidate_id").set_index("candidate_id")
    plans = trajectory.plans[trajectory.plans["run_id"].eq(run_id)].drop_duplicates("plan_id")
    plan_texts = plans.set_index("plan_id")["plan_text"]
    sources = trajectory.sources[trajectory.sources["run_id"].eq(run_id)].drop_duplicates("source_sha256")
    source_texts = sources.set_index("source_sha256")["source"]
    steps: list[Step] = []
    for candidate_id in chain:
        if candidate_id not in measured.index:
            continue
        row = measured.loc[candidate_id]
        source = _text(source_texts.get(row["source_sha256"]))
        parent = steps[-1] if steps else None
        latency_ms = float(row["latency_ms"])
        steps.append(
            Step(
                candidate_id=candidate_id,
                parent_candidate_id=parent.candidate_id if parent else "",
                iteration=int(row["iteration"]),
                latency_ms=latency_ms,
                speedup_vs_parent=parent.latency_ms / latency_ms if parent else 1.0,
                speedup_vs_baseline=steps[0].latency_ms / latency_ms if steps else 1.0,
                percent_of_peak=None if pd.isna(row["percent_of_peak"]) else float(row["percent_of_peak"]),
                plan_text=_text(plan_texts.get(row["plan_id"])) if parent else "",
                diff=source_diff(parent.source, source, parent.candidate_id, candidate_id) if parent else "",
                source=source,
                source_sha256=_text(row["source_sha256"]),
                simulated=not pd.isna(row["simulated"]) and bool(row["simulated"]),
            )
        )
    return steps


def ancestry(evaluations: pd.DataFrame, candidate_id: str) -> list[str]:
    """Returns a candidate and its ancestors, the eldest first.

    Args:
        evaluations: ``evaluations`` of one search.
        candidate_id: The candidate.
    """
    known = evaluations.dropna(subset=["parent_candidate_id"]).drop_duplicates("candidate_id")
    parents = dict(zip(known["candidate_id"], known["parent_candidate_id"], strict=True))
    chain = [candidate_id]
    while (parent := parents.get(chain[-1])) and parent not in chain:
        chain.append(str(parent))
    return chain[::-1]


def source_diff(before: str, after: str, before_name: str, after_name: str, context_lines: int = 3) -> str:
    """Returns the unified diff of two texts, without a final newline."""
    lines = difflib.unified_diff(
        before.splitlines(), after.splitlines(), before_name, after_name, lineterm="", n=context_lines
    )
    return "\n".join(lines)


def plan_title(text: str, characters: int = 110) -> str:
    """Returns what a plan is about: the first sentence of its first line that is more than a heading, shortened."""
    lines = [line.strip().lstrip("#*-0123456789.) ").strip() for line in text.splitlines()]
    filled = [line for line in lines if line]
    unfinished = [line for line in filled if not line.endswith(":")]
    telling = [line for line in unfinished if len(line.split()) >= _SENTENCE_WORDS] or unfinished or filled
    if not telling:
        return ""
    sentence = telling[0].replace("**", "").split(". ")[0].rstrip(".")
    return sentence if len(sentence) <= characters else sentence[: characters - 1].rstrip() + "…"


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
