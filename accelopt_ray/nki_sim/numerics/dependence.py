"""Which loops may run as one batched operation per instruction.

Batching a loop means that each instruction of its body runs for all iterations before the next instruction starts
(loop distribution). That keeps the program's meaning when no iteration touches what another one wrote, except within a
single instruction, which can then still be iterated by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from accelopt_ray.nki_sim.numerics.geometry import Interval, Nest, Touch, coefficient, tile_range
from accelopt_ray.nki_sim.program import Access, Affine, Instruction, Loop, MaskTerm, Opcode

#: Batching stops at tiles of this many elements: beyond it the cost of a call no longer matters, but the cache does.
ELEMENTWISE_LIMIT = 1 << 17
#: A product gains from long contractions and wide outputs as long as its operands stay in the last-level cache.
CONTRACTION_LIMIT = 1 << 22
#: Bodies with products in them: intermediate tiles should stay near the core.
PRODUCT_LIMIT = 1 << 19
#: A scan costs one call per column, so it gains from many rows.
SCAN_LIMIT = 1 << 21

#: Longer bodies (unrolled loops) are not examined: the pairs of their accesses are too many.
_LONGEST_BODY = 128

_UNBATCHABLE = frozenset({Opcode.RANDOM, Opcode.DROPOUT, Opcode.LOCAL_GATHER, Opcode.STREAM_SHUFFLE})


@dataclass(frozen=True)
class Batching:
    """Which loops run batched.

    Attributes:
        loops: Their ids; with a loop, all loops inside it are included.
        repeated: Pairs (loop, instruction) where the instruction depends on its own earlier iterations, so that it
            accumulates over the loop or iterates by itself.
    """

    loops: frozenset[int]
    repeated: frozenset[tuple[int, int]]


def choose_batched_loops(nest: Nest, only_contractions: bool = False) -> Batching:
    """Decides which loops run as batched operations.

    Args:
        nest: The program's loops and statements.
        only_contractions: Batch only loops that a product accumulates over, so that every other loop can be
            restricted to the iterations that a slice needs.
    """
    batched: set[int] = set()
    repeated: set[tuple[int, int]] = set()
    for node in nest.program.body:
        if isinstance(node, Loop):
            _visit(node, nest, batched, repeated, only_contractions)
    return Batching(frozenset(batched), frozenset(repeated))


def _visit(
    loop: Loop, nest: Nest, batched: set[int], repeated: set[tuple[int, int]], only_contractions: bool
) -> list[Instruction] | None:
    """Decides about ``loop`` and the loops inside it; returns its instructions when it is batched."""
    flat: list[Instruction] = []
    is_flat = True
    for node in loop.body:
        if isinstance(node, Loop):
            inner = _visit(node, nest, batched, repeated, only_contractions)
            if inner is None:
                is_flat = False
            else:
                flat.extend(inner)
        else:
            flat.append(node)
    if not is_flat or not flat or loop.trips < 1 or len(flat) > _LONGEST_BODY:
        return None
    if any(_depends_on(instruction, loop.id) or instruction.opcode in _UNBATCHABLE for instruction in flat):
        return None
    if nest.has_registers and any("reduce_cmd" in instruction.attributes for instruction in flat):
        return None
    self_dependent = carried_dependences(loop, flat, nest)
    if self_dependent is None:
        return None
    contracts = any(
        instruction.opcode is Opcode.MATMUL and instruction.accumulate and instruction.id in self_dependent
        for instruction in flat
    )
    if only_contractions and not contracts:
        return None
    largest = max(_elements(instruction, nest, batched) for instruction in flat) * loop.trips
    opcodes = {instruction.opcode for instruction in flat}
    limit = ELEMENTWISE_LIMIT
    if Opcode.SCAN in opcodes:
        limit = SCAN_LIMIT
    elif contracts:
        limit = CONTRACTION_LIMIT
    elif opcodes & {Opcode.MATMUL, Opcode.TRANSPOSE}:
        limit = PRODUCT_LIMIT
    if largest > limit:
        return None
    batched.add(loop.id)
    repeated.update((loop.id, instruction) for instruction in self_dependent)
    return flat


def _depends_on(instruction: Instruction, loop: int) -> bool:
    """Tells whether a mask or a static attribute of the instruction changes with the loop, or an index is dynamic."""
    starts = [term.start for term in instruction.mask]
    for attribute in instruction.attributes.values():
        for entry in attribute if isinstance(attribute, tuple) else (attribute,):
            if isinstance(entry, (Affine, MaskTerm)):
                starts.append(entry if isinstance(entry, Affine) else entry.start)
    if any(coefficient(start, loop) for start in starts):
        return True
    accesses = [*instruction.outputs, *(o for o in instruction.operands.values() if isinstance(o, Access))]
    return any(index.indirect is not None or index.tables for access in accesses for index in access.index)


def _elements(instruction: Instruction, nest: Nest, batched: set[int]) -> int:
    """Returns the size of the largest operand, counting the batched loops that move it."""
    largest = 1
    for access in (*instruction.outputs, *(o for o in instruction.operands.values() if isinstance(o, Access))):
        moved = {loop for index in access.index for loop, _ in index.start.terms if loop in batched}
        moved |= {loop for loop in nest.program.buffers[access.buffer].loops if loop in batched}
        largest = max(largest, prod(access.shape) * prod(nest.trips[loop] for loop in moved))
    return largest


def carried_dependences(loop: Loop, body: list[Instruction], nest: Nest) -> set[int] | None:
    """Finds the instructions of ``body`` that depend on themselves across iterations of ``loop``.

    Returns:
        Their ids, or None when different instructions depend on each other across iterations, or when a buffer of the
        body lives across iterations without being indexed by them.
    """
    inside = {instruction.id for instruction in body}
    result: set[int] = set()
    buffers = {access.buffer for i in body for access in i.outputs}
    for buffer in buffers:
        if loop.id in nest.program.buffers[buffer].loops:
            if any(touch.statement.instruction.id not in inside for touch in nest.touches[buffer]):
                return None
            continue
        entries = [touch for touch in nest.touches[buffer] if touch.statement.instruction.id in inside]
        for number, first in enumerate(entries):
            for second in entries[number:]:
                if not (first.is_write or second.is_write):
                    continue
                if iterations_are_disjoint(first, second, loop.id, nest):
                    continue
                mine, theirs = first.statement.instruction.id, second.statement.instruction.id
                if mine != theirs:
                    return None
                result.add(mine)
    return result


def iterations_are_disjoint(first: Touch, second: Touch, loop: int, nest: Nest) -> bool:
    """Tells whether two accesses never meet in different iterations of ``loop`` within one iteration of the loops
    around it."""
    if first.access.view_shape != second.access.view_shape:
        return False
    loops = first.statement.loops
    outside = set(loops[: loops.index(loop)])
    for mine, theirs in zip(first.access.index, second.access.index, strict=False):
        if mine.indirect is not None or theirs.indirect is not None:
            continue
        step = coefficient(mine.start, loop)
        if step == 0 or step != coefficient(theirs.start, loop):
            continue
        difference = Interval(mine.start.constant - theirs.start.constant, mine.start.constant - theirs.start.constant)
        shared = {term[0] for term in (*mine.start.terms, *theirs.start.terms)} & outside
        for identity in shared:
            delta = coefficient(mine.start, identity) - coefficient(theirs.start, identity)
            difference = difference + Interval.multiples(delta, nest.trips[identity])
        for sign, index in ((1, mine), (-1, theirs)):
            for identity, factor in index.start.terms:
                if identity != loop and identity not in outside:
                    difference = difference + Interval.multiples(sign * factor, nest.trips[identity])
        reach = tile_range(mine, first.access.shape)
        other = tile_range(theirs, second.access.shape)
        difference = difference + Interval(reach.low - other.high, reach.high - other.low)
        if -abs(step) < difference.low and difference.high < abs(step):
            return True
    return False
