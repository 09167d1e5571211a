"""What a run tells those who watch it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        name: A table of which a row was recorded, or an event of the search.
        values: The row's short columns, or the event's values.
    """

    name: str
    values: Mapping[str, object]


class EventLog:
    """All events so far, for watchers that ask again and again. Belongs to one event loop."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._grown = asyncio.Event()

    def append(self, event: Event) -> None:
        """Adds an event and wakes the watchers."""
        self._events.append(event)
        self._grown.set()
        self._grown = asyncio.Event()

    async def after(self, position: int, wait_s: float) -> list[Event]:
        """Returns the events from a position on; waits at most so many seconds for the first of them."""
        if position >= len(self._events):
            try:
                await asyncio.wait_for(self._grown.wait(), wait_s)
            except asyncio.TimeoutError:
                return []
        return self._events[position:]
