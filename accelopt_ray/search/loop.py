"""The search: a baseline, then iterations of planning, carrying out, evaluating, selecting and learning.

Progress events, each with ``task`` and ``iteration``:

=================== ====================================================================================================
``search_started``  preset, iterations, beam_width, plans_per_candidate, attempts_per_plan
``baseline``        outcome, error_text, latency_ms, percent_of_peak, simulated
``iteration_started`` beam (candidate ids), memory_items
``planned``         plan_id, parent_candidate_id
``evaluated``       candidate_id, parent_candidate_id, outcome, reason, error_text, latency_ms, speedup_vs_parent,
                    speedup_vs_baseline, percent_of_peak, simulated
``call_failed``     call_id, role, outcome, error_text
``best``            candidate_id, source, latency_ms, speedup, percent_of_peak, simulated; once the baseline is known,
                    and at the end of each iteration that has found a faster kernel
``lesson``          item_id, kind, title, speedup
``warning``         message
``iteration_ended`` beam, attempts, correct, best_latency_ms, speedup, evaluations, model_calls, cost_usd
``search_ended``    status, reason, best_candidate_id, speedup, evaluations, model_calls, cost_usd
=================== ====================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from accelopt_ray.agents.rendering import PromptLibrary
from accelopt_ray.evaluation.records import EvaluationResult, TaskRef
from accelopt_ray.search.allocation import Standing, Turns
from accelopt_ray.search.candidates import Attempt, Candidate, is_valid
from accelopt_ray.search.canonical import KernelSource
from accelopt_ray.search.context import SearchContext, SearchTask
from accelopt_ray.search.history import History, RememberingServices
from accelopt_ray.search.identifiers import Identifiers
from accelopt_ray.search.iteration import Iteration, IterationResult
from accelopt_ray.search.lessons import Learning
from accelopt_ray.search.memory import ExperienceItem, ExperienceStore, LocalStore
from accelopt_ray.search.pins import PINNED, pinned_beside
from accelopt_ray.search.pipeline import Pipeline
from accelopt_ray.search.result import SearchResult, SearchStatus
from accelopt_ray.search.rows import iteration_row, measurement_row, now, selection_row
from accelopt_ray.search.selection import choose, settle_pairs
from accelopt_ray.search.services import Services
from accelopt_ray.search.settings import SearchSettings, SelectionRule
from accelopt_ray.search.stoppers import Stopper, first_reason, stoppers_for

# A dead endpoint must not run through all iterations; one silent iteration may be a passing trouble.
_SILENT_ITERATIONS = 2


async def run_search(
    settings: SearchSettings,
    task: SearchTask,
    services: Services,
    *,
    prompts: PromptLibrary | None = None,
    task_ref: TaskRef | None = None,
    history: History | None = None,
    stoppers: Sequence[Stopper] = (),
    memory: ExperienceStore | None = None,
    turns: Turns | None = None,
    lessons: Sequence[ExperienceItem] = (),
) -> SearchResult:
    """Searches for a faster kernel.

    Args:
        settings: How to search.
        task: What to speed up.
        services: Models, evaluations, records.
        prompts: Prompt files; the package's by default.
        task_ref: How evaluations find the task; its name without parameters by default.
        history: Durable state of an earlier, interrupted run of the same search; nothing in it is asked for again.
        stoppers: Rules that end the search, besides those of the settings.
        memory: Keeps the experience memory, empty at first; this process by default.
        turns: Asked before each iteration, where several searches share a budget.
        lessons: Items of another run's memory to start with.

    Returns:
        The result. Failed calls, plans and kernels are part of it.

    Raises:
        Exception: Whatever the services raise, once everything under way is cancelled. The search can then be resumed.
    """
    past = history or History()
    context = SearchContext(
        settings=settings,
        task=task,
        task_ref=task_ref or TaskRef(task.name),
        services=RememberingServices(services, past),
        prompts=prompts or PromptLibrary(),
        stoppers=[*stoppers_for(settings), *stoppers],
        ids=Identifiers(task.name),
        memory=memory or LocalStore(settings.memory_rule, settings.memory_capacity),
        cost_usd=past.lost_cost_usd.get(task.name, 0.0),
    )
    return await _Search(context, turns, lessons).run()


class _Search:
    """One task's search from baseline to result."""

    def __init__(self, context: SearchContext, turns: Turns | None, lessons: Sequence[ExperienceItem]) -> None:
        self._context = context
        self._lessons = lessons
        self._turns = turns
        self._pipeline = Pipeline(context)
        self._settings = context.settings
        self._learning = Learning(context)
        self._beam: list[Candidate] = []
        self._recent: list[Attempt] = []
        self._pinned: set[str] = set()
        self._silent_iterations = 0
        self._ended_iterations = 0

    async def run(self) -> SearchResult:
        try:
            return await self._run()
        finally:
            await self._pipeline.close()
            await self._learning.close()
            await self._context.close()
            if self._turns is not None:
                self._turns.ended(self._context.task.name, self._standing())

    async def _run(self) -> SearchResult:
        context, settings = self._context, self._settings
        context.progress(
            "search_started",
            preset=settings.preset,
            iterations=settings.iterations,
            beam_width=settings.beam_width,
            plans_per_candidate=settings.plans_per_candidate,
            attempts_per_plan=settings.attempts_per_plan,
        )
        baseline = await self._evaluate_baseline()
        if not is_valid(baseline):
            reason = f"the baseline kernel is {baseline.outcome}: {baseline.error_text or baseline.reason}".rstrip(": ")
            return self._result(SearchStatus.BASELINE_FAILED, reason, baseline)
        if settings.use_memory and self._lessons:
            await self._learning.recall(self._lessons)
        status, reason = await self._iterate_all()
        if status is not SearchStatus.COMPLETED:
            await self._count_stragglers()
        await self._learning.finish()
        return self._result(status, reason, baseline)

    async def _iterate_all(self) -> tuple[SearchStatus, str]:
        """Runs iterations to the end of the search; returns how it ended, and why if the status leaves it open."""
        context = self._context
        for iteration in range(1, self._settings.iterations + 1):
            reason_to_stop = first_reason(context.stoppers, context.state()) or await self._refused_turn()
            if reason_to_stop is not None:
                return SearchStatus.STOPPED, reason_to_stop
            context.iteration = iteration
            await self._iterate()
            self._ended_iterations = iteration
            halted = context.halted()
            if halted is not None:
                return SearchStatus.STOPPED, halted
            if self._silent_iterations >= _SILENT_ITERATIONS:
                reason = f"no model has given a usable reply in {_SILENT_ITERATIONS} iterations"
                return SearchStatus.NO_MODEL_REPLY, reason
        return SearchStatus.COMPLETED, ""

    async def _refused_turn(self) -> str | None:
        """Waits for this search's turn; returns why it gets none."""
        standing = self._standing()
        if self._turns is None or standing is None:
            return None
        return await self._turns.next(self._context.task.name, standing)

    def _standing(self) -> Standing | None:
        best = self._context.best
        if best is None:
            return None
        context = self._context
        return Standing(best.latency_ms, best.result.percent_of_peak, context.evaluations, context.cost_usd)

    async def _evaluate_baseline(self) -> EvaluationResult:
        context, task = self._context, self._context.task
        started_at = now()
        source = KernelSource.of(task.baseline_source())
        await context.store_source(source)
        context.evaluations += 1
        result = await context.evaluate(context.ids.baseline, source)
        candidate = Candidate(context.ids.baseline, source, result)
        await context.record("evaluations", measurement_row(task.name, 0, candidate, result, result.latency_ms))
        context.progress(
            "baseline",
            outcome=str(result.outcome),
            error_text=result.error_text,
            latency_ms=result.latency_ms,
            percent_of_peak=result.percent_of_peak,
            simulated=result.simulated,
        )
        if is_valid(result):
            context.baseline_latency_ms = result.latency_ms
            context.owners[source.canonical_sha256] = result.evaluation_id
            context.claims[context.evaluation_id(source.canonical_sha256)] = candidate.candidate_id
            context.correct[candidate.candidate_id] = candidate
            self._beam = await self._with_pins([candidate])
            self._set_best(candidate)
            await self._record_selection(started_at, (), "baseline")
        return result

    async def _iterate(self) -> None:
        context, settings = self._context, self._settings
        started_at = now()
        context.usable_replies = 0
        context.progress(
            "iteration_started",
            beam=[candidate.candidate_id for candidate in self._beam],
            memory_items=sum(item.shown for item in self._learning.memory),
        )
        shown_feedback = self._recent[-settings.feedback_attempts :] if settings.feedback_attempts else []
        iteration = Iteration(context, self._beam, self._learning.memory, shown_feedback)
        outcome = await self._pipeline.run(iteration, last=context.iteration == settings.iterations)
        self._note_silence(outcome)
        previous = outcome.beam
        chosen = await choose(context, previous, outcome.groups)
        context.plan_book.note(chosen.groups)
        context.correct.update({each.candidate_id: each for each in chosen.checked})
        context.provisional.update({each.candidate_id: each for each in chosen.left_open})
        self._beam = await self._with_pins(list(chosen.beam))
        self._recent = [*self._recent, *chosen.attempts][-max(1, settings.feedback_attempts) :]
        self._note_best(chosen.best)
        if settings.use_memory:
            await self._learning.learn(context.iteration, settle_pairs(context, chosen))
        counted = chosen.attempts if settings.selection_share < 1.0 else None
        await self._record_selection(started_at, previous, str(settings.selection_rule), counted)
        self._report(chosen.attempts)

    async def _count_stragglers(self) -> None:
        """Lets what is still under way at an early end count for the best kernel; no further beam is chosen."""
        groups = await self._pipeline.drain()
        if groups:
            chosen = await choose(self._context, self._beam, groups)
            if chosen.best is not None and chosen.best is not self._context.best:
                self._set_best(chosen.best)

    async def _with_pins(self, beam: list[Candidate]) -> list[Candidate]:
        pinned = await pinned_beside(self._context, beam)
        self._pinned = {candidate.candidate_id for candidate in pinned}
        return [*beam, *pinned]

    def _note_silence(self, outcome: IterationResult) -> None:
        if self._context.usable_replies:
            self._silent_iterations = 0
        elif self._context.halted() is None:
            self._silent_iterations += 1
        if not outcome.groups and self._context.halted() is None:
            why = "no reply held a new plan" if self._context.usable_replies else "no planner call succeeded"
            self._context.progress("warning", message=f"{why} in this iteration; the beam stays")

    def _note_best(self, best: Candidate | None) -> None:
        context = self._context
        if best is not None and best is not context.best:
            context.iterations_without_improvement = 0
            self._set_best(best)
        else:
            context.iterations_without_improvement += 1

    def _set_best(self, best: Candidate) -> None:
        context = self._context
        context.best = best
        context.progress(
            "best",
            candidate_id=best.candidate_id,
            source=best.source.text,
            latency_ms=best.latency_ms,
            speedup=(context.baseline_latency_ms or best.latency_ms) / best.latency_ms,
            percent_of_peak=best.result.percent_of_peak,
            simulated=best.result.simulated,
        )

    async def _record_selection(
        self,
        started_at: datetime,
        previous: Sequence[Candidate],
        rule: str,
        counted: Sequence[Attempt] | None = None,
    ) -> None:
        """Records the next beam and, last of all its rows, that the iteration has ended."""
        context, name = self._context, self._context.task.name
        stand_ins = {candidate.candidate_id for candidate in previous} if rule == SelectionRule.PUBLISHED else set()
        rows = [
            selection_row(
                name,
                context.iteration,
                rank,
                candidate,
                None if candidate.candidate_id in stand_ins else candidate.latency_ms,
                PINNED if candidate.candidate_id in self._pinned else rule,
            )
            for rank, candidate in enumerate(self._beam)
        ]
        await context.record("selections", *rows)
        row = iteration_row(name, context.iteration, started_at, now(), self._beam, counted)
        await context.record("iterations", row)

    def _report(self, attempts: Sequence[Attempt]) -> None:
        context = self._context
        context.progress(
            "iteration_ended",
            beam=[candidate.candidate_id for candidate in self._beam],
            attempts=len(attempts),
            correct=sum(attempt.valid for attempt in attempts),
            best_latency_ms=context.best.latency_ms if context.best is not None else None,
            speedup=self._speedup(),
            evaluations=context.evaluations,
            model_calls=context.model_calls,
            cost_usd=context.cost_usd,
        )

    def _speedup(self) -> float:
        context = self._context
        if context.best is None or context.baseline_latency_ms is None:
            return 1.0
        return context.baseline_latency_ms / context.best.latency_ms

    def _result(self, status: SearchStatus, reason: str, baseline: EvaluationResult) -> SearchResult:
        context = self._context
        context.progress(
            "search_ended",
            status=str(status),
            reason=reason,
            best_candidate_id=context.best.candidate_id if context.best is not None else None,
            speedup=self._speedup(),
            evaluations=context.evaluations,
            model_calls=context.model_calls,
            cost_usd=context.cost_usd,
        )
        return SearchResult(
            task=context.task.name,
            status=status,
            reason=reason,
            baseline=baseline,
            best=context.best,
            beam=tuple(self._beam),
            memory=tuple(self._learning.memory),
            iterations=self._ended_iterations,
            evaluations=context.evaluations,
            model_calls=context.model_calls,
            cost_usd=context.cost_usd,
        )
