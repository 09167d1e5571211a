"""Proofs that a buffer is written before it is read, so that it need not be initialised.

For each read the proof looks for earlier writes, in program order, whose union contains it. Loops around both are the
same iteration; loops around the write alone have finished, so their writes count as a whole.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from accelopt_ray.nki_sim.numerics.geometry import (
    Interval,
    Nest,
    Touch,
    coefficient,
    is_rewrite,
    tile_range,
    value_range,
    without,
)
from accelopt_ray.nki_sim.program import Affine, DimIndex, MaskTerm, Opcode, Role

#: How many accesses before a read are searched for the writes that cover it; beyond, memory is simply filled.
_LOOK_BACK = 64


@dataclass(frozen=True)
class Initialisation:
    """What a buffer needs before its first use in each of its lifetimes.

    Attributes:
        needed: Whether it must be filled whatever the masks do.
        unless: Mask terms that make the fill superfluous when they all hold for every element, with the shape of the
            tile they apply to.
        overwrites: Ids of accumulating products whose first iteration replaces the initial zeros.
    """

    needed: bool
    unless: tuple[tuple[MaskTerm, tuple[int, ...]], ...] = ()
    overwrites: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Box:
    """Per dimension: a symbolic start over the shared loops, and the interval around it."""

    symbols: tuple[Affine, ...]
    reach: tuple[Interval, ...]


def plan_initialisation(buffer: int, scope: int | None, nest: Nest) -> Initialisation:
    """Decides whether the memory of ``buffer`` must be filled at the start of each iteration of ``scope``."""
    entry = nest.program.buffers[buffer]
    entries = nest.touches[buffer]
    first_write = min((touch.statement.position for touch in entries if touch.is_write), default=-1)
    overwrites = frozenset(
        touch.statement.instruction.id
        for touch in entries
        if touch.is_write
        and entry.fill == 0
        and touch.statement.position == first_write
        and _first_write_replaces(touch, scope, nest)
    )
    needs_final_read = entry.role is Role.OUTPUT
    terms: list[tuple[MaskTerm, tuple[int, ...]]] = []
    for touch in entries:
        if touch.is_write or touch.statement.instruction.id in overwrites:
            continue
        found = _covering_masks(touch, overwrites, nest)
        if found is None:
            return Initialisation(True, overwrites=frozenset())
        terms.extend(found)
    if needs_final_read:
        whole = _Box(tuple(Affine() for _ in entry.shape), tuple(Interval(0, extent - 1) for extent in entry.shape))
        found = _covered(whole, [t for t in entries if t.is_write], (), overwrites, nest, entry.shape)
        if found is None:
            return Initialisation(True, overwrites=frozenset())
        terms.extend(found)
    return Initialisation(False, tuple(terms), overwrites)


def _first_write_replaces(touch: Touch, scope: int | None, nest: Nest) -> bool:
    """Tells whether a buffer's first write is a product that accumulates each element in one sweep.

    The loops that do not move the output are the sweep; the others must move it to new elements.
    """
    instruction = touch.statement.instruction
    if instruction.opcode is not Opcode.MATMUL or not instruction.accumulate:
        return False
    inside = _loops_inside(touch.statement.loops, scope)
    created = set(nest.program.buffers[touch.access.buffer].loops)
    for loop in inside:
        if loop in created:
            continue
        moved = any(coefficient(index.start, loop) for index in touch.access.index)
        if moved and not _own_iterations_disjoint(touch, loop, nest):
            return False
    return True


def _loops_inside(loops: tuple[int, ...], scope: int | None) -> tuple[int, ...]:
    return loops if scope is None or scope not in loops else loops[loops.index(scope) + 1 :]


def _own_iterations_disjoint(touch: Touch, loop: int, nest: Nest) -> bool:
    loops = touch.statement.loops
    inner = set(loops[loops.index(loop) + 1 :])
    for index in touch.access.index:
        step = coefficient(index.start, loop)
        if not step or index.indirect is not None:
            continue
        width = tile_range(index, touch.access.shape)
        for identity, factor in index.start.terms:
            if identity in inner:
                width = width + Interval.multiples(factor, nest.trips[identity])
        if width.high - width.low < abs(step):
            return True
    return False


def _covering_masks(
    read: Touch, overwrites: frozenset[int], nest: Nest
) -> list[tuple[MaskTerm, tuple[int, ...]]] | None:
    """Returns the masks under which earlier writes cover ``read``, or None when they do not."""
    if any(index.indirect is not None or index.tables for index in read.access.index):
        return None
    entries = nest.touches[read.access.buffer]
    end = bisect_left(entries, read.statement.position, key=lambda touch: touch.statement.position)
    writes = [
        touch
        for touch in entries[max(0, end - _LOOK_BACK) : end]
        if touch.is_write and touch.access.view_shape == read.access.view_shape
    ]
    return _covered(None, writes, read.statement.loops, overwrites, nest, read.access.view_shape, read)


def _covered(
    box: _Box | None,
    writes: list[Touch],
    loops: tuple[int, ...],
    overwrites: frozenset[int],
    nest: Nest,
    shape: tuple[int, ...],
    read: Touch | None = None,
) -> list[tuple[MaskTerm, tuple[int, ...]]] | None:
    """Tries ever larger sets of writes, the latest first, grouped by the loops they share with the read."""
    groups: dict[tuple[int, ...], list[Touch]] = {}
    for write in reversed(writes):
        groups.setdefault(_shared(write.statement.loops, loops), []).append(write)
    for shared, members in groups.items():
        target = box if read is None else _read_box(read, shared, nest)
        if target is None:
            continue
        pieces: list[tuple[Interval, ...]] = []
        terms: list[tuple[MaskTerm, tuple[int, ...]]] = []
        for number, write in enumerate(members):
            piece = _write_box(write, shared, overwrites, nest, shape)
            if piece is not None and piece[0].symbols == target.symbols:
                pieces.append(piece[0].reach)
                terms.extend((term, write.access.shape) for term in piece[1])
            is_last = number == len(members) - 1
            if (is_last or len(pieces) & (len(pieces) - 1) == 0) and _union_contains(pieces, target.reach):
                return terms
    return None


def _shared(mine: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, ...]:
    length = 0
    for a, b in zip(mine, theirs, strict=False):
        if a != b:
            break
        length += 1
    return mine[:length]


def _read_box(read: Touch, shared: tuple[int, ...], nest: Nest) -> _Box:
    symbols, reach = [], []
    for index in read.access.index:
        own = {loop for loop, _ in index.start.terms if loop not in shared}
        symbols.append(without(Affine(0, index.start.terms), own))
        reach.append(value_range(without(index.start, shared), nest.trips) + tile_range(index, read.access.shape))
    return _Box(tuple(symbols), tuple(reach))


def _write_box(
    write: Touch, shared: tuple[int, ...], overwrites: frozenset[int], nest: Nest, shape: tuple[int, ...]
) -> tuple[_Box, list[MaskTerm]] | None:
    """Returns what a write fills for one iteration of the shared loops, and the masks that this rests on."""
    instruction = write.statement.instruction
    if (is_rewrite(instruction) and instruction.id not in overwrites) or any(
        nest.trips[loop] < 1 for loop in write.statement.loops
    ):
        return None
    symbols, reach = [], []
    used: set[tuple[str, int]] = set()
    clipped: set[MaskTerm] = set()
    for dim, index in enumerate(write.access.index):
        if index.indirect is not None or index.tables:
            return None
        steps = []
        for axis, stride in index.strides:
            steps.append((abs(stride), write.access.shape[axis], ("axis", axis)))
        for loop, factor in index.start.terms:
            if loop not in shared:
                steps.append((abs(factor), nest.trips[loop], ("loop", loop)))
        width = 1
        for stride, extent, source in sorted(steps):
            if extent == 1:
                continue
            if source in used or stride > width:
                return None
            used.add(source)
            width += stride * (extent - 1)
        own = {loop for loop, _ in index.start.terms if loop not in shared}
        symbols.append(without(Affine(0, index.start.terms), own))
        hull = value_range(without(index.start, shared), nest.trips) + tile_range(index, write.access.shape)
        for term in instruction.mask:
            if _keeps_in_bounds(term, index, shape[dim]):
                clipped.add(term)
                hull = Interval(hull.low, min(hull.high, shape[dim] - 1))
        reach.append(hull)
    masks = [term for term in instruction.mask if term not in clipped]
    return _Box(tuple(symbols), tuple(reach)), masks


def _keeps_in_bounds(term: MaskTerm, index: DimIndex, extent: int) -> bool:
    """Tells whether the mask says no more than that the index stays below ``extent``."""
    mirrored = tuple(sorted((loop, -factor) for loop, factor in index.start.terms))
    return (
        tuple(sorted(term.start.terms)) == mirrored
        and term.start.constant == extent - 1 - index.start.constant
        and sorted(term.strides) == sorted((axis, -stride) for axis, stride in index.strides)
    )


def _union_contains(boxes: list[tuple[Interval, ...]], target: tuple[Interval, ...]) -> bool:
    """Tells whether the union of ``boxes`` contains ``target``, by joining boxes that touch along one dimension."""
    pending = boxes
    while True:
        if any(all(b.low <= t.low and t.high <= b.high for b, t in zip(box, target, strict=True)) for box in pending):
            return True
        before = len(pending)
        for dim in range(len(target)):
            pending = _joined(pending, dim)
        if len(pending) == before:
            return False


def _joined(boxes: list[tuple[Interval, ...]], dim: int) -> list[tuple[Interval, ...]]:
    """Joins boxes that differ in one dimension only and touch there."""
    groups: dict[tuple[Interval, ...], list[Interval]] = {}
    for box in boxes:
        groups.setdefault((*box[:dim], *box[dim + 1 :]), []).append(box[dim])
    result: list[tuple[Interval, ...]] = []
    for rest, intervals in groups.items():
        merged: list[Interval] = []
        for interval in sorted(intervals, key=lambda candidate: candidate.low):
            if merged and interval.low <= merged[-1].high + 1:
                merged[-1] = Interval(merged[-1].low, max(merged[-1].high, interval.high))
            else:
                merged.append(interval)
        result.extend((*rest[:dim], interval, *rest[dim:]) for interval in merged)
    return result
