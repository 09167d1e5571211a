"""What a search asks of the world: model replies, evaluations, durable records.

The search loop is written against this protocol alone. Ray actors implement it for runs; tests implement it in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.outcome import CallOutcome


@dataclass(frozen=True)
class ModelCall:
    """One chat completion to ask for.

    Attributes:
        call_id: Unique within the run and the same whenever the same search asks again.
        role: ``planner``, ``executor``, ``summarizer`` or ``fixer``.
        system_prompt: System message.
        user_prompt: User message.
        sample_index: Which of the independent samples of this prompt it is.
        seed: Sampling seed of this call.
        affinity: Calls with equal affinity share a prompt prefix and may be routed to one replica.
        task: The task whose search asks, for the call's row.
        iteration: The iteration that asks, for the call's row.
    """

    call_id: str
    role: str
    system_prompt: str
    user_prompt: str
    sample_index: int
    seed: int
    affinity: str = ""
    task: str = ""
    iteration: int = 0


@dataclass(frozen=True)
class ModelReply:
    """A finished call. Field names and units are those of the ``llm_calls`` table.

    ``price_known`` is False when no price is known for the model, so that ``cost_usd`` is 0 for want of one.
    """

    call_id: str
    outcome: CallOutcome
    model: str = ""
    endpoint: str = ""
    reply_text: str = ""
    reasoning_text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    usage_estimated: bool = False
    cost_usd: float = 0.0
    price_known: bool = True
    latency_s: float = 0.0
    retries: int = 0
    error_text: str = ""


class Services(Protocol):
    """Everything outside the search. Methods may be awaited concurrently and complete in any order."""

    async def complete(self, call: ModelCall) -> ModelReply:
        """Returns the reply once its row is durable; a failed call is a reply whose outcome is not ``ok``."""

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        """Returns the final result; a worker's failure is retried behind this method.

        ``job.evaluation_id`` is the same whenever the same search asks again, so an implementation that keeps results
        under it never has to evaluate twice, even if the run is killed before the result's row is written.
        """

    async def record(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Adds rows to a trajectory table; returns once they are accepted (durable at the next flush)."""

    def progress(self, event: str, **values: object) -> None:
        """Tells whoever watches the run; must not block."""
