"""What a search records: one function for each table, with the columns of the trajectory's schema.

Rows carry ``task`` and ``iteration``; the recorder adds ``run_id`` and ``schema_version``. The search itself records
what it concludes; what it asks for is recorded by whoever provides it, before the search sees it: ``call_starts``,
``llm_calls`` and ``results``. ``runs`` and ``resumes`` are written by whoever starts a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone

from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.search.candidates import Attempt, Candidate, Plan
from accelopt_ray.search.canonical import KernelSource
from accelopt_ray.search.memory import ExperienceItem
from accelopt_ray.search.services import ModelCall, ModelReply

Row = Mapping[str, object]


def row_key(table: str, row: Row) -> str:
    """Returns what identifies a row within its table, so that a resumed search does not record it twice.

    A memory item has two rows: one when it enters and one, with ``evicted_iteration``, when it leaves.

    Raises:
        ValueError: The search does not write this table.
    """
    if table == "iterations":
        return f"{row['task']}:{row['iteration']}"
    if table == "selections":
        return f"{row['task']}:{row['iteration']}:{row['rank']}"
    if table == "memory_items":
        return f"{row['item_id']}:{'entered' if row.get('evicted_iteration') is None else 'evicted'}"
    column = {"plans": "plan_id", "sources": "source_sha256", "evaluations": "evaluation_id"}.get(table)
    if column is None:
        raise ValueError(f"the search does not write the table {table!r}")
    return str(row[column])


def now() -> datetime:
    """Returns the present time in UTC, as timestamps are stored."""
    return datetime.now(timezone.utc)


def call_start_row(call: ModelCall, asking: int, started_at: datetime) -> dict[str, object]:
    """A call that is about to be made for the ``asking``-th time, from 0."""
    return {
        "task": call.task,
        "iteration": call.iteration,
        "call_id": call.call_id,
        "asking": asking,
        "role": call.role,
        "started_at": started_at,
    }


def call_row(call: ModelCall, reply: ModelReply, asking: int, started_at: datetime) -> dict[str, object]:
    """A finished call; arguments as in :func:`call_start_row`."""
    row = asdict(call)
    del row["affinity"]
    return {**row, **asdict(reply), "outcome": str(reply.outcome), "asking": asking, "started_at": started_at}


def result_row(job: EvaluationJob, result: EvaluationResult) -> dict[str, object]:
    """A finished evaluation, before anything is concluded from it."""
    return {
        "task": job.task_name,
        "iteration": job.iteration,
        "evaluation_id": job.evaluation_id,
        "outcome": str(result.outcome),
        "result_json": result.to_json(),
        "ended_at": now(),
    }


def iteration_row(
    task: str,
    iteration: int,
    started_at: datetime,
    ended_at: datetime,
    beam: Sequence[Candidate],
    counted: Sequence[Attempt] | None = None,
) -> dict[str, object]:
    """An ended iteration, the beam it hands on and, where it did not wait for all, the attempts it counted."""
    return {
        "task": task,
        "iteration": iteration,
        "started_at": started_at,
        "ended_at": ended_at,
        "beam_candidate_ids": [candidate.candidate_id for candidate in beam],
        "counted_candidate_ids": None if counted is None else [attempt.candidate_id for attempt in counted],
    }


def plan_row(
    task: str, iteration: int, plan: Plan, call_id: str, memory_item_ids: Sequence[str], repeats_plan_id: str | None
) -> dict[str, object]:
    """A plan, the experience items its planner was shown, and the plan it repeats, if any."""
    return {
        "task": task,
        "iteration": iteration,
        "plan_id": plan.plan_id,
        "parent_candidate_id": plan.parent.candidate_id,
        "call_id": call_id,
        "sample_index": plan.index,
        "plan_text": plan.text,
        "memory_item_ids": list(memory_item_ids),
        "repeats_plan_id": repeats_plan_id,
    }


def source_row(task: str, iteration: int, source: KernelSource) -> dict[str, object]:
    """A kernel's text, once for each content."""
    return {"task": task, "iteration": iteration, "source_sha256": source.sha256, "source": source.text}


def attempt_row(task: str, iteration: int, attempt: Attempt, baseline_latency_ms: float | None) -> dict[str, object]:
    """An attempt and how it ended; latency and speed-ups are None where there are none."""
    parent_latency_ms = attempt.plan.parent.latency_ms
    return {
        **_keys(task, iteration, attempt.evaluation_id, attempt.candidate_id, attempt.source),
        "parent_candidate_id": attempt.plan.parent.candidate_id,
        "plan_id": attempt.plan.plan_id,
        "call_id": attempt.call_id,
        "attempt_index": attempt.index,
        **_result(attempt.result, baseline_latency_ms, parent_latency_ms),
    }


def measurement_row(
    task: str, iteration: int, candidate: Candidate, result: EvaluationResult, baseline_latency_ms: float | None
) -> dict[str, object]:
    """The baseline's evaluation, or a beam member's repeated measurement: no call and no plan led to it."""
    return {
        **_keys(task, iteration, result.evaluation_id, candidate.candidate_id, candidate.source),
        "parent_candidate_id": candidate.parent_id or None,
        "plan_id": candidate.plan_id or None,
        "call_id": None,
        "attempt_index": None,
        **_result(result, baseline_latency_ms, None),
    }


def memory_row(task: str, item: ExperienceItem, evicted_iteration: int | None = None) -> dict[str, object]:
    """An experience item as it enters the memory, or as it leaves."""
    return {
        "task": task,
        "iteration": item.iteration,
        "item_id": item.item_id,
        "kind": str(item.pair.kind),
        "slow_candidate_id": item.pair.slow_candidate_id,
        "fast_candidate_id": item.pair.fast_candidate_id,
        "speedup": item.pair.speedup,
        "title": item.title,
        "summary_text": item.text,
        "call_id": item.call_id or None,
        "origin": item.origin or None,
        "evicted_iteration": evicted_iteration,
    }


def selection_row(
    task: str, iteration: int, rank: int, candidate: Candidate, latency_ms: float | None, rule: str
) -> dict[str, object]:
    """A place in the next beam; ``latency_ms`` is None for one that stands in for failed children."""
    return {
        "task": task,
        "iteration": iteration,
        "rank": rank,
        "candidate_id": candidate.candidate_id,
        "latency_ms": latency_ms,
        "rule": rule,
    }


def _keys(
    task: str, iteration: int, evaluation_id: str, candidate_id: str, source: KernelSource | None
) -> dict[str, object]:
    return {
        "task": task,
        "iteration": iteration,
        "evaluation_id": evaluation_id,
        "candidate_id": candidate_id,
        "source_sha256": source.sha256 if source is not None else None,
        "canonical_sha256": source.canonical_sha256 if source is not None else None,
    }


def _result(
    result: EvaluationResult, baseline_latency_ms: float | None, parent_latency_ms: float | None
) -> dict[str, object]:
    latency_ms = result.latency_ms
    return {
        "outcome": str(result.outcome),
        "reason": result.reason,
        "error_text": result.error_text,
        "toolchain_output": result.toolchain_output or None,
        "check": result.check,
        "check_stage": str(result.check_stage),
        "precision_tier": result.precision_tier,
        "device": result.device,
        "simulated": result.simulated,
        "core": result.core,
        "latency_ms": latency_ms,
        "latency_samples_ms": list(result.latency_samples_ms),
        "latency_spread": result.latency_spread,
        "baseline_latency_ms": baseline_latency_ms,
        "parent_latency_ms": parent_latency_ms,
        # A kernel that is wrong is not fast: only correct ones have a speed-up.
        "speedup_vs_parent": _ratio(parent_latency_ms, latency_ms) if result.correct else None,
        "speedup_vs_baseline": _ratio(baseline_latency_ms, latency_ms) if result.correct else None,
        "percent_of_peak": result.percent_of_peak,
        "prediction_confidence": result.prediction_confidence,
        "counters": dict(result.counters),
        "compile_s": result.compile_s,
        "run_s": result.run_s,
        "queue_s": result.queue_s,
        "answered_from": result.answered_from,
        "fingerprint_sha256": result.fingerprint_sha256,
        "ended_at": now(),
    }


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under is not None and under > 0 else None
