"""Which of several attempts at one kernel is the first, whatever order they arrive in.

A kernel is evaluated the moment its first copy arrives, but whose it is must not depend on arrival: it belongs to the
attempt that comes first by position. That is settled once every lane before a copy is closed, that is, can bring no
further kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Position = tuple[int, int]
"""Lane (candidate, plan and attempt in one number) and repair."""


@dataclass
class Ownership:
    """One iteration's claims.

    Attributes:
        earlier: Owner's evaluation id by content, from earlier iterations; those are theirs for good.
    """

    earlier: dict[str, str]
    _claims: dict[str, list[Position]] = field(default_factory=dict)
    _closed: set[int] = field(default_factory=set)
    _first_open: int = 0

    def claim(self, position: Position, content: str) -> None:
        """Says that the attempt at ``position`` has this content."""
        self._claims.setdefault(content, []).append(position)

    def close(self, lane: int) -> None:
        """Says that no further kernel will come from a lane."""
        self._closed.add(lane)
        while self._first_open in self._closed:
            self._first_open += 1

    def settled(self, position: Position) -> bool:
        """Whether nothing can come before ``position`` any more; within a lane, repairs come in order."""
        return position[0] <= self._first_open

    def owner(self, content: str) -> Position | None:
        """Returns the first position with this content; None if an earlier iteration owns it."""
        return None if content in self.earlier else min(self._claims[content])
