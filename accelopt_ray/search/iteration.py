"""One iteration: each plan is carried out the moment it arrives, each kernel evaluated the moment it is written.

Nothing waits for anything but its own input, unless :mod:`accelopt_ray.search.stages` is told otherwise. What comes out
is independent of the order of arrival: identifiers and random streams derive from positions, and so does which of two
equal kernels counts as the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from accelopt_ray.search.attempts import Attempts
from accelopt_ray.search.candidates import Attempt, Candidate, Plan, PlanGroup, is_valid
from accelopt_ray.search.context import SearchContext, all_or_cancel
from accelopt_ray.search.memory import ExperienceItem
from accelopt_ray.search.ownership import Position
from accelopt_ray.search.planning import SlotPlanning
from accelopt_ray.search.rows import measurement_row
from accelopt_ray.search.stages import Stages


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
        settings = context.settings
        self._context = context
        self._settings = settings
        self._number = context.iteration
        self._beam = list(beam)
        self._shown = [item for item in memory if item.shown]
        self._feedback = list(feedback)
        self._stages = Stages(settings.stage_order, len(beam), settings.plans_per_candidate, settings.attempts_per_plan)
        self._attempts = Attempts(context, self._number, self._stages, self._measured_again)
        self._measurements: dict[str, asyncio.Future[Candidate]] = {}
        self._plans: dict[tuple[int, int], Plan] = {}
        self._taken: set[Position] = set()
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
        """Share of its planned attempts of which nothing more will come; 0 until its parents are measured."""
        return self._stages.finished_share if self._stages.measured else 0.0

    @property
    def final_ids(self) -> set[str]:
        """Candidates whose standing is final; none until its parents are measured."""
        if not self._stages.measured:
            return set()
        return {attempt.candidate_id for attempt in self._attempts.final.values()}

    @property
    def taken(self) -> bool:
        """Whether every attempt that is final has been handed out by :meth:`take`."""
        return self._taken == set(self._attempts.final)

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
        first = not self._taken
        new = self._new(only)
        self._taken.update(new)
        # A plan whose attempts are all out already, or yet to come, stands for nothing this time.
        complete = self.work.done() and first
        return [group for group in self._groups(new) if group.attempts or complete]

    def at_hand(self) -> list[PlanGroup]:
        """What :meth:`take` would hand out now."""
        return [group for group in self._groups(self._new(None)) if group.attempts]

    def _new(self, only: AbstractSet[str] | None) -> list[Position]:
        final = self._attempts.final
        return [
            position
            for position in sorted(final)
            if position not in self._taken and (only is None or final[position].candidate_id in only)
        ]

    def _groups(self, positions: Sequence[Position]) -> list[PlanGroup]:
        by_plan: dict[str, list[Attempt]] = {}
        for position in positions:
            attempt = self._attempts.final[position]
            by_plan.setdefault(attempt.plan.plan_id, []).append(attempt)
        return [
            PlanGroup(replace(plan, parent=self._beam[plan.slot]), tuple(by_plan.get(plan.plan_id, ())))
            for _, plan in sorted(self._plans.items())
        ]

    async def _run(self) -> None:
        try:
            await all_or_cancel(*(self._slot(slot, candidate) for slot, candidate in enumerate(self._beam)))
        finally:
            await self._attempts.close()
            for measurement in self._measurements.values():
                measurement.cancel()
            await asyncio.gather(*self._measurements.values(), return_exceptions=True)
        self._attempts.hand_over()

    async def _slot(self, slot: int, candidate: Candidate) -> None:
        if self._settings.plan_while_remeasuring:
            await all_or_cancel(self._measured_again(slot), self._plan_all(slot, candidate))
        else:
            await self._plan_all(slot, await self._measured_again(slot))

    async def _plan_all(self, slot: int, parent: Candidate) -> Candidate:
        """Asks for all plans of a slot and has them carried out; returns the parent they start from."""
        await self._stages.may_plan()
        planning = SlotPlanning(self._context, self._number, slot, parent, self._shown, self._feedback)
        indices = range(self._settings.plans_per_candidate)
        await all_or_cancel(*(self._plan(slot, index, planning) for index in indices))
        return parent

    async def _plan(self, slot: int, index: int, planning: SlotPlanning) -> None:
        context, attempts_per_plan = self._context, self._settings.attempts_per_plan
        first_lane = (slot * self._settings.plans_per_candidate + index) * attempts_per_plan
        lanes = range(first_lane, first_lane + attempts_per_plan)
        plan = await planning.sampled(index)
        if plan is None:
            await self._attempts.finish(lanes)
            return
        self._plans[(slot, index)] = plan
        context.progress("planned", plan_id=plan.plan_id, parent_candidate_id=plan.parent.candidate_id)
        prompt = context.prompts.executor(
            problem=context.task.reference_source(),
            kernel=plan.parent.source.text,
            plan=plan.text,
            entry=context.task.entry,
        )
        for lane in lanes:
            self._stages.note_planned(lane)
        await all_or_cancel(
            *(self._attempts.carry_out(plan, prompt, attempt, lane) for attempt, lane in enumerate(lanes))
        )

    async def _measured_again(self, slot: int) -> Candidate:
        """A slot's candidate with this iteration's measurement, made once even if it fills several slots."""
        candidate = self._beam[slot]
        # The baseline has only just been measured, and a prediction would be the same again.
        up_to_date = self._number == 1 or candidate.result.simulated
        if self._settings.remeasure_parents and not up_to_date:
            key = candidate.candidate_id
            if key not in self._measurements:
                self._measurements[key] = asyncio.ensure_future(self._measure(slot, candidate))
            candidate = self._beam[slot] = await asyncio.shield(self._measurements[key])
        self._stages.note_measured(slot)
        return candidate

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
