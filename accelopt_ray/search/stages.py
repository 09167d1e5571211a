"""What waits for what within an iteration.

``overlapped``
    Nothing waits for anything but its own input.
``barriers``
    One stage after another: all parents are measured again, then all plans are made, then all kernels are written, then
    all are evaluated.
``published``
    The public scripts' order. Parents and plans as with barriers; then plan by plan: the plan's kernels are written
    side by side and evaluated one by one, and only then the next plan's turn comes.

What comes out is the same in all three; the last two are there to be compared with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from accelopt_ray.search.settings import StageOrder


class Stages:
    """How far one iteration's stages are; belongs to one event loop.

    Lanes are numbered by slot, plan and attempt, in this order.
    """

    def __init__(self, order: StageOrder, slots: int, plans_per_candidate: int, attempts_per_plan: int) -> None:
        """Starts with nothing done; a slot holds a candidate of the beam."""
        self._order = order
        self._slots = slots
        self._attempts_per_plan = attempts_per_plan
        self._lanes = frozenset(range(slots * plans_per_candidate * attempts_per_plan))
        self._measured_slots: set[int] = set()
        self._planned_lanes: set[int] = set()
        self._written_lanes: set[int] = set()
        self._finished_lanes: set[int] = set()
        self._changed = asyncio.Event()

    @property
    def finished_share(self) -> float:
        """Share of the lanes from which nothing more will come."""
        return len(self._finished_lanes) / len(self._lanes) if self._lanes else 1.0

    @property
    def measured(self) -> bool:
        """Whether every parent's latency is this iteration's."""
        return len(self._measured_slots) == self._slots

    async def may_plan(self) -> None:
        """Waits until a planner may be asked."""
        if self._order is not StageOrder.OVERLAPPED:
            await self._until(lambda: self.measured)

    async def may_write(self, lane: int) -> None:
        """Waits until an executor may be asked for a lane."""
        if self._order is StageOrder.OVERLAPPED:
            return
        await self._until(lambda: self._planned_lanes >= self._lanes)
        if self._order is StageOrder.PUBLISHED:
            earlier = set(range(self._first_of_plan(lane)))
            await self._until(lambda: self._finished_lanes >= earlier)

    async def may_evaluate(self, lane: int) -> None:
        """Waits until a lane's kernel may be evaluated."""
        if self._order is StageOrder.BARRIERS:
            await self._until(lambda: self._written_lanes >= self._lanes)
        elif self._order is StageOrder.PUBLISHED:
            first = self._first_of_plan(lane)
            of_plan, earlier = set(range(first, first + self._attempts_per_plan)), set(range(lane))
            await self._until(lambda: self._written_lanes >= of_plan and self._finished_lanes >= earlier)

    def note_measured(self, slot: int) -> None:
        """Says that a slot's parent has its latency."""
        self._note(self._measured_slots, slot)

    def note_planned(self, lane: int) -> None:
        """Says that a lane's plan has come."""
        self._note(self._planned_lanes, lane)

    def note_written(self, lane: int) -> None:
        """Says that a lane's executor has replied."""
        self._note(self._written_lanes, lane)

    def note_finished(self, lane: int) -> None:
        """Says that nothing more will come from a lane, whatever stage it was in."""
        self._planned_lanes.add(lane)
        self._written_lanes.add(lane)
        self._note(self._finished_lanes, lane)

    def _first_of_plan(self, lane: int) -> int:
        return lane - lane % self._attempts_per_plan

    def _note(self, done: set[int], number: int) -> None:
        done.add(number)
        # Wakes whoever waits now; who comes later looks before it waits.
        self._changed.set()
        self._changed.clear()

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await self._changed.wait()
