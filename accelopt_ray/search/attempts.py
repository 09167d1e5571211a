"""An iteration's attempts: from the executor's call to a kernel's final standing.

Whose a kernel is that several attempts have written does not depend on which of them arrives first, unless selection
itself goes by arrival (:attr:`SearchContext.by_arrival`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from accelopt_ray.agents.parsing import extract_kernel
from accelopt_ray.agents.rendering import Prompt
from accelopt_ray.evaluation.records import CheckStage, EvaluationResult
from accelopt_ray.outcome import CallOutcome, EvaluationOutcome
from accelopt_ray.search.candidates import Attempt, Candidate, Plan, is_void
from accelopt_ray.search.canonical import KernelSource
from accelopt_ray.search.context import ERROR_TEXT_SHOWN, SearchContext
from accelopt_ray.search.ownership import Ownership, Position
from accelopt_ray.search.rows import attempt_row
from accelopt_ray.search.services import ModelReply
from accelopt_ray.search.stages import Stages

# What a repair could not better, or what says nothing about the kernel's text.
_NOT_FIXABLE = frozenset(
    {
        EvaluationOutcome.CORRECT,
        EvaluationOutcome.DUPLICATE,
        EvaluationOutcome.REJECTED,
        EvaluationOutcome.CANCELLED,
    }
)


@dataclass(frozen=True)
class _Written:
    """What an executor or fixer has written: a kernel, or the result of not having written one."""

    candidate_id: str
    call_id: str
    source: KernelSource | None
    no_code: EvaluationResult | None = None


class Attempts:
    """Has plans carried out; knows which attempts are final.

    Each attempt at each plan is a lane, in which its samples and repairs follow one another.
    """

    def __init__(
        self,
        context: SearchContext,
        iteration: int,
        stages: Stages,
        measured_parent: Callable[[int], Awaitable[Candidate]],
    ) -> None:
        """Starts with none.

        Args:
            context: The search.
            iteration: The iteration they belong to.
            stages: What waits for what.
            measured_parent: Gives a slot's candidate with this iteration's measurement.
        """
        self._context = context
        self._settings = context.settings
        self._iteration = iteration
        self._stages = stages
        self._measured_parent = measured_parent
        self._ownership = Ownership(context.owners)
        self._evaluations: dict[str, asyncio.Future[EvaluationResult]] = {}
        self._unsettled: dict[Position, Attempt] = {}
        self.final: dict[Position, Attempt] = {}
        """Attempts whose standing can no longer change, by position."""

    async def carry_out(self, plan: Plan, prompt: Prompt, index: int, lane: int) -> None:
        """Has a plan carried out, again where that gives a known kernel, and repaired where it fails."""
        context, settings = self._context, self._settings
        fix, resample, step = 0, 0, 0
        owner, role, sample = self._id(plan, index, 0, 0), "executor", index
        await self._stages.may_write(lane)
        while True:
            reply = await context.ask(
                owner, role, prompt, sample_index=sample, affinity=plan.plan_id, iteration=self._iteration
            )
            self._stages.note_written(lane)
            if reply is None:
                break
            written = await self._taken(reply, (lane, step), owner)
            again = resample < settings.kernel_resamples and fix == 0 and self._is_copy(written)
            last = fix == settings.fix_attempts and not again
            if last:
                # Known before the evaluation is: later copies of this kernel can be told for what they are meanwhile.
                self._ownership.close(lane)
                await self._settle()
            await self._stages.may_evaluate(lane)
            attempt = await self._tried(plan, index, fix, (lane, step), written)
            step += 1
            if again:
                resample += 1
                role, sample = "executor", index + resample * settings.attempts_per_plan
            elif last or attempt.result.outcome in _NOT_FIXABLE:
                break
            else:
                fix += 1
                role, sample, prompt = "fixer", fix - 1, self._fixer_prompt(plan, attempt)
            owner = self._id(plan, index, fix, resample)
        await self.finish([lane])

    async def finish(self, lanes: Sequence[int]) -> None:
        """Says that nothing more will come from some lanes."""
        for lane in lanes:
            self._ownership.close(lane)
        await self._settle()
        for lane in lanes:
            self._stages.note_finished(lane)
        self._context.arrived.set()

    async def close(self) -> None:
        """Cancels evaluations that nobody waits for any more."""
        for evaluation in self._evaluations.values():
            evaluation.cancel()
        await asyncio.gather(*self._evaluations.values(), return_exceptions=True)

    def hand_over(self) -> None:
        """Tells the search whose kernels these are, once all are final."""
        for _, attempt in sorted(self.final.items()):
            if attempt.source is None or attempt.result.outcome is EvaluationOutcome.DUPLICATE:
                continue
            if not is_void(attempt.result):
                self._context.owners.setdefault(attempt.source.canonical_sha256, attempt.evaluation_id)
            elif not self._context.by_arrival:
                self._context.disown(attempt.source.canonical_sha256)

    def _id(self, plan: Plan, index: int, fix: int, resample: int) -> str:
        return self._context.ids.attempt(self._iteration, plan.slot, plan.index, index, fix, resample)

    async def _taken(self, reply: ModelReply, position: Position, candidate_id: str) -> _Written:
        """Takes the kernel from a reply and notes whose it may be."""
        context = self._context
        extraction = extract_kernel(reply.reply_text, context.task.entry, reply.finish_reason)
        if extraction.code is None:
            context.evaluations -= 1
            no_code = _no_code(candidate_id, reply, str(extraction.reason), extraction.detail)
            return _Written(candidate_id, reply.call_id, None, no_code)
        source = KernelSource.of(extraction.code)
        await context.store_source(source, self._iteration)
        self._ownership.claim(position, source.canonical_sha256)
        return _Written(candidate_id, reply.call_id, source)

    def _is_copy(self, written: _Written) -> bool:
        """Whether a kernel is known for a copy already, in a way that does not hang on the order of arrival."""
        context = self._context
        if written.source is None or not self._settings.deduplicate:
            return False
        content = written.source.canonical_sha256
        if context.by_arrival:
            return context.claim(content, written.candidate_id) is None
        return content in context.owners

    async def _tried(self, plan: Plan, index: int, fix: int, position: Position, written: _Written) -> Attempt:
        """Evaluates what was written."""
        candidate_id = written.candidate_id
        if written.source is not None:
            evaluation_id, result = await self._evaluated(candidate_id, written.source)
        elif written.no_code is not None:
            evaluation_id, result = candidate_id, written.no_code
        plan = replace(plan, parent=await self._measured_parent(plan.slot))
        attempt = Attempt(candidate_id, plan, index, fix, written.call_id, written.source, result, evaluation_id)
        self._unsettled[position] = attempt
        await self._settle()
        return attempt

    async def _evaluated(self, candidate_id: str, source: KernelSource) -> tuple[str, EvaluationResult]:
        """Evaluates a kernel, or waits for the evaluation of the same one; an earlier iteration's is not repeated.

        Returns:
            The evaluation, whoever's it is, and its result.
        """
        context = self._context
        stage = CheckStage.FIRST if self._settings.staged_check else CheckStage.WHOLE
        if not self._settings.deduplicate:
            return candidate_id, await context.evaluate(candidate_id, source, stage, self._iteration)
        content = source.canonical_sha256
        if context.by_arrival:
            claimed = context.claim(content, candidate_id)
            if claimed is None:
                context.evaluations -= 1
                first = context.owners.get(content) or context.evaluation_id(content)
                return first, _duplicate(candidate_id, first)
            evaluation_id = claimed
        elif content in context.owners:
            context.evaluations -= 1
            return context.owners[content], _duplicate(candidate_id, context.owners[content])
        else:
            evaluation_id = context.evaluation_id(content)
        if evaluation_id in self._evaluations:
            context.evaluations -= 1
        else:
            job = context.evaluate(evaluation_id, source, stage, self._iteration)
            self._evaluations[evaluation_id] = asyncio.ensure_future(job)
        result = await asyncio.shield(self._evaluations[evaluation_id])
        if context.by_arrival and is_void(result):
            context.disown(content)
        return evaluation_id, result

    async def _settle(self) -> None:
        """Records every finished attempt whose standing can no longer change."""
        context = self._context
        # Where a selection does not wait for all, nor can the question whose kernel came first.
        in_any_order = context.by_arrival or not self._settings.deduplicate
        ready = [position for position in sorted(self._unsettled) if in_any_order or self._ownership.settled(position)]
        attempts = [self._settled(position, self._unsettled.pop(position)) for position in ready]
        for position, attempt in zip(ready, attempts, strict=True):
            self.final[position] = attempt
            # Whether a provisional result has to be completed shows at selection; its row waits for that.
            if not attempt.result.provisional:
                await record_attempt(context, attempt)

    def _settled(self, position: Position, attempt: Attempt) -> Attempt:
        """Returns the attempt with its final standing: owner of its evaluation, or duplicate of another's."""
        if attempt.source is None or not self._settings.deduplicate:
            return attempt
        if attempt.result.outcome is EvaluationOutcome.DUPLICATE:
            # The row is its own; what it is a copy of stands in ``answered_from``.
            return replace(attempt, evaluation_id=attempt.candidate_id)
        if self._context.by_arrival or self._ownership.owner(attempt.source.canonical_sha256) == position:
            return attempt
        copy = _duplicate(attempt.candidate_id, attempt.evaluation_id)
        return replace(attempt, result=copy, evaluation_id=attempt.candidate_id)

    def _fixer_prompt(self, plan: Plan, attempt: Attempt) -> Prompt:
        context = self._context
        return context.prompts.fixer(
            problem=context.task.reference_source(),
            # Without a kernel in the reply, what is left to repair is the parent's.
            kernel=attempt.source.text if attempt.source is not None else plan.parent.source.text,
            plan=plan.text,
            outcome=str(attempt.result.outcome),
            error_text=(attempt.result.error_text or attempt.result.reason)[:ERROR_TEXT_SHOWN],
            entry=context.task.entry,
        )


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
