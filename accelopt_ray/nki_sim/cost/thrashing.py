"""When the compiler leaves a nest as it is written."""

from __future__ import annotations

from collections import Counter

from accelopt_ray.nki_sim.cost.residency import Steps
from accelopt_ray.nki_sim.cost.stream import Stream
from accelopt_ray.nki_sim.cost.value_numbering import Events

THRASHING_FACTOR = 4


def hoisting_blocked(stream: Stream, events: Events, steps: Steps) -> set[int]:
    """Operations of nests out of which nothing is hoisted.

    Where hoisted loads are dropped and issued again many times over, there is no room for what is kept from one
    iteration to the next, and hoisting has gained nothing. Two published profiles show such nests executed as written:
    a large matmul repeats its transposes in every iteration, a state-space scan its broadcasts. Nests whose loads stay
    resident have theirs hoisted.

    Args:
        stream: The unrolled program.
        events: What is executed with everything hoisted.
        steps: What happens in SBUF then.

    Returns:
        Operation numbers; empty when no load thrashes.
    """
    if not steps.misses:
        return set()
    loaded: Counter[int] = Counter()
    for op, writes in zip(events.op, events.writes, strict=True):
        if op in steps.misses:
            loaded[op] += sum(steps.storage_transfer[storage] for storage in writes)
    nests = {
        operation.loops[0]
        for op, misses in steps.misses.items()
        if (operation := stream.operations[op]).loops
        and misses > THRASHING_FACTOR * loaded[op]
    }
    return {
        number for number, operation in enumerate(stream.operations) if operation.loops and operation.loops[0] in nests
    }
