"""An event loop whose clock jumps: what sleeps for hours takes as long as its computing does."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Never waits: where nothing is ready, its time moves on to the next timer.

    For programs that wait for their own timers alone. Waiting for other processes or threads would look like being
    stuck for ever.
    """

    def __init__(self) -> None:
        """Starts at time 0."""
        self._now_s = 0.0
        super().__init__(_Impatient(self))

    def time(self) -> float:
        """Seconds since the start."""
        return self._now_s

    def move_on(self, seconds: float) -> None:
        """Lets time pass."""
        self._now_s += seconds


class _Impatient(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing will ever happen: every task waits for another")
        if not ready and timeout is not None and timeout > 0:
            self._loop.move_on(timeout)
        return ready


def run_in_virtual_time(main: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine to its end; as :func:`asyncio.run`."""
    loop = VirtualTimeLoop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        asyncio.set_event_loop(None)
        loop.close()
