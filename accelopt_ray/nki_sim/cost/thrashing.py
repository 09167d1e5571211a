"""When the compiler leaves a nest as it is written."""

from __future__ import annotations

from collections import Counter

from accelopt_ray.nki_sim.cost.residency import Steps
from accelopt_ray.nki_sim.cost.stream import Stream
from accelopt_ray.nki_sim.cost.value_numbering import Events
from accelopt_ray.nki_sim.program import Opcode

THRASHING_FACTOR = 4
_ELEMENTWISE = frozenset(
    {Opcode.ACTIVATION, Opcode.TENSOR_TENSOR, Opcode.TENSOR_SCALAR, Opcode.RECIPROCAL, Opcode.MEMSET, Opcode.IOTA}
)


def hoisting_blocked(stream: Stream, events: Events, steps: Steps) -> set[int]:
    """Operations that are executed as often as they are written.

    Where hoisted loads are dropped and issued again many times over, there is no room for what is kept from one
    iteration to the next, and hoisting has gained nothing. Two published profiles show such nests executed as written:
    a large matmul repeats its transposes in every iteration, a state-space scan its broadcasts. Nests whose loads stay
    resident have theirs hoisted.

    An elementwise result or a partition broadcast that would have to be spilled is not kept either: repeating it is no
    dearer than a reload. Transposes are: two published profiles show them kept and spilled.

    Args:
        stream: The unrolled program.
        events: What is executed with everything hoisted.
        steps: What happens in SBUF then.

    Returns:
        Operation numbers; empty when everything may be hoisted.
    """
    cheap = {
        number
        for number, operation in enumerate(stream.operations)
        if operation.instruction.attributes.get("broadcast") in steps.spilled_buffers
        or (
            operation.instruction.opcode in _ELEMENTWISE
            and operation.instruction.outputs[0].buffer in steps.spilled_buffers
        )
    }
    written, executed = Counter(stream.op), Counter(events.op)

    def shared(operations: set[int]) -> set[int]:
        """Those of the operations that some execution was spared."""
        return {number for number in operations if executed[number] < written[number]}

    if not steps.misses:
        return shared(cheap)
    loaded: Counter[int] = Counter()
    for op, writes in zip(events.op, events.writes, strict=True):
        if op in steps.misses:
            loaded[op] += sum(steps.storage_transfer[storage] for storage in writes)
    nests = {
        operation.loops[0]
        for op, misses in steps.misses.items()
        if (operation := stream.operations[op]).loops and misses > THRASHING_FACTOR * loaded[op]
    }
    as_written = {
        number for number, operation in enumerate(stream.operations) if operation.loops and operation.loops[0] in nests
    }
    return shared(cheap | as_written)
