"""Loops of a trace: their variables, and the request for one whose index has to be a number."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from accelopt_ray.nki_sim.program import LoopKind

Site = tuple[int, int]
"""Source line and instruction offset of a loop's iterator."""


@dataclass(eq=False)
class LoopVariable:
    """One loop of the trace.

    Attributes:
        id: Number within the program.
        trips: Number of iterations.
        kind: Which iterator wrote it.
        site: Source line and instruction offset of the iterator, the same in every trace of one kernel.
        name: The kernel's name for the index, for messages.
        open: Whether its body is being traced.
    """

    id: int
    trips: int
    kind: LoopKind
    site: Site
    name: str
    open: bool = True


class OnlyIndex(int):
    """The index of a loop of one iteration: a number that still knows its loop.

    Attributes:
        loop: That loop.
    """

    loop: LoopVariable

    def __new__(cls, value: int, loop: LoopVariable) -> OnlyIndex:
        index = super().__new__(cls, value)
        index.loop = loop
        return index


class ConcreteLoopsNeeded(BaseException):
    """The kernel needs the value of a loop index.

    Not an ``Exception``, so that kernels do not swallow it; a bare ``except`` still does, so every request is also kept
    in :data:`requested_sites`.
    """

    def __init__(self, sites: Iterable[Site]) -> None:
        super().__init__()
        self.sites = frozenset(sites)
        requested_sites.update(self.sites)


#: Loops whose index was needed since the tracer last cleared it.
requested_sites: set[Site] = set()
