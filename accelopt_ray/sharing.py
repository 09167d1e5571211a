"""Fair sharing of scarce things among several owners that all want more of them than there are."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T", bound=Hashable)


class FairQueue(Generic[_T]):
    """Hands items out and takes them back; belongs to one event loop.

    An item that comes free goes to the waiting owner that holds the fewest, of equals to the one that was served
    longest ago; among one owner's requests the first comes first. A lone owner may hold all of them.
    """

    def __init__(self) -> None:
        self._free: deque[_T] = deque()
        self._waiting: dict[str, deque[asyncio.Future[_T]]] = {}
        self._owners: dict[_T, str] = {}
        self._held: Counter[str] = Counter()
        self._last_served: dict[str, int] = {}
        self._served = 0

    def put_nowait(self, item: _T) -> None:
        """Offers an item, new or taken back from whoever held it."""
        self.forget(item)
        self._free.append(item)
        self._serve()

    def forget(self, item: _T) -> None:
        """Counts an item as no longer held, without offering it: it is broken."""
        owner = self._owners.pop(item, None)
        if owner is not None:
            self._held[owner] -= 1

    def withdraw(self, item: _T) -> None:
        """Takes an item out that nobody holds; harmless if somebody does."""
        with contextlib.suppress(ValueError):
            self._free.remove(item)

    async def get(self, owner: str) -> _T:
        """Waits for an item for an owner."""
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(future)
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            # Cancelled in the very turn in which it was served: the item goes on to the next.
            if future.done() and not future.cancelled():
                self.put_nowait(future.result())
            raise

    def _serve(self) -> None:
        while self._free:
            owner = self._next_owner()
            if owner is None:
                return
            future = self._waiting[owner].popleft()
            item = self._free.popleft()
            self._served += 1
            self._last_served[owner] = self._served
            self._owners[item] = owner
            self._held[owner] += 1
            future.set_result(item)

    def _next_owner(self) -> str | None:
        for owner in list(self._waiting):
            queue = self._waiting[owner]
            while queue and queue[0].done():
                queue.popleft()
            if not queue:
                del self._waiting[owner]
        # Equal in both, the one that has waited since longest stands first in the dictionary.
        return min(self._waiting, key=lambda name: (self._held[name], self._last_served.get(name, 0)), default=None)
