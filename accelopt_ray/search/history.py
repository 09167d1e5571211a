"""What a search has already paid for: the lookup behind resuming and replaying.

A search derives the name of every call, evaluation and row from its position, so a search that starts again asks for
the same names. Whatever is found here is not asked for again and not recorded again; the search cannot tell the
difference and runs on from where the other one ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property

from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.search.rows import Row, row_key
from accelopt_ray.search.services import ModelCall, ModelReply, Services


@dataclass(frozen=True)
class History:
    """An earlier run's durable state.

    Attributes:
        replies: Finished calls by call id, failed ones included; leave out those that are to be asked again.
        evaluations: Final results by evaluation id.
        recorded: Table and :func:`~accelopt_ray.search.rows.row_key` of every row that is already stored.
        ended_iterations: Number of the last iteration that has ended, by task. What such an iteration did not ask, for
            want of budget, stays unasked.
        lost_cost_usd: What calls that never answered are taken to have cost, by task.
        elapsed_s: How long the earlier run has taken.
        counted: Candidates that each ended iteration's selection counted, by task and iteration, where it did not wait
            for all.
        owners: Candidate on record as the owner of an evaluation, by evaluation id.
        duplicates: Candidates on record as another's copy.
        repeats: The plan that each recorded plan repeats, or None, by plan id.
    """

    replies: Mapping[str, ModelReply] = field(default_factory=dict)
    evaluations: Mapping[str, EvaluationResult] = field(default_factory=dict)
    recorded: AbstractSet[tuple[str, str]] = frozenset()
    ended_iterations: Mapping[str, int] = field(default_factory=dict)
    lost_cost_usd: Mapping[str, float] = field(default_factory=dict)
    elapsed_s: float = 0.0
    counted: Mapping[tuple[str, int], AbstractSet[str]] = field(default_factory=dict)
    owners: Mapping[str, str] = field(default_factory=dict)
    duplicates: AbstractSet[str] = frozenset()
    repeats: Mapping[str, str | None] = field(default_factory=dict)

    @cached_property
    def owned(self) -> Mapping[str, str]:
        """Evaluation on record as a candidate's own, by candidate id."""
        return {candidate_id: evaluation_id for evaluation_id, candidate_id in self.owners.items()}


class RememberingServices:
    """Services that answer from a history first."""

    def __init__(self, services: Services, history: History) -> None:
        self._services = services
        self._history = history

    @property
    def history(self) -> History:
        """What is answered without asking."""
        return self._history

    def knows_call(self, call_id: str) -> bool:
        """Whether a call is answered from the history, at no cost."""
        return call_id in self._history.replies

    def ended(self, task: str, iteration: int) -> bool:
        """Whether an iteration had ended before, so that nothing new is asked in it."""
        return iteration <= self._history.ended_iterations.get(task, -1)

    def counted(self, task: str, iteration: int) -> frozenset[str] | None:
        """The candidates that an iteration's selection counted; None if it waits for whom it will."""
        counted = self._history.counted.get((task, iteration))
        return None if counted is None else frozenset(counted)

    async def complete(self, call: ModelCall) -> ModelReply:
        """Returns the recorded reply, or asks."""
        known = self._history.replies.get(call.call_id)
        return known if known is not None else await self._services.complete(call)

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        """Returns the recorded result, or evaluates."""
        known = self._history.evaluations.get(job.evaluation_id)
        return known if known is not None else await self._services.evaluate(job)

    async def record(self, table: str, rows: Sequence[Row]) -> None:
        """Records the rows that are not stored yet."""
        new = [row for row in rows if (table, row_key(table, row)) not in self._history.recorded]
        if new:
            await self._services.record(table, new)

    def progress(self, event: str, **values: object) -> None:
        """Passes an event on."""
        self._services.progress(event, **values)
