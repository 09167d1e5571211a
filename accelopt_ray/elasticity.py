"""How many slots a pool keeps open, from what was wanted of it lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence


class SlotDemand:
    """The most slots that were wanted at once within a window of time.

    Slots are opened as soon as they are wanted and given back when a whole window has not wanted them: a node takes
    minutes to come up, and an iteration's pauses are no reason to send it away.
    """

    def __init__(self, most: int, keep_s: float) -> None:
        """Starts with nothing wanted.

        Args:
            most: Slots at most.
            keep_s: The window, in seconds.
        """
        self.most = most
        self._keep_s = keep_s
        # Only what nothing later exceeds can become the most again: times ascend, numbers descend.
        self._peaks: deque[tuple[float, int]] = deque()

    def note(self, wanted: int, now_s: float) -> int:
        """Notes how many are wanted at a time no earlier than the last; returns how many are to be open."""
        wanted = min(wanted, self.most)
        while self._peaks and self._peaks[-1][1] <= wanted:
            self._peaks.pop()
        self._peaks.append((now_s, wanted))
        while self._peaks[0][0] < now_s - self._keep_s:
            self._peaks.popleft()
        return self._peaks[0][1]


def dispensable(idle: Mapping[str, Sequence[int]], in_use: Mapping[str, int], surplus: int) -> list[int]:
    """Chooses the slots to give back: all of a node or none, for only an empty node can be taken away.

    Args:
        idle: Idle slots by node.
        in_use: Number of slots that are not idle, by node.
        surplus: Slots that may go.

    Returns:
        No more than ``surplus`` of the idle slots. Small nodes go first.
    """
    chosen: list[int] = []
    for node, slots in sorted(idle.items(), key=lambda item: len(item[1])):
        if not in_use.get(node) and len(chosen) + len(slots) <= surplus:
            chosen += slots
    return chosen
