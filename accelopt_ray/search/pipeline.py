"""Iterations under way: when the present one is far enough for a selection, and who still counts later.

With a share q of 1 selection waits for every attempt of the iteration. With a smaller share it fires once that share of
the iteration's attempts is final; the next iteration starts beside the stragglers, which count in whichever selection
comes after them, and the last iteration waits for all. What then follows depends on who arrived in time: the
``iterations`` table records it, and a search that goes on from that record waits for the same attempts each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from accelopt_ray.search.candidates import PlanGroup
from accelopt_ray.search.context import SearchContext
from accelopt_ray.search.iteration import Iteration, IterationResult
from accelopt_ray.search.selection import anticipate

_SOON = 0.5
"""Of the share that is waited for: from here on the checks of those that would be chosen are completed."""


class Pipeline:
    """One search's iterations under way; belongs to one event loop."""

    def __init__(self, context: SearchContext) -> None:
        """Starts with none."""
        self._context = context
        self._running: list[Iteration] = []

    async def run(self, iteration: Iteration, *, last: bool) -> IterationResult:
        """Starts an iteration and returns when it is time to select.

        Args:
            iteration: The next iteration.
            last: Whether no later selection could count its stragglers.

        Returns:
            The iteration's beam, and every attempt that has become final since the last selection.

        Raises:
            Exception: Whatever an iteration under way raises.
        """
        iteration.start()
        self._running.append(iteration)
        recorded = self._context.services.counted(self._context.task.name, iteration.number)
        if recorded is not None:
            await self._wait(lambda: recorded <= self._final_ids())
        elif last or self._context.settings.selection_share == 1.0:
            await self._wait(lambda: False)
        else:
            share = self._context.settings.selection_share

            def enough() -> bool:
                if iteration.final_share >= _SOON * share:
                    anticipate(self._context, iteration.beam, self._at_hand())
                return iteration.final_share >= share

            await self._wait(enough)
        groups = self._take(recorded)
        return IterationResult(iteration.beam, tuple(groups))

    async def drain(self) -> tuple[PlanGroup, ...]:
        """Waits for all stragglers and returns their attempts; the search has no further iteration."""
        await self._wait(lambda: False)
        return tuple(self._take(None))

    async def close(self) -> None:
        """Cancels whatever is under way."""
        for iteration in self._running:
            iteration.cancel()
        await asyncio.gather(*(iteration.work for iteration in self._running), return_exceptions=True)
        self._running.clear()

    def _final_ids(self) -> set[str]:
        return {candidate_id for iteration in self._running for candidate_id in iteration.final_ids}

    def _at_hand(self) -> Sequence[PlanGroup]:
        return [group for iteration in self._running for group in iteration.at_hand()]

    def _take(self, only: frozenset[str] | None) -> Sequence[PlanGroup]:
        groups = [group for iteration in self._running for group in iteration.take(only)]
        self._running = [iteration for iteration in self._running if not (iteration.work.done() and iteration.taken)]
        return groups

    async def _wait(self, ready: Callable[[], bool]) -> None:
        """Returns when it is time, or when nothing is under way any more."""
        while True:
            working = [iteration.work for iteration in self._running if not iteration.work.done()]
            for iteration in self._running:
                if iteration.work.done():
                    iteration.work.result()
            if not working or ready():
                return
            changed = asyncio.ensure_future(self._context.arrived.wait())
            waited: list[asyncio.Future[Any]] = [changed, *working]
            try:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()
            self._context.arrived.clear()
