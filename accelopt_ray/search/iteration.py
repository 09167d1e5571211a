"""One iteration: each plan is carried out the moment it arrives, each kernel evaluated the moment it is written.

Nothing waits for anything but its own input. What comes out is independent of the order of arrival: identifiers and
random streams derive from positions, and so does which of two equal kernels counts as the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from accelopt_ray.agents.parsing import extract_kernel
from accelopt_ray.agents.rendering import (
    Prompt,
    ShownAttempt,
    ShownExperience,
    ShownPlan,
    explanation_lines,
    profile_lines,
)
from accelopt_ray.evaluation.records import CheckStage, EvaluationResult
from accelopt_ray.outcome import CallOutcome, EvaluationOutcome
from accelopt_ray.search.candidates import Attempt, Candidate, Plan, PlanGroup, is_valid
from accelopt_ray.search.canonical import KernelSource
from accelopt_ray.search.context import SearchContext, all_or_cancel, has_text
from accelopt_ray.search.diversity import PlanGate, TriedPlan
from accelopt_ray.search.memory import ExperienceItem
from accelopt_ray.search.ownership import Ownership, Position
from accelopt_ray.search.rows import attempt_row, measurement_row, plan_row
from accelopt_ray.search.services import ModelReply
from accelopt_ray.search.streams import stream

# What a repair could not better, or what says nothing about the kernel's text.
_NOT_FIXABLE = frozenset(
    {
        EvaluationOutcome.CORRECT,
        EvaluationOutcome.DUPLICATE,
        EvaluationOutcome.REJECTED,
        EvaluationOutcome.CANCELLED,
    }
)
_ERROR_TEXT_SHOWN = 4000


@dataclass(frozen=True)
class IterationResult:
    """What an iteration has brought.

    Attributes:
        beam: The iteration's own beam with this iteration's measurements, one entry a slot.
        groups: Attempts by plan, in the order of their positions; plans that never came are absent.
    """

    beam: tuple[Candidate, ...]
    groups: tuple[PlanGroup, ...]


class Iteration:
    """Runs one iteration from a beam."""

    def __init__(
        self,
        context: SearchContext,
        beam: Sequence[Candidate],
        memory: Sequence[ExperienceItem],
        feedback: Sequence[Attempt],
    ) -> None:
        """Prepares the iteration that ``context.iteration`` names.

        Args:
            context: The search.
            beam: Candidates by slot.
            memory: Experience items, in the order to show.
            feedback: Earlier attempts to show, oldest first.
        """
        self._context = context
        self._settings = context.settings
        self._number = context.iteration
        self._beam = list(beam)
        self._shown = [item for item in memory if item.shown]
        self._feedback = list(feedback)
        self._ownership = Ownership(context.owners)
        # Where a selection does not wait for all, nor can the question whose kernel came first.
        self._by_arrival = context.settings.deduplicate and context.settings.selection_share < 1.0
        self._evaluations: dict[str, asyncio.Future[EvaluationResult]] = {}
        self._measurements: dict[str, asyncio.Future[Candidate]] = {}
        self._unsettled: dict[Position, Attempt] = {}
        self._attempts: dict[Position, Attempt] = {}
        self._plans: dict[tuple[int, int], Plan] = {}
        self._taken: set[Position] = set()
        self._final_lanes = 0
        self.work: asyncio.Future[None]

    @property
    def number(self) -> int:
        """Which iteration it is."""
        return self._number

    @property
    def beam(self) -> tuple[Candidate, ...]:
        """The beam it started from, with the measurements made in it so far."""
        return tuple(self._beam)

    @property
    def final_share(self) -> float:
        """Share of its planned attempts of which nothing more will come."""
        settings = self._settings
        planned = len(self._beam) * settings.plans_per_candidate * settings.attempts_per_plan
        return self._final_lanes / planned if planned else 1.0

    @property
    def final_ids(self) -> set[str]:
        """Candidates whose standing is final."""
        return {attempt.candidate_id for attempt in self._attempts.values()}

    @property
    def taken(self) -> bool:
        """Whether every attempt that is final has been handed out by :meth:`take`."""
        return self._taken == set(self._attempts)

    def start(self) -> None:
        """Starts everything; :attr:`work` ends with the last evaluation, or raises what a service raises."""
        self.work = asyncio.ensure_future(self._run())

    def cancel(self) -> None:
        """Cancels whatever is under way."""
        self.work.cancel()

    def take(self, only: AbstractSet[str] | None = None) -> list[PlanGroup]:
        """Hands out the attempts that have become final since the last time, by plan, in the order of positions.

        Args:
            only: Candidates to hand out; the others stay for later. None hands out all of them.
        """
        new = [
            position
            for position in sorted(self._attempts)
            if position not in self._taken and (only is None or self._attempts[position].candidate_id in only)
        ]
        first = not self._taken
        self._taken.update(new)
        attempts = [self._attempts[position] for position in new]
        groups = [
            PlanGroup(plan, tuple(attempt for attempt in attempts if attempt.plan.plan_id == plan.plan_id))
            for _, plan in sorted(self._plans.items())
        ]
        # A plan whose attempts are all out already, or yet to come, stands for nothing this time.
        complete = self.work.done() and first
        return [group for group in groups if group.attempts or complete]

    async def _run(self) -> None:
        try:
            await all_or_cancel(*(self._slot(slot, candidate) for slot, candidate in enumerate(self._beam)))
        finally:
            shared: list[asyncio.Future[Any]] = [*self._evaluations.values(), *self._measurements.values()]
            for future in shared:
                future.cancel()
            await asyncio.gather(*shared, return_exceptions=True)
        for position in sorted(self._attempts):
            attempt = self._attempts[position]
            if attempt.source is not None and attempt.result.outcome is not EvaluationOutcome.DUPLICATE:
                self._context.owners.setdefault(attempt.source.canonical_sha256, attempt.evaluation_id)

    async def _slot(self, slot: int, candidate: Candidate) -> None:
        parent = await self._measured_again(slot, candidate)
        self._beam[slot] = parent
        samples = self._settings.plans_per_candidate
        tried = self._context.plan_book.tried_from(parent.source.canonical_sha256)
        gate = PlanGate(tried, samples, self._settings.plan_similarity) if self._settings.plan_resamples else None
        prompt = self._planner_prompt(slot, parent, tried)
        await all_or_cancel(*(self._plan(slot, index, parent, prompt, gate) for index in range(samples)))

    async def _measured_again(self, slot: int, candidate: Candidate) -> Candidate:
        """Measures a beam member again, once even if it fills several slots."""
        # The baseline has only just been measured, and a prediction would be the same again.
        up_to_date = self._number == 1 or candidate.result.simulated
        if up_to_date or not self._settings.remeasure_parents:
            return candidate
        key = candidate.candidate_id
        if key not in self._measurements:
            self._measurements[key] = asyncio.ensure_future(self._measure(slot, candidate))
        return await asyncio.shield(self._measurements[key])

    async def _measure(self, slot: int, candidate: Candidate) -> Candidate:
        context = self._context
        context.evaluations += 1
        evaluation_id = context.ids.remeasurement(self._number, slot)
        result = await context.evaluate(evaluation_id, candidate.source, iteration=self._number)
        row = measurement_row(context.task.name, self._number, candidate, result, context.baseline_latency_ms)
        await context.record("evaluations", row)
        if not is_valid(result):
            message = f"{candidate.candidate_id} could not be measured again ({result.outcome}); its old latency stands"
            context.progress("warning", message=message)
        return candidate.measured_again(result)

    def _planner_prompt(self, slot: int, parent: Candidate, tried: Sequence[TriedPlan]) -> Prompt:
        context, settings = self._context, self._settings
        order = stream(settings.seed, "profile", context.ids.slot(self._number, slot))
        result = parent.result
        return context.prompts.planner(
            problem=context.task.reference_source(),
            kernel=parent.source.text,
            profile=profile_lines(result.latency_ms, result.counters, order),
            experiences=[ShownExperience(item.title, item.text, item.pair.speedup) for item in self._shown],
            percent_of_peak=result.percent_of_peak if settings.show_percent_of_peak else None,
            bottleneck=explanation_lines(result.explanation) if settings.show_bottleneck else (),
            feedback=[_shown_attempt(attempt) for attempt in self._feedback],
            tried=[
                ShownPlan(each.title, each.outcome, each.speedup)
                for each in tried[max(0, len(tried) - settings.show_tried_plans) :]
            ],
        )

    async def _plan(self, slot: int, index: int, parent: Candidate, prompt: Prompt, gate: PlanGate | None) -> None:
        context = self._context
        lanes = [self._lane(slot, index, attempt) for attempt in range(self._settings.attempts_per_plan)]
        plan = await self._sampled(slot, index, parent, prompt, gate)
        if plan is None:
            await self._finish(lanes)
            return
        self._plans[(slot, index)] = plan
        context.progress("planned", plan_id=plan.plan_id, parent_candidate_id=parent.candidate_id)
        order = context.prompts.executor(
            problem=context.task.reference_source(),
            kernel=parent.source.text,
            plan=plan.text,
            entry=context.task.entry,
        )
        await all_or_cancel(*(self._attempt(plan, order, attempt, lane) for attempt, lane in enumerate(lanes)))

    async def _sampled(
        self, slot: int, index: int, parent: Candidate, prompt: Prompt, gate: PlanGate | None
    ) -> Plan | None:
        """Asks for a plan, again where it only repeats; returns None if none comes that is new."""
        context, settings = self._context, self._settings
        for resample in range(settings.plan_resamples + 1):
            if resample and gate is not None:
                taken = await gate.next_round(resample)
                tried = [*context.plan_book.tried_from(parent.source.canonical_sha256), *taken]
                prompt = self._planner_prompt(slot, parent, tried)
            plan_id = context.ids.plan(self._number, slot, index, resample)
            sample = index + resample * settings.plans_per_candidate
            affinity = context.ids.slot(self._number, slot)
            reply = await context.ask(
                plan_id, "planner", prompt, sample_index=sample, affinity=affinity, iteration=self._number
            )
            text = reply.reply_text.strip() if reply is not None and has_text(reply) else None
            repeated = await gate.judge(resample, index, plan_id, text) if gate is not None else None
            if reply is None or text is None:
                return None
            plan = Plan(plan_id, slot, index, parent, text, self._number)
            item_ids = [item.item_id for item in self._shown]
            row = plan_row(context.task.name, self._number, plan, reply.call_id, item_ids, repeated)
            await context.record("plans", row)
            if repeated is None:
                return plan
        return None

    async def _attempt(self, plan: Plan, prompt: Prompt, index: int, lane: int) -> None:
        """Has a plan carried out, and repaired where that is wanted and fails."""
        context = self._context
        owner = context.ids.attempt(self._number, plan.slot, plan.index, index)
        reply = await context.ask(
            owner, "executor", prompt, sample_index=index, affinity=plan.plan_id, iteration=self._number
        )
        fix = 0
        while reply is not None:
            last = fix == self._settings.fix_attempts
            attempt = await self._tried(plan, index, fix, lane, owner, reply, last=last)
            if last or attempt.result.outcome in _NOT_FIXABLE:
                break
            fix += 1
            owner = context.ids.attempt(self._number, plan.slot, plan.index, index, fix)
            repair = self._fixer_prompt(plan, attempt)
            reply = await context.ask(
                owner, "fixer", repair, sample_index=fix - 1, affinity=plan.plan_id, iteration=self._number
            )
        await self._finish([lane])

    async def _finish(self, lanes: Sequence[int]) -> None:
        """Says that nothing more will come from some lanes."""
        for lane in lanes:
            self._ownership.close(lane)
        await self._settle()
        self._final_lanes += len(lanes)
        self._context.arrived.set()

    def _fixer_prompt(self, plan: Plan, attempt: Attempt) -> Prompt:
        context = self._context
        return context.prompts.fixer(
            problem=context.task.reference_source(),
            # Without a kernel in the reply, what is left to repair is the parent's.
            kernel=attempt.source.text if attempt.source is not None else plan.parent.source.text,
            plan=plan.text,
            outcome=str(attempt.result.outcome),
            error_text=(attempt.result.error_text or attempt.result.reason)[:_ERROR_TEXT_SHOWN],
            entry=context.task.entry,
        )

    async def _tried(
        self, plan: Plan, index: int, fix: int, lane: int, candidate_id: str, reply: ModelReply, *, last: bool
    ) -> Attempt:
        """Takes the kernel from a reply and evaluates it."""
        context, position = self._context, (lane, fix)
        extraction = extract_kernel(reply.reply_text, context.task.entry, reply.finish_reason)
        if extraction.code is None:
            context.evaluations -= 1
            source, result = None, _no_code(candidate_id, reply, str(extraction.reason), extraction.detail)
        else:
            source = KernelSource.of(extraction.code)
            await context.store_source(source, self._number)
            self._ownership.claim(position, source.canonical_sha256)
            if self._by_arrival:
                context.claim(source.canonical_sha256, candidate_id)
        if last:
            # Known before the evaluation is: later copies of this kernel can be told for what they are meanwhile.
            self._ownership.close(lane)
            await self._settle()
        if source is not None:
            result = await self._evaluated(candidate_id, source)
        attempt = Attempt(candidate_id, plan, index, fix, reply.call_id, source, result, candidate_id)
        self._unsettled[position] = attempt
        await self._settle()
        return attempt

    async def _evaluated(self, candidate_id: str, source: KernelSource) -> EvaluationResult:
        """Evaluates a kernel, or waits for the evaluation of the same one; an earlier iteration's is not repeated."""
        context = self._context
        stage = CheckStage.FIRST if self._settings.staged_check else CheckStage.WHOLE
        if not self._settings.deduplicate:
            return await context.evaluate(candidate_id, source, stage, self._number)
        content = source.canonical_sha256
        if content in context.owners and not (self._by_arrival and context.claims.get(content) == candidate_id):
            context.evaluations -= 1
            return _duplicate(candidate_id, context.owners[content])
        if self._by_arrival and context.claims.get(content) != candidate_id:
            context.evaluations -= 1
            return _duplicate(candidate_id, context.ids.content(content))
        if content in self._evaluations:
            context.evaluations -= 1
        else:
            job = context.evaluate(context.ids.content(content), source, stage, self._number)
            self._evaluations[content] = asyncio.ensure_future(job)
        return await asyncio.shield(self._evaluations[content])

    async def _settle(self) -> None:
        """Records every finished attempt whose standing can no longer change."""
        context = self._context
        ready = [
            position
            for position in sorted(self._unsettled)
            if self._by_arrival or not self._settings.deduplicate or self._ownership.settled(position)
        ]
        attempts = [self._settled(position, self._unsettled.pop(position)) for position in ready]
        for position, attempt in zip(ready, attempts, strict=True):
            self._attempts[position] = attempt
            # Whether a provisional result has to be completed shows at selection; its row waits for that.
            if not attempt.result.provisional:
                await record_attempt(context, attempt)

    def _settled(self, position: Position, attempt: Attempt) -> Attempt:
        """Returns the attempt with its final standing: owner of its evaluation, or duplicate of another's."""
        if attempt.source is None or not self._settings.deduplicate:
            return attempt
        content = attempt.source.canonical_sha256
        if self._by_arrival:
            duplicate = attempt.result.outcome is EvaluationOutcome.DUPLICATE
            return attempt if duplicate else replace(attempt, evaluation_id=self._context.ids.content(content))
        evaluation_id = self._context.owners.get(content) or self._context.ids.content(content)
        if self._ownership.owner(content) == position:
            return replace(attempt, evaluation_id=evaluation_id)
        return replace(attempt, result=_duplicate(attempt.candidate_id, evaluation_id))

    def _lane(self, slot: int, plan: int, attempt: int) -> int:
        settings = self._settings
        return (slot * settings.plans_per_candidate + plan) * settings.attempts_per_plan + attempt


async def record_attempt(context: SearchContext, attempt: Attempt) -> None:
    """Records an attempt whose result is final and tells whoever watches."""
    row = attempt_row(context.task.name, attempt.plan.iteration, attempt, context.baseline_latency_ms)
    await context.record("evaluations", row)
    context.progress(
        "evaluated",
        candidate_id=attempt.candidate_id,
        parent_candidate_id=attempt.plan.parent.candidate_id,
        outcome=row["outcome"],
        reason=row["reason"],
        error_text=row["error_text"],
        latency_ms=row["latency_ms"],
        speedup_vs_parent=row["speedup_vs_parent"],
        speedup_vs_baseline=row["speedup_vs_baseline"],
        percent_of_peak=row["percent_of_peak"],
        simulated=row["simulated"],
    )


def _no_code(evaluation_id: str, reply: ModelReply, reason: str, detail: str) -> EvaluationResult:
    if reply.outcome is CallOutcome.ERROR:
        reason, detail = "call_error", reply.error_text
    elif reply.outcome is CallOutcome.REFUSED:
        reason = "refusal"
    return EvaluationResult(evaluation_id, EvaluationOutcome.NO_CODE, reason=reason, error_text=detail)


def _duplicate(evaluation_id: str, first: str) -> EvaluationResult:
    return EvaluationResult(evaluation_id, EvaluationOutcome.DUPLICATE, reason="same_kernel", answered_from=first)


def _shown_attempt(attempt: Attempt) -> ShownAttempt:
    result = attempt.result
    return ShownAttempt(
        plan=attempt.plan.text,
        outcome=str(result.outcome),
        speedup=attempt.speedup,
        error_text=result.error_text[:_ERROR_TEXT_SHOWN],
        profile=profile_lines(result.latency_ms, result.counters) if attempt.valid else (),
    )
