"""What a search holds: kernels, plans, and what came of trying them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from accelopt_ray.evaluation.records import EvaluationResult
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.search.canonical import KernelSource


@dataclass(frozen=True)
class Candidate:
    """A correct kernel that can be carried in a beam.

    Attributes:
        candidate_id: Unique within the run.
        source: The kernel.
        result: Its latest valid measurement.
        parent_id: Candidate it was made from; empty for the baseline.
        plan_id: Plan it carries out; empty for the baseline.
    """

    candidate_id: str
    source: KernelSource
    result: EvaluationResult
    parent_id: str = ""
    plan_id: str = ""

    @property
    def latency_ms(self) -> float:
        """Latency of the latest valid measurement, in milliseconds."""
        if self.result.latency_ms is None:
            raise ValueError(f"candidate {self.candidate_id} has no latency")
        return self.result.latency_ms

    def measured_again(self, result: EvaluationResult) -> Candidate:
        """Returns the candidate with a newer measurement, or unchanged if that one failed.

        A kernel that was correct before stays so: one bad measurement says more about the machine than about the
        kernel, and must not take the kernel's children with it.
        """
        return replace(self, result=result) if is_valid(result) else self


@dataclass(frozen=True)
class Plan:
    """One planner sample.

    Attributes:
        plan_id: Unique within the run.
        slot: Beam slot of its parent.
        index: Which of the slot's plans it is.
        parent: The candidate it would change, with this iteration's measurement.
        text: The plan; empty if the planner gave none.
        iteration: The iteration it was made in.
    """

    plan_id: str
    slot: int
    index: int
    parent: Candidate
    text: str
    iteration: int = 0


@dataclass(frozen=True)
class Attempt:
    """One implementation of a plan and what came of it.

    Attributes:
        candidate_id: Unique within the run; the candidate's own name should it prove correct.
        plan: The plan it carries out.
        index: Which of the plan's attempts it is.
        fix: How many repairs lie behind it; 0 for the executor's own.
        call_id: The model call that wrote it.
        source: The kernel; None if the reply held none.
        result: How its evaluation ended.
        evaluation_id: Its row's key in the evaluations table.
    """

    candidate_id: str
    plan: Plan
    index: int
    fix: int
    call_id: str
    source: KernelSource | None
    result: EvaluationResult
    evaluation_id: str

    @property
    def valid(self) -> bool:
        """Whether it proved correct and has a latency, so that it may compete."""
        return self.source is not None and is_valid(self.result)

    @property
    def latency_ms(self) -> float:
        """Its latency in milliseconds; infinite unless :attr:`valid`."""
        return self.result.latency_ms if self.valid and self.result.latency_ms is not None else math.inf

    @property
    def speedup(self) -> float:
        """Its parent's latency, as measured in this iteration, over its own; 0 unless :attr:`valid`."""
        return self.plan.parent.latency_ms / self.latency_ms if self.valid else 0.0

    def candidate(self) -> Candidate:
        """Returns the candidate it has become.

        Raises:
            ValueError: It is not valid.
        """
        if self.source is None or not self.valid:
            raise ValueError(f"attempt {self.candidate_id} is no candidate: {self.result.outcome}")
        return Candidate(self.candidate_id, self.source, self.result, self.plan.parent.candidate_id, self.plan.plan_id)


@dataclass(frozen=True)
class PlanGroup:
    """The attempts at one plan, in order."""

    plan: Plan
    attempts: Sequence[Attempt] = field(default_factory=tuple)

    @property
    def valid_attempts(self) -> list[Attempt]:
        """Attempts that may compete, in order."""
        return [attempt for attempt in self.attempts if attempt.valid]


_NOT_THE_KERNELS = frozenset({"worker_lost", "worker_stuck", "device_fault", "no_core"})
"""Reasons for the end of an evaluation that lie with the machines."""


def is_void(result: EvaluationResult) -> bool:
    """Whether an evaluation ended without a verdict on its kernel, so that it has yet to be evaluated."""
    return result.outcome is EvaluationOutcome.CANCELLED or result.reason in _NOT_THE_KERNELS


def is_valid(result: EvaluationResult) -> bool:
    """Whether a result is correct and carries a usable latency."""
    latency = result.latency_ms
    return (
        result.outcome is EvaluationOutcome.CORRECT and latency is not None and math.isfinite(latency) and latency > 0
    )
