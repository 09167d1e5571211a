"""Dividing buffers into the pieces that value numbering and SBUF residency work with.

A compiler keeps and spills parts of tensors, not whole ones: a published profile of a batched softmax shows a part of
its score tensor resident and the rest spilled. So the unit here is one tile (a buffer's block index within one
iteration of the loops that enclose its creation), cut along the free dimensions where the program's accesses cut it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from accelopt_ray.nki_sim.program import Access, Affine, Buffer, DimIndex, Instruction, Loop, Program, Space

MAX_PIECES_PER_DIM = 256
MAX_PIECES_PER_TILE = 256

ITEM_BYTES: Mapping[str, int] = {
    "float32": 4,
    "tfloat32": 4,
    "int32": 4,
    "uint32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def item_bytes(dtype: str) -> int:
    """Bytes of one element; the 8-bit float types share the default of one byte."""
    return ITEM_BYTES.get(dtype, 1)


@dataclass(frozen=True)
class Placement:
    """How one buffer is numbered.

    Attributes:
        base: Number of its first unit.
        count: How many units it has over all iterations.
        loop_strides: Units from one iteration to the next, for each loop around the buffer's creation.
        dim_pieces: For each dimension of the buffer: (piece size in elements, or 0 when the dimension is not divided;
            units from one piece to the next).
        unit_bytes: Bytes per partition of one unit (bytes of the whole piece in HBM).
        tile_units: Units of one tile; the first unit of a tile is a multiple of it after ``base``.
        whole: Whether accesses through other views or indirect ones made the whole tile one unit.
    """

    base: int
    count: int
    loop_strides: tuple[tuple[int, int], ...]
    dim_pieces: tuple[tuple[int, int], ...]
    unit_bytes: int
    tile_units: int
    whole: bool


@dataclass(frozen=True)
class AccessPlan:
    """The units one static access touches: ``base`` + loop terms + each of ``offsets``.

    Attributes:
        buffer: Buffer id.
        base: Unit number at loop indices 0.
        terms: Pairs of loop id and units per iteration.
        offsets: Relative unit numbers.
        exact: The access covers its units completely (all partitions, all elements).
        position: Affine element position of the access in its view, to tell apart inexact accesses of one unit.
    """

    buffer: int
    base: int
    terms: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...]
    exact: bool
    position: Affine


def span(index: DimIndex, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Extent of one dimension's footprint relative to its start: (lowest offset, length, distinct positions bound)."""
    low, high, distinct = 0, 0, 1
    for axis, stride in index.strides:
        reach = stride * (shape[axis] - 1)
        low, high = low + min(0, reach), high + max(0, reach)
        distinct *= shape[axis]
    for axis, table in index.tables:
        used = table[: shape[axis]]
        low, high = low + min(used), high + max(used)
        distinct *= len(set(used))
    return low, high - low + 1, distinct


def add_affine(terms: Iterable[tuple[int, Affine]]) -> Affine:
    """Sum of factor times affine expression."""
    constant = 0
    coefficients: dict[int, int] = {}
    for factor, affine in terms:
        constant += factor * affine.constant
        for loop, coefficient in affine.terms:
            coefficients[loop] = coefficients.get(loop, 0) + factor * coefficient
    return Affine(constant, tuple(sorted((loop, value) for loop, value in coefficients.items() if value)))


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a contiguous array."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


def flat_position(access: Access) -> Affine:
    """Element position of the access's first coordinate in its view's flattened elements."""
    strides = row_major_strides(access.view_shape)
    return add_affine((stride, index.start) for stride, index in zip(strides, access.index, strict=True))


def accesses_of(instruction: Instruction) -> list[Access]:
    """All tiles an instruction reads or writes."""
    return [*instruction.outputs, *(value for value in instruction.operands.values() if isinstance(value, Access))]


class Pieces:
    """The unit numbering of a program."""

    def __init__(self, program: Program, *, sub_tile_units: bool = True) -> None:
        """Numbers all units of all buffers that hold values between instructions.

        Args:
            program: The program after rewriting.
            sub_tile_units: Whether tiles are cut along their free dimensions.
        """
        self._program = program
        trips = dict(_loop_trips(program))
        accesses: dict[int, list[Access]] = {}
        written: set[int] = set()
        read: set[int] = set()
        for _, instruction in program.walk():
            for access in accesses_of(instruction):
                accesses.setdefault(access.buffer, []).append(access)
            written.update(access.buffer for access in instruction.outputs)
            read.update(value.buffer for value in instruction.operands.values() if isinstance(value, Access))
        self.written = frozenset(written)
        self.placements: dict[int, Placement] = {}
        self.total = 0
        for buffer_id, uses in accesses.items():
            buffer = program.buffers[buffer_id]
            if buffer.space is Space.HBM and not (buffer_id in written and buffer_id in read):
                continue  # inputs never change and outputs that nobody reads carry no dependence
            placement = _place(buffer, uses, trips, self.total, sub_tile_units)
            self.placements[buffer_id] = placement
            self.total += placement.count

    def free_sizes(self, access: Access) -> tuple[int, ...]:
        """Piece sizes of the free dimensions of an access's buffer; empty when it carries no dependence."""
        placement = self.placements.get(access.buffer)
        if placement is None:
            return ()
        return tuple(size for size, _ in placement.dim_pieces[self._program.buffers[access.buffer].block_dims :])

    def plan(self, access: Access) -> AccessPlan | None:
        """The units of an access; None when its buffer carries no dependence."""
        placement = self.placements.get(access.buffer)
        if placement is None:
            return None
        buffer = self._program.buffers[access.buffer]
        constant = placement.base
        coefficients: dict[int, int] = dict(placement.loop_strides)
        offsets = [0]
        exact = not placement.whole
        partition_dim = buffer.block_dims if buffer.space is not Space.HBM else -1
        for dim, index in enumerate(access.index):
            low, length, distinct = span(index, access.shape)
            if index.indirect is not None:
                exact = False
            if dim == partition_dim:
                exact = exact and length == buffer.shape[dim] and not index.start.terms and distinct >= length
                continue
            if placement.whole and access.view_shape != buffer.shape:
                continue
            size, stride = placement.dim_pieces[dim]
            if size == 0:
                exact = exact and length == buffer.shape[dim] and distinct >= length
                continue
            constant += (index.start.constant + low) // size * stride
            for loop, coefficient in index.start.terms:
                coefficients[loop] = coefficients.get(loop, 0) + coefficient // size * stride
            touched = -(-length // size)
            exact = exact and length % size == 0 and distinct >= length
            if touched > 1:
                offsets = [offset + piece * stride for offset in offsets for piece in range(touched)]
        terms = tuple(sorted((loop, value) for loop, value in coefficients.items() if value))
        return AccessPlan(access.buffer, constant, terms, tuple(offsets), exact, flat_position(access))


def _place(buffer: Buffer, uses: list[Access], trips: Mapping[int, int], base: int, sub_tile_units: bool) -> Placement:
    on_chip = buffer.space is not Space.HBM
    partition_dim = buffer.block_dims if on_chip else -1
    whole = any(use.view_shape != buffer.shape for use in uses)
    sizes: list[int] = []
    for dim, extent in enumerate(buffer.shape):
        is_block = on_chip and dim < buffer.block_dims
        if dim == partition_dim or whole or (on_chip and not is_block and not sub_tile_units):
            sizes.append(0)
            continue
        sizes.append(_granularity(dim, extent, uses, limit=1 << 30 if is_block else MAX_PIECES_PER_DIM))
    if on_chip:
        free = list(range(buffer.block_dims + 1, len(buffer.shape)))
        while math.prod(buffer.shape[dim] // sizes[dim] for dim in free if sizes[dim]) > MAX_PIECES_PER_TILE:
            sizes[max(free, key=lambda dim: buffer.shape[dim] // sizes[dim] if sizes[dim] else 0)] = 0
    count = tile_units = 1
    dim_pieces: list[tuple[int, int]] = [(0, 0)] * len(buffer.shape)
    for dim in range(len(buffer.shape) - 1, -1, -1):
        if on_chip and dim == partition_dim:
            tile_units = count
        if sizes[dim]:
            dim_pieces[dim] = (sizes[dim], count)
            count *= -(-buffer.shape[dim] // sizes[dim])
    loop_strides: list[tuple[int, int]] = []
    for loop in reversed(buffer.loops):
        loop_strides.append((loop, count))
        count *= trips.get(loop, 1)
    elements = math.prod(
        size if size else (1 if dim == partition_dim else buffer.shape[dim]) for dim, size in enumerate(sizes)
    )
    return Placement(
        base, count, tuple(loop_strides), tuple(dim_pieces), elements * item_bytes(buffer.dtype), tile_units, whole
    )


def _granularity(dim: int, extent: int, uses: list[Access], limit: int) -> int:
    """Largest piece size that every access's start, step and length are a multiple of; 0 for an undivided dimension."""
    size = extent
    for use in uses:
        index = use.index[dim]
        if index.indirect is not None:
            return 0
        low, length, _ = span(index, use.shape)
        size = math.gcd(size, index.start.constant + low)
        for _, coefficient in index.start.terms:
            size = math.gcd(size, coefficient)
        strides = [abs(stride) for axis, stride in index.strides if use.shape[axis] > 1]
        if strides and min(strides) > 1:
            length += min(strides) - 1  # a strided walk owns the gaps behind its elements
        size = math.gcd(size, length)
    if size <= 0 or extent // size > limit:
        return 0
    return size


def _loop_trips(program: Program) -> Iterable[tuple[int, int]]:
    stack = list(program.body)
    while stack:
        node = stack.pop()
        if isinstance(node, Loop):
            yield node.id, node.trips
            stack.extend(node.body)
