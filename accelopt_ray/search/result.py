"""How a search ended and what it has come to."""

from __future__ import annotations

from dataclasses import dataclass

from accelopt_ray.evaluation.records import EvaluationResult
from accelopt_ray.outcome import StrEnum
from accelopt_ray.search.candidates import Candidate
from accelopt_ray.search.memory import ExperienceItem


class SearchStatus(StrEnum):
    """How a search ended."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    BASELINE_FAILED = "baseline_failed"
    NO_MODEL_REPLY = "no_model_reply"


@dataclass(frozen=True)
class SearchResult:
    """What a search has come to.

    Attributes:
        task: The task's name.
        status: How it ended.
        reason: One sentence where the status does not say it all.
        baseline: The baseline's evaluation.
        best: The fastest correct candidate of the whole search, the baseline included; None if that failed.
        beam: The last beam.
        memory: The last experience memory.
        iterations: Iterations that were run to their end.
        evaluations: Evaluations made, repeated measurements included and duplicates left out.
        model_calls: Model calls finished, failed ones included.
        cost_usd: What they cost, in US dollars, and what lost calls are taken to have cost.
    """

    task: str
    status: SearchStatus
    reason: str
    baseline: EvaluationResult
    best: Candidate | None
    beam: tuple[Candidate, ...]
    memory: tuple[ExperienceItem, ...]
    iterations: int
    evaluations: int
    model_calls: int
    cost_usd: float

    @property
    def speedup(self) -> float:
        """Baseline's latency over the best one; 1 if nothing faster was found or the baseline failed."""
        if self.best is None or self.baseline.latency_ms is None:
            return 1.0
        return self.baseline.latency_ms / self.best.latency_ms
