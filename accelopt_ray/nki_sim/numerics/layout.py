"""Where the elements of each buffer lie in memory, and strided tiles over them.

A buffer whose every access in one iteration of a loop stays within that iteration's own part needs room for one
iteration only: the dimension is contracted, and the part is initialised anew in each iteration. On chip the partition
dimension is laid out next to the last free dimension, so that contraction loops merge with it into one long axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.numerics.errors import NumericsError
from accelopt_ray.nki_sim.numerics.geometry import Interval, Nest, coefficient, tile_range, value_range, without
from accelopt_ray.nki_sim.program import Access, Affine, Buffer, DimIndex, Role, Space


@dataclass(frozen=True)
class Storage:
    """The memory of one buffer.

    Attributes:
        buffer: The buffer.
        elements: Number of elements allocated.
        strides: Elements per step of each dimension of the buffer.
        origin: Index of the first element kept, by dimension.
        contracted: Loops whose iterations share the memory, outermost first; indices drop their terms.
        expanded: Elements per iteration of the batched loops that the buffer was created in.
        scope: The loop in whose every iteration the buffer starts anew; None when it starts once.
        is_natural: Whether elements lie in row-major order of the buffer's own shape, nothing left out.
    """

    buffer: Buffer
    elements: int
    strides: tuple[int, ...]
    origin: tuple[int, ...]
    contracted: frozenset[int]
    expanded: tuple[tuple[int, int], ...]
    scope: int | None
    is_natural: bool


@dataclass(frozen=True)
class Tile:
    """An access as strided memory: ``offset`` + loops + batch and tile axes, all in elements.

    Attributes:
        buffer: Id of the buffer.
        dtype: Device type of the elements.
        shape: Extents: batch axes, then the axes of the access.
        strides: Elements per step along each axis.
        offset: First element when every loop index is 0.
        loops: Loop id and elements per iteration of the loops that are not batched.
        batch: How many leading axes are batch axes.
        scatter: Element offsets by tile coordinate that are not affine (tables), else None.
        indirect: Index tiles with the elements per unit of index, and the extent of their dimension.
    """

    buffer: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    loops: tuple[tuple[int, int], ...]
    batch: int
    scatter: NDArray[np.int64] | None = None
    indirect: tuple[tuple[Tile, int, int], ...] = ()

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def plan_storage(nest: Nest, batched: frozenset[int]) -> dict[int, Storage]:
    """Decides the memory of every buffer, given the loops that run batched."""
    return {identity: _storage(buffer, nest, batched) for identity, buffer in nest.program.buffers.items()}


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def _storage(buffer: Buffer, nest: Nest, batched: frozenset[int]) -> Storage:
    natural = Storage(
        buffer,
        prod(buffer.shape),
        _row_major(buffer.shape),
        (0,) * len(buffer.shape),
        frozenset(),
        (),
        None,
        True,
    )
    if buffer.role is not Role.TEMPORARY or not nest.touches[buffer.id]:
        return natural
    common = nest.common_loops(buffer.id)
    created = [loop for loop in buffer.loops if loop in common]
    # Iterations can share memory only from the outside in: inside a loop that the buffer outlives (the loop of a loop
    # reduction), and inside a batched loop, each iteration needs its own.
    outer = 0
    while outer < len(created) and created[outer] == common[outer] and created[outer] not in batched:
        outer += 1
    own_iterations, expansion = created[:outer], created[outer:]
    touches = nest.touches[buffer.id]
    if any(touch.access.view_shape != buffer.shape for touch in touches):
        elements = prod(buffer.shape)
        return Storage(
            buffer,
            elements * prod(nest.trips[loop] for loop in expansion),
            natural.strides,
            natural.origin,
            frozenset(),
            _expansion_strides(expansion, elements, nest),
            own_iterations[-1] if own_iterations else None,
            not expansion,
        )
    contracted: set[int] = set()
    for loop in common:
        if loop in created:
            continue
        # A value may live on into the next iteration of a loop that shares the buffer; nothing inside is private then.
        if loop in batched or not _is_private(buffer, loop, contracted, nest):
            break
        contracted.add(loop)
    bounds = [_kept_range(buffer, dim, contracted, nest) for dim in range(len(buffer.shape))]
    extents = tuple(bound.high - bound.low + 1 for bound in bounds)
    order = _physical_order(buffer)
    strides = [0] * len(extents)
    size = 1
    for dim in reversed(order):
        strides[dim] = size
        size *= extents[dim]
    scopes = [loop for loop in common if loop in contracted or loop in own_iterations]
    return Storage(
        buffer,
        size * prod(nest.trips[loop] for loop in expansion),
        tuple(strides),
        tuple(bound.low for bound in bounds),
        frozenset(contracted),
        _expansion_strides(expansion, size, nest),
        scopes[-1] if scopes else None,
        False,
    )


def _expansion_strides(loops: list[int], elements: int, nest: Nest) -> tuple[tuple[int, int], ...]:
    result = []
    for loop in reversed(loops):
        result.append((loop, elements))
        elements *= nest.trips[loop]
    return tuple(reversed(result))


def _physical_order(buffer: Buffer) -> tuple[int, ...]:
    """Returns the dimensions from slowest to fastest: on chip the partition comes just before the last one."""
    dims = list(range(len(buffer.shape)))
    if buffer.space is Space.HBM or len(dims) - buffer.block_dims < 3:
        return tuple(dims)
    partition = dims.pop(buffer.block_dims)
    dims.insert(len(dims) - 1, partition)
    return tuple(dims)


def _is_private(buffer: Buffer, loop: int, contracted: set[int], nest: Nest) -> bool:
    """Tells whether different iterations of ``loop`` use different parts of the buffer, by one of its dimensions."""
    accesses = [touch.access for touch in nest.touches[buffer.id]]
    for dim in range(len(buffer.shape)):
        steps = {coefficient(access.index[dim].start, loop) for access in accesses}
        if len(steps) != 1 or any(access.index[dim].indirect is not None for access in accesses):
            continue
        step = steps.pop()
        if step == 0:
            continue
        low, high = None, None
        for access in accesses:
            reach = _index_range(access, dim, contracted | {loop}, nest)
            low = reach.low if low is None else min(low, reach.low)
            high = reach.high if high is None else max(high, reach.high)
        if low is not None and high is not None and high - low < abs(step):
            return _terms_agree(buffer, loop, nest)
    return False


def _terms_agree(buffer: Buffer, loop: int, nest: Nest) -> bool:
    """Tells whether the loop's term can be dropped everywhere: each dimension has it with one factor."""
    for dim in range(len(buffer.shape)):
        if len({coefficient(touch.access.index[dim].start, loop) for touch in nest.touches[buffer.id]}) != 1:
            return False
    return True


def _index_range(access: Access, dim: int, dropped: set[int] | frozenset[int], nest: Nest) -> Interval:
    index = access.index[dim]
    return value_range(without(index.start, dropped), nest.trips) + tile_range(index, access.shape)


def _kept_range(buffer: Buffer, dim: int, contracted: set[int], nest: Nest) -> Interval:
    """Returns the part of a dimension that any access reaches."""
    low, high = buffer.shape[dim] - 1, 0
    for touch in nest.touches[buffer.id]:
        index = touch.access.index[dim]
        if index.indirect is not None:
            return Interval(0, buffer.shape[dim] - 1)
        reach = _index_range(touch.access, dim, contracted, nest)
        if not any(coefficient(index.start, loop) for loop in contracted):
            reach = Interval(max(0, reach.low), min(buffer.shape[dim] - 1, reach.high))
        low, high = min(low, reach.low), max(high, reach.high)
    return Interval(low, max(low, high))


def make_tile(
    access: Access,
    batch_loops: tuple[int, ...],
    storages: dict[int, Storage],
    nest: Nest,
) -> Tile:
    """Turns an access of a statement inside ``batch_loops`` (outermost first) into a strided tile."""
    storage = storages[access.buffer]
    if access.view_shape == storage.buffer.shape:
        dim_strides, origin = storage.strides, storage.origin
    elif prod(access.view_shape) == prod(storage.buffer.shape):
        dim_strides, origin = _row_major(access.view_shape), (0,) * len(access.view_shape)
    else:
        raise NumericsError(f"a view of '{storage.buffer.name}' has another number of elements")
    offset = 0
    loops: dict[int, int] = dict(storage.expanded)
    axes = [0] * len(access.shape)
    scatter: NDArray[np.int64] | None = None
    indirect: list[tuple[Tile, int, int]] = []
    for index, stride, first, extent in zip(access.index, dim_strides, origin, access.view_shape, strict=False):
        start: Affine = without(index.start, storage.contracted)
        offset += (start.constant - first) * stride
        for loop, factor in start.terms:
            loops[loop] = loops.get(loop, 0) + factor * stride
        for axis, step in index.strides:
            axes[axis] += step * stride
        for axis, table in index.tables:
            scatter = _add_table(scatter, access.shape, axis, table, stride)
        if index.indirect is not None:
            indirect.append((make_tile(index.indirect, batch_loops, storages, nest), stride, extent))
    return Tile(
        access.buffer,
        storage.buffer.dtype,
        (*(nest.trips[loop] for loop in batch_loops), *access.shape),
        (*(loops.get(loop, 0) for loop in batch_loops), *axes),
        offset,
        tuple((loop, step) for loop, step in sorted(loops.items()) if loop not in batch_loops and step),
        len(batch_loops),
        scatter,
        tuple(indirect),
    )


def _add_table(
    scatter: NDArray[np.int64] | None, shape: tuple[int, ...], axis: int, table: tuple[int, ...], stride: int
) -> NDArray[np.int64]:
    along = np.asarray(table, dtype=np.int64) * stride
    shaped = along.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    base: NDArray[np.int64] = np.zeros(shape, np.int64) if scatter is None else scatter
    return np.asarray(base + shaped, dtype=np.int64)


def check_bounds(access: Access, buffer: Buffer, line: int, nest: Nest) -> None:
    """Raises when an unmasked access leaves its buffer.

    Raises:
        NumericsError: In the device's wording.
    """
    index: DimIndex
    for dim, (index, extent) in enumerate(zip(access.index, access.view_shape, strict=False)):
        if index.indirect is not None:
            continue
        reach = _index_range(access, dim, frozenset(), nest)
        if reach.low < 0 or reach.high >= extent:
            raise NumericsError(
                f"Out-of-bound access for tensor `{buffer.name}` on dimension {dim}: index range "
                f"[{reach.low}, {reach.high}] exceed dimension size of {extent}",
                line,
            )
