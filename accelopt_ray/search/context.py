"""What all parts of one task's search share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from accelopt_ray.agents.rendering import Prompt, PromptLibrary
from accelopt_ray.evaluation.records import CheckStage, EvaluationJob, EvaluationResult, TaskRef
from accelopt_ray.outcome import CallOutcome
from accelopt_ray.search.candidates import Attempt, Candidate, is_void
from accelopt_ray.search.canonical import KernelSource
from accelopt_ray.search.diversity import PlanBook
from accelopt_ray.search.history import RememberingServices
from accelopt_ray.search.identifiers import Identifiers
from accelopt_ray.search.memory import ExperienceStore
from accelopt_ray.search.rows import Row, source_row
from accelopt_ray.search.services import ModelCall, ModelReply
from accelopt_ray.search.settings import SearchSettings
from accelopt_ray.search.stoppers import SearchState, Stopper, first_reason, nearly_used
from accelopt_ray.search.streams import stream_seed

ERROR_TEXT_SHOWN = 4000
"""So many characters of an error are shown to a model."""

_T = TypeVar("_T")


class SearchTask(Protocol):
    """What a search needs to know of a task; :class:`nkibench.task.Task` is one."""

    @property
    def name(self) -> str:
        """Name, part of every identifier."""

    @property
    def entry(self) -> str:
        """Name of the kernel function."""

    def reference_source(self) -> str:
        """The NumPy reference, for the prompts."""

    def baseline_source(self) -> str:
        """The kernel to start from."""


@dataclass
class SearchContext:
    """Settings, services and accounts of one task's search.

    Attributes:
        baseline_latency_ms: Set once the baseline has been evaluated.
        best: The fastest correct candidate so far.
        owners: Owner's evaluation id of every content evaluated in ended iterations, by canonical hash.
        voids: Evaluations that ended without a verdict, by canonical hash.
        claims: Candidate whose evaluation it is, by evaluation id, where that goes by arrival.
        arrived: Set whenever nothing more will come of an attempt.
        usable_replies: Model replies with text in the present iteration.
        model_calls: Calls finished.
        cost_usd: US dollars spent on them.
        tokens: Prompt and completion tokens of them.
        device_s: Seconds that evaluations have run on devices, those of earlier sessions of the run included.
        evaluations: Evaluations finished, under way, or reserved by an executor's call: otherwise all the calls of an
            iteration would have started before the first evaluation is counted.
        correct: Every candidate that has passed its whole check, by its id.
        provisional: Every attempt of ended iterations whose check was left open, by its id.
        plan_book: Plans of ended iterations.
    """

    settings: SearchSettings
    task: SearchTask
    task_ref: TaskRef
    services: RememberingServices
    prompts: PromptLibrary
    stoppers: Sequence[Stopper]
    ids: Identifiers
    memory: ExperienceStore
    baseline_latency_ms: float | None = None
    best: Candidate | None = None
    iteration: int = 0
    iterations_without_improvement: int = 0
    owners: dict[str, str] = field(default_factory=dict)
    voids: Counter[str] = field(default_factory=Counter)
    claims: dict[str, str] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    usable_replies: int = 0
    model_calls: int = 0
    cost_usd: float = 0.0
    tokens: int = 0
    device_s: float = 0.0
    evaluations: int = 0
    correct: dict[str, Candidate] = field(default_factory=dict)
    provisional: dict[str, Attempt] = field(default_factory=dict)
    plan_book: PlanBook = field(default_factory=PlanBook)
    _rests: dict[str, asyncio.Future[EvaluationResult]] = field(default_factory=dict)
    _halted: str | None = None
    _stored_sources: set[str] = field(default_factory=set)
    _warned_budgets: set[int] = field(default_factory=set)
    _started_s: float = field(default_factory=time.monotonic)

    def state(self) -> SearchState:
        """What stoppers are asked about."""
        return SearchState(
            iteration=self.iteration,
            iterations_without_improvement=self.iterations_without_improvement,
            best_percent_of_peak=self.best.result.percent_of_peak if self.best is not None else None,
            evaluations=self.evaluations,
            cost_usd=self.cost_usd,
            tokens=self.tokens,
            device_s=self.device_s,
            elapsed_s=self.services.history.elapsed_s + time.monotonic() - self._started_s,
        )

    def halted(self) -> str | None:
        """Returns why no further call may start, or None. Once halted, a search stays so."""
        if self._halted is None:
            state = self.state()
            self._halted = first_reason(self.stoppers, state, urgent_only=True)
            for budget, message in nearly_used(self.stoppers, state):
                if budget not in self._warned_budgets:
                    self._warned_budgets.add(budget)
                    self.progress("warning", message=message)
        return self._halted

    async def ask(
        self,
        owner: str,
        role: str,
        prompt: Prompt,
        *,
        sample_index: int,
        affinity: str,
        iteration: int | None = None,
    ) -> ModelReply | None:
        """Asks a model and keeps the accounts.

        Args:
            owner: Identifier of what the reply is for; the call's own derives from it.
            role: ``planner``, ``executor``, ``summarizer`` or ``fixer``.
            prompt: Both messages.
            sample_index: Which sample of this prompt it is.
            affinity: Calls with equal affinity share a prompt prefix.
            iteration: The iteration that asks; the present one by default, which is a later one for stragglers.

        Returns:
            The reply, or None if a budget is used up; a call that is already paid for is answered in any case. An
            executor's or fixer's reply comes with one evaluation reserved, to be used or given back.
        """
        call_id = self.ids.call(owner, role)
        number = self.iteration if iteration is None else iteration
        if not self.services.knows_call(call_id) and (self.halted() is not None or self._is_closed(number)):
            return None
        if role in ("executor", "fixer"):
            self.evaluations += 1
        call = ModelCall(
            call_id=call_id,
            role=role,
            system_prompt=prompt.system,
            user_prompt=prompt.user,
            sample_index=sample_index,
            seed=stream_seed(self.settings.seed, "call", call_id),
            affinity=affinity,
            task=self.task.name,
            iteration=number,
        )
        reply = await self.services.complete(call)
        self.model_calls += 1
        self.cost_usd += reply.cost_usd
        self.tokens += reply.prompt_tokens + reply.completion_tokens
        if has_text(reply):
            self.usable_replies += 1
        if reply.outcome is not CallOutcome.OK:
            self.progress(
                "call_failed",
                call_id=call_id,
                role=role,
                outcome=str(reply.outcome),
                error_text=reply.error_text,
            )
        return reply

    def _is_closed(self, iteration: int) -> bool:
        """Whether an iteration had ended in an earlier session, with nobody left who could still ask in it."""
        return self.settings.selection_share == 1.0 and self.services.ended(self.task.name, iteration)

    @property
    def by_arrival(self) -> bool:
        """Whether it counts who arrives first, since selection does not wait for all."""
        return self.settings.selection_share < 1.0

    def evaluation_id(self, content: str) -> str:
        """The evaluation of a content that counts now."""
        return self.ids.content(content, self.voids[content])

    def disown(self, content: str) -> None:
        """Says that the evaluation of a content gave no verdict: the next copy is evaluated again."""
        self.owners.pop(content, None)
        self.voids[content] += 1

    def claim(self, content: str, candidate_id: str) -> str | None:
        """Claims the evaluation of a content; the first one keeps it, in a resumed search the one on record.

        Returns:
            The evaluation, or None if it is another's.
        """
        history = self.services.history
        evaluation_id = history.owned.get(candidate_id) or self.evaluation_id(content)
        recorded = history.owners.get(evaluation_id)
        if recorded is not None:
            self.claims[evaluation_id] = recorded
        elif candidate_id not in history.duplicates:
            self.claims.setdefault(evaluation_id, candidate_id)
        return evaluation_id if self.claims.get(evaluation_id) == candidate_id else None

    async def evaluate(
        self,
        evaluation_id: str,
        source: KernelSource,
        stage: CheckStage = CheckStage.WHOLE,
        iteration: int | None = None,
        parent: KernelSource | None = None,
    ) -> EvaluationResult:
        """Evaluates a kernel; the evaluation has been reserved in :attr:`evaluations` by the caller."""
        result = await self.services.evaluate(
            EvaluationJob(
                evaluation_id=evaluation_id,
                task=self.task_ref,
                source=source.text,
                device=self.settings.device,
                check=self.settings.check,
                task_name=self.task.name,
                iteration=self.iteration if iteration is None else iteration,
                stage=stage,
                parent_source="" if parent is None else parent.text,
            )
        )
        if not result.answered_from:
            self.device_s += result.run_s
        return result

    async def complete_check(self, attempt: Attempt) -> Attempt:
        """Makes the rest of an attempt's check; a device that measures also runs it in turns with its parent."""
        rest = await asyncio.shield(self.start_completing(attempt))
        completed = replace(attempt, result=attempt.result.completed(rest))
        if attempt.source is not None and is_void(rest):
            self.disown(attempt.source.canonical_sha256)
        return completed

    def start_completing(self, attempt: Attempt) -> asyncio.Future[EvaluationResult]:
        """Starts the rest of an attempt's check unless it has started; returns its result to come."""
        if attempt.source is None:
            raise ValueError(f"attempt {attempt.candidate_id} has no kernel to check")
        if attempt.candidate_id not in self._rests:
            evaluation_id, parent = self.ids.rest(attempt.evaluation_id), attempt.plan.parent.source
            job = self.evaluate(evaluation_id, attempt.source, CheckStage.REST, parent=parent)
            self._rests[attempt.candidate_id] = asyncio.ensure_future(job)
        return self._rests[attempt.candidate_id]

    async def close(self) -> None:
        """Cancels checks that nobody waits for any more."""
        for rest in self._rests.values():
            rest.cancel()
        await asyncio.gather(*self._rests.values(), return_exceptions=True)

    async def store_source(self, source: KernelSource, iteration: int = 0) -> None:
        """Records a kernel's text unless it is recorded already."""
        if source.sha256 not in self._stored_sources:
            self._stored_sources.add(source.sha256)
            await self.record("sources", source_row(self.task.name, iteration, source))

    async def record(self, table: str, *rows: Row) -> None:
        """Records rows of one table."""
        if rows:
            await self.services.record(table, rows)

    def progress(self, event: str, **values: object) -> None:
        """Tells whoever watches; every event carries task and iteration."""
        self.services.progress(event, task=self.task.name, iteration=self.iteration, **values)


def has_text(reply: ModelReply) -> bool:
    """Whether a reply's text can be used; a truncated one may still hold a complete plan or kernel."""
    return reply.outcome in (CallOutcome.OK, CallOutcome.TRUNCATED) and bool(reply.reply_text.strip())


async def all_or_cancel(*jobs: Awaitable[_T]) -> list[_T]:
    """Awaits jobs concurrently and returns their results in order; if one raises, the others are cancelled first."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
