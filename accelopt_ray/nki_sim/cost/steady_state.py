"""Very long programs: the steady state of their longest loop is simulated and extended.

A loop's iterations repeat the same work once its first ones are over, so time and counts grow linearly with the trip
count. Two shortened programs give that line. Programs of ordinary size are simulated in full, since a shortened loop
misses what the last iterations do differently.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from accelopt_ray.nki_sim.cost.stream import executions
from accelopt_ray.nki_sim.program import Loop, Node, Program

FULL_EXECUTIONS = 250_000
"""Programs of at most this many instruction executions are simulated in full."""
SHORT_EXECUTIONS = 60_000
MINIMUM_TRIPS = 4

_PER_SECOND_SHARES = "_percent"
_NOT_EXTENSIVE = ("peak_flops_bandwidth_ratio", "mm_arithmetic_intensity", "dma_transfer_average_bytes")


@dataclass(frozen=True)
class Shortening:
    """Two shortened versions of a program and where the original lies on the line through them.

    Attributes:
        first: The shorter one.
        second: The longer one.
        weight: The original is ``second + weight * (second - first)``.
    """

    first: Program
    second: Program
    weight: float


def shortened(program: Program) -> Shortening | None:
    """Shortens a program's longest loop; None when the program is of ordinary size or has no such loop.

    Args:
        program: A traced kernel.
    """
    total = executions(program.body)
    if total <= FULL_EXECUTIONS:
        return None
    loop = _heaviest_long_loop(program.body)
    if loop is None:
        return None
    inside = total * 1.0 - executions(_with_trips(program.body, loop.id, 0))
    per_trip = inside / loop.trips
    longer = int(max(2 * MINIMUM_TRIPS, min(loop.trips - 1, SHORT_EXECUTIONS / per_trip)))
    shorter = longer // 2
    if longer >= loop.trips:
        return None
    return Shortening(
        replace(program, body=_with_trips(program.body, loop.id, shorter)),
        replace(program, body=_with_trips(program.body, loop.id, longer)),
        (loop.trips - longer) / (longer - shorter),
    )


def extend(first: float, second: float, weight: float) -> float:
    """The value of the full program, never below that of the longer shortened one."""
    return second + weight * max(0.0, second - first)


def extend_counters(
    first: dict[str, float], second: dict[str, float], latencies: tuple[float, float, float], weight: float
) -> dict[str, float]:
    """Counters of the full program.

    Args:
        first: Counters of the shorter program.
        second: Counters of the longer one.
        latencies: Latencies of the shorter, the longer and the full program.
        weight: As in :class:`Shortening`.

    Returns:
        Amounts on the line; shares of time through the times they stand for; ratios as in the longer program.
    """
    counters: dict[str, float] = {}
    for name, value in second.items():
        if name in _NOT_EXTENSIVE:
            counters[name] = value
        elif name.endswith(_PER_SECOND_SHARES):
            times = first.get(name, 0.0) * latencies[0], value * latencies[1]
            counters[name] = extend(*times, weight) / latencies[2]
        else:
            amount = extend(first.get(name, 0.0), value, weight)
            counters[name] = amount if name == "total_time" else round(amount)
    return counters


def _heaviest_long_loop(nodes: tuple[Node, ...]) -> Loop | None:
    """The outermost loop with enough trips on the way to where most executions are."""
    loops = [node for node in nodes if isinstance(node, Loop)]
    if not loops:
        return None
    heaviest = max(loops, key=lambda loop: loop.trips * executions(loop.body))
    if heaviest.trips > 4 * MINIMUM_TRIPS:
        return heaviest
    return _heaviest_long_loop(heaviest.body)


def _with_trips(nodes: tuple[Node, ...], loop: int, trips: int) -> tuple[Node, ...]:
    return tuple(
        replace(node, trips=trips if node.id == loop else node.trips, body=_with_trips(node.body, loop, trips))
        if isinstance(node, Loop)
        else node
        for node in nodes
    )
