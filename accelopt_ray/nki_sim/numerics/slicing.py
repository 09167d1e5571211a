"""Running only what given parts of the results depend on.

Every buffer is divided into cells by the borders of the tiles that any instruction touches. Going backwards through the
program, the iterations whose output meets a demanded cell are needed, and the cells they read are demanded in turn,
until nothing changes. The analysis ignores that a later write may replace an earlier one, so it may run too much, never
too little.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.dtypes import storage
from accelopt_ray.nki_sim.numerics.dependence import choose_batched_loops
from accelopt_ray.nki_sim.numerics.errors import NumericsError
from accelopt_ray.nki_sim.numerics.execute import Executable
from accelopt_ray.nki_sim.numerics.forwarding import forward_loads
from accelopt_ray.nki_sim.numerics.geometry import Interval, Nest, Statement, tile_range, touches
from accelopt_ray.nki_sim.program import Access, Buffer, Loop, Node, Program

Array = NDArray[Any]

#: More cells than this per buffer are not told apart along its finest dimensions.
_MAX_CELLS = 1 << 21


@dataclass(frozen=True)
class Region:
    """A box of one result.

    Attributes:
        output: Which result, by position.
        bounds: (first, past the last) index by dimension.
    """

    output: int
    bounds: tuple[tuple[int, int], ...]


class _Cells:
    """The cells of one buffer and which of them are demanded.

    Args:
        buffer: The buffer.
        nest: The program's loops and statements.
        batched: Loops that always run as a whole.
    """

    def __init__(self, buffer: Buffer, nest: Nest, batched: frozenset[int]):
        entries = nest.touches[buffer.id]
        shapes = {touch.access.view_shape for touch in entries}
        self.shape = shapes.pop() if len(shapes) == 1 else None
        common = nest.common_loops(buffer.id)
        self.loops = tuple(loop for loop in buffer.loops if loop in common and loop not in batched)
        borders: list[NDArray[np.int64]] = []
        if self.shape is not None:
            for dim, extent in enumerate(self.shape):
                cuts = {0}
                for touch in entries:
                    starts, reach = _positions(touch.access, dim, touch.statement, nest, batched)
                    cuts.update((np.unique(starts) + reach.low).tolist())
                    cuts.update((np.unique(starts) + reach.high + 1).tolist())
                borders.append(np.asarray(sorted(cut for cut in cuts if 0 <= cut < extent), dtype=np.int64))
        sizes = [nest.trips[loop] for loop in self.loops] + [len(cuts) for cuts in borders]
        while borders and int(np.prod(sizes, dtype=np.float64)) > _MAX_CELLS:
            finest = int(np.argmax([len(cuts) for cuts in borders]))
            borders[finest] = borders[finest][::2]
            sizes[len(self.loops) + finest] = len(borders[finest])
        self.borders = borders
        self.demanded = np.zeros(sizes, bool)

    def boxes(
        self, access: Access, statement: Statement, nest: Nest, batched: frozenset[int], chosen: Array | None
    ) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        """Returns first and last cell per dimension that the access touches, one entry per chosen iteration."""
        free = [loop for loop in statement.loops if loop not in batched]
        grid = tuple(nest.trips[loop] for loop in free)
        lows, highs = [], []
        for loop in self.loops:
            axis = free.index(loop)
            along = np.arange(grid[axis]).reshape([-1 if a == axis else 1 for a in range(len(grid))])
            lows.append(_pick(along, grid, chosen))
            highs.append(lows[-1])
        for dim, cuts in enumerate(self.borders):
            starts, reach = _positions(access, dim, statement, nest, batched)
            low = np.searchsorted(cuts, starts + reach.low, side="right") - 1
            high = np.searchsorted(cuts, starts + reach.high, side="right") - 1
            lows.append(_pick(np.clip(low, 0, len(cuts) - 1), grid, chosen))
            highs.append(_pick(np.clip(high, 0, len(cuts) - 1), grid, chosen))
        return lows, highs

    def meets(self, lows: list[NDArray[np.int64]], highs: list[NDArray[np.int64]], count: int) -> NDArray[np.bool_]:
        """Tells for each box whether it holds a demanded cell."""
        if self.demanded.all():
            return np.ones(count, bool)
        wide = _wide_dims(lows, highs)
        if not wide:
            return np.broadcast_to(self.demanded[tuple(lows)], count)
        sums = self.demanded.astype(np.int32)
        for axis in wide:
            sums = np.cumsum(sums, axis=axis, dtype=np.int32)
        sums = np.pad(sums, [(int(axis in wide), 0) for axis in range(sums.ndim)])
        total = np.zeros(count, np.int64)
        for corner in product((0, 1), repeat=len(wide)):
            where = list(lows)
            for axis, pick in zip(wide, corner, strict=True):
                where[axis] = highs[axis] + 1 if pick else lows[axis]
            total += (-1) ** (len(wide) - sum(corner)) * sums[tuple(where)]
        return total > 0

    def demand(self, lows: list[NDArray[np.int64]], highs: list[NDArray[np.int64]]) -> bool:
        """Demands the cells of the boxes; tells whether any was new."""
        if self.demanded.all():
            return False
        before = int(self.demanded.sum())
        wide = _wide_dims(lows, highs)
        if not wide:
            self.demanded[tuple(lows)] = True
        else:
            shape = tuple(size + int(axis in wide) for axis, size in enumerate(self.demanded.shape))
            marks = np.zeros(shape, np.int32)
            for corner in product((0, 1), repeat=len(wide)):
                where = list(lows)
                for axis, pick in zip(wide, corner, strict=True):
                    where[axis] = highs[axis] + 1 if pick else lows[axis]
                np.add.at(marks, tuple(where), (-1) ** sum(corner))
            for axis in wide:
                marks = np.cumsum(marks, axis=axis, dtype=np.int32)
            self.demanded |= marks[tuple(slice(0, size) for size in self.demanded.shape)] > 0
        return int(self.demanded.sum()) > before

    def demand_region(self, region: Region) -> None:
        """Demands the cells of a box given in the buffer's coordinates."""
        selection: list[slice] = [slice(None)] * len(self.loops)
        for cuts, (low, high) in zip(self.borders, region.bounds, strict=False):
            first = int(np.searchsorted(cuts, low, side="right")) - 1
            last = int(np.searchsorted(cuts, high - 1, side="right")) - 1
            selection.append(slice(first, last + 1))
        self.demanded[tuple(selection)] = True


def _wide_dims(lows: list[NDArray[np.int64]], highs: list[NDArray[np.int64]]) -> list[int]:
    """Returns the dimensions along which some box has more than one cell."""
    return [dim for dim, (low, high) in enumerate(zip(lows, highs, strict=True)) if (low != high).any()]


def _pick(values: Array, grid: tuple[int, ...], chosen: Array | None) -> NDArray[np.int64]:
    whole = np.broadcast_to(values, grid)
    return np.asarray(whole.reshape(-1) if chosen is None else whole[chosen], dtype=np.int64)


def _positions(
    access: Access, dim: int, statement: Statement, nest: Nest, batched: frozenset[int]
) -> tuple[NDArray[np.int64], Interval]:
    """Returns the start of an access along one dimension by iteration, and the reach of what runs as a whole."""
    index = access.index[dim]
    free = [loop for loop in statement.loops if loop not in batched]
    starts = np.full((1,) * len(free), index.start.constant, dtype=np.int64)
    reach = tile_range(index, access.shape)
    for loop, factor in index.start.terms:
        if loop in batched:
            reach = reach + Interval.multiples(factor, nest.trips[loop])
        else:
            axis = free.index(loop)
            along = np.arange(nest.trips[loop], dtype=np.int64) * factor
            starts = starts + along.reshape([-1 if a == axis else 1 for a in range(len(free))])
    if index.indirect is not None:
        extent = access.view_shape[dim]
        return np.zeros((1,) * len(free), np.int64), Interval(0, extent - 1)
    return starts, reach


class Demand:
    """Which iterations of each statement the given regions depend on.

    Attributes:
        needed: By instruction id, one flag per iteration of the loops around it that are not batched.
    """

    def __init__(self, nest: Nest, batched: frozenset[int], regions: Sequence[Region]):
        self._nest = nest
        self._batched = batched
        self._cells: dict[int, _Cells] = {}
        self._last_write = {
            buffer: max((entry.statement.position for entry in entries if entry.is_write), default=-1)
            for buffer, entries in nest.touches.items()
        }
        program = nest.program
        self.needed: dict[int, NDArray[np.bool_]] = {}
        for statement in nest.statements:
            grid = tuple(nest.trips[loop] for loop in statement.loops if loop not in batched)
            self.needed[statement.instruction.id] = np.zeros(grid, bool)
        for region in regions:
            buffer = program.buffers[program.outputs[region.output]]
            cells = self._of(buffer.id)
            if nest.has_registers:  # what passes through registers leaves no trace in buffers
                for flags in self.needed.values():
                    flags[...] = True
            if cells.shape == buffer.shape:
                cells.demand_region(region)
            else:
                cells.demanded[...] = True
        while self._sweep():
            pass

    def _of(self, buffer: int) -> _Cells:
        found = self._cells.get(buffer)
        if found is None:
            found = _Cells(self._nest.program.buffers[buffer], self._nest, self._batched)
            self._cells[buffer] = found
        return found

    def _sweep(self) -> bool:
        """Goes backwards through the program once; tells whether an earlier statement may need another look."""
        changed = False
        for statement in reversed(self._nest.statements):
            needed = self.needed[statement.instruction.id]
            before = int(needed.sum())
            if before == needed.size and before:
                continue
            for access in statement.instruction.outputs:
                cells = self._of(access.buffer)
                if not cells.demanded.any():
                    continue
                boxes = cells.boxes(access, statement, self._nest, self._batched, None)
                needed |= cells.meets(*boxes, needed.size).reshape(needed.shape)
            if int(needed.sum()) == before:
                continue
            for touch in touches(statement):
                if touch.is_write or self._last_write[touch.access.buffer] < 0:
                    continue
                cells = self._of(touch.access.buffer)
                is_new = cells.demand(*cells.boxes(touch.access, statement, self._nest, self._batched, needed))
                changed |= is_new and self._last_write[touch.access.buffer] >= statement.position
        return changed

    def statement_test(self, instruction: int, indices: dict[int, int]) -> Callable[[], bool] | None:
        """Returns a test of whether the current iteration needs the instruction; None when all do."""
        statement = self._nest.by_instruction[instruction]
        loops = [loop for loop in statement.loops if loop not in self._batched]
        return _test(self.needed[instruction], loops, indices)

    def loop_test(self, loop: Loop, indices: dict[int, int]) -> Callable[[], bool] | None:
        """As :meth:`statement_test` for the body of a loop."""
        total: NDArray[np.bool_] | None = None
        loops: list[int] = []
        for instruction in _instructions(loop):
            statement = self._nest.by_instruction[instruction]
            free = [name for name in statement.loops if name not in self._batched]
            depth = free.index(loop.id) + 1
            loops = free[:depth]
            flags = self.needed[instruction]
            flags = np.asarray(flags.any(axis=tuple(range(depth, flags.ndim))))
            total = flags if total is None else total | flags
        return None if total is None else _test(total, loops, indices)


def _instructions(node: Node) -> list[int]:
    if isinstance(node, Loop):
        return [instruction for child in node.body for instruction in _instructions(child)]
    return [node.id]


def _test(flags: NDArray[np.bool_], loops: list[int], indices: dict[int, int]) -> Callable[[], bool] | None:
    if flags.all():
        return None
    if not flags.any():
        return lambda: False
    return lambda: bool(flags[tuple(indices[loop] for loop in loops)])


def _sparse_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns an array whose memory is claimed in small pages, where it is written: a slice writes little of it."""
    memory = mmap.mmap(-1, max(1, prod(shape) * dtype.itemsize))
    small_pages = getattr(mmap, "MADV_NOHUGEPAGE", None)
    if small_pages is not None:
        with suppress(OSError):  # kernels without huge pages do not know the advice
            memory.madvise(small_pages)
    return np.frombuffer(memory, dtype=dtype, count=prod(shape)).reshape(shape)


def run_slice(program: Program, inputs: Sequence[Array | float | int], regions: Sequence[Region]) -> list[Array]:
    """Executes only what the given regions of the results depend on.

    Args:
        program: The program.
        inputs: The kernel's arguments, as for :func:`run_program`.
        regions: Boxes of the results.

    Returns:
        The values of each region.

    Raises:
        NumericsError: A region lies outside its result, a fault of the kernel at run time, or something unsupported.
    """
    for region in regions:
        shape = program.buffers[program.outputs[region.output]].shape if region.output < len(program.outputs) else ()
        if len(region.bounds) != len(shape) or any(
            not 0 <= low < high <= extent for (low, high), extent in zip(region.bounds, shape, strict=False)
        ):
            raise NumericsError(f"region {region} does not lie within result {region.output}")
    program = forward_loads(program)
    nest = Nest(program)
    batching = choose_batched_loops(nest, only_contractions=True)
    demand = Demand(nest, batching.loops, regions)
    buffers = [program.buffers[identity] for identity in program.outputs]
    outputs = [_sparse_array(buffer.shape, storage(buffer.dtype)) for buffer in buffers]
    executable = Executable(program, inputs, outputs, nest, batching)
    executable.run(demand)
    return [
        executable.results[region.output][tuple(slice(low, high) for low, high in region.bounds)].copy()
        for region in regions
    ]
