"""When the compiler leaves a nest as it is written."""

from __future__ import annotations

from collections import Counter

from accelopt_ray.nki_sim.cost.residency import Steps
from accelopt_ray.nki_sim.cost.stream import Stream
from accelopt_ray.nki_sim.cost.value_numbering import Events

THRASHING_FACTOR = 4


def hoisting_blocked(stream: Stream, events: Events, steps: Steps) -> set[int]:
    """Operations of nests out of which nothing is hoisted.

    A nest whose loads already miss in SBUF many times over has no room for values kept from one outer iteration to the
    next. The published profile of a large matmul shows its transposes repeated in every iteration of such a nest, while
    nests whose loads stay resident have theirs hoisted.

    Args:
        stream: The unrolled program.
        events: Its events with everything hoisted.
        steps: What happened in SBUF then.

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
        if (operation := stream.operations[op]).loops and misses > THRASHING_FACTOR * loaded[op]
    }
    return {
        number for number, operation in enumerate(stream.operations) if operation.loops and operation.loops[0] in nests
    }
