"""How many calls an endpoint is given at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class AdaptiveLimit:
    """Bounds the calls in flight and finds the bound that an endpoint can bear.

    Additive increase, multiplicative decrease, as in TCP: each success raises the limit by a fraction, so that a full
    round of successes raises it by one; an overload halves it. Overloads reported by calls that started before the
    last decrease do not count again, since they tell of the same overload. Waiting calls are served in turn.

    Belongs to one event loop.
    """

    def __init__(self, maximum: int) -> None:
        """Starts at the maximum, which is the user's word; an endpoint that cannot bear it says so."""
        if maximum < 1:
            raise ValueError(f"a limit of {maximum} calls in flight would allow none")
        self._maximum = maximum
        self._limit = float(maximum)
        self._in_flight = 0
        self._decreases = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def limit(self) -> int:
        """Calls allowed in flight at present."""
        return max(1, int(self._limit))

    @property
    def in_flight(self) -> int:
        """Calls in flight."""
        return self._in_flight

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[int]:
        """Holds one place for the duration of a call; yields the ticket for :meth:`overloaded`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        try:
            await turn
            yield self._decreases
        finally:
            # A call cancelled while it waits has no place to give back, unless it was admitted at the same moment.
            if turn.done() and not turn.cancelled():
                self._in_flight -= 1
            self._admit()

    def succeeded(self) -> None:
        """A call was answered."""
        self._limit = min(float(self._maximum), self._limit + 1 / self._limit)
        self._admit()

    def overloaded(self, ticket: int) -> None:
        """A call was turned away or not answered in time."""
        if ticket == self._decreases:
            self._decreases += 1
            self._limit = max(1.0, self._limit / 2)

    def _admit(self) -> None:
        while self._waiting and self._in_flight < self.limit:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self._in_flight += 1
                turn.set_result(None)
