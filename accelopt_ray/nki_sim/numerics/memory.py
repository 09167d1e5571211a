"""The memory of one run, and readers and writers of tiles in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.dtypes import is_integer, storage
from accelopt_ray.nki_sim.numerics.casts import cast, sentinel
from accelopt_ray.nki_sim.numerics.errors import NumericsError
from accelopt_ray.nki_sim.numerics.layout import Storage, Tile

Array = NDArray[Any]
#: Restriction of tile axes: (axis, low, high) each; None means the whole tile.
Clip = tuple[tuple[int, int, int], ...] | None
Reader = Callable[[Clip], Any]

_CACHED_VIEWS = 4096


class Memory:
    """Flat arrays by buffer, the current loop indices, and shared scratch space.

    Attributes:
        indices: Current index of each loop, by loop id.
        registers: Partial sums of the scalar engine, one per partition.
    """

    def __init__(self, storages: dict[int, Storage]):
        self.storages = storages
        self.indices: dict[int, int] = {}
        self.registers: Array = np.zeros(0, np.float32)
        self._flat: dict[int, Array] = {}
        self._scratch: dict[tuple[tuple[int, ...], int], Array] = {}

    def attach(self, buffer: int, array: Array) -> None:
        """Uses ``array`` (C-contiguous) as the memory of ``buffer``."""
        self._flat[buffer] = np.asarray(array).reshape(-1)

    def flat(self, buffer: int) -> Array:
        """Returns the buffer's elements, one-dimensional; allocates them on first use."""
        found = self._flat.get(buffer)
        if found is None:
            place = self.storages[buffer]
            found = np.empty(place.elements, dtype=storage(place.buffer.dtype))
            self._flat[buffer] = found
        return found

    def fill(self, buffer: int) -> None:
        """Gives the buffer its initial value: its fill, or the sentinel of uninitialised memory."""
        entry = self.storages[buffer].buffer
        value = sentinel(entry.dtype) if entry.fill is None else entry.fill
        flat = self.flat(buffer)
        flat[...] = cast(np.asarray([value], np.float32), entry.dtype)[0]

    def scratch(self, shape: tuple[int, ...], slot: int = 0) -> Array:
        """Returns float32 scratch space; the same for equal arguments, so its content lives for one instruction."""
        found = self._scratch.get((shape, slot))
        if found is None:
            found = np.empty(shape, np.float32)
            self._scratch[shape, slot] = found
        return found

    def strided(self, tile: Tile, shape: tuple[int, ...], strides: tuple[int, ...]) -> Callable[[int], Array]:
        """Returns a function from an offset in elements, added to the tile's, to a view of the tile's memory.

        Args:
            tile: Gives buffer, offset and loops.
            shape: Extents of the view.
            strides: Elements per step of the view.
        """
        flat = self.flat(tile.buffer)
        dtype = flat.dtype
        width = dtype.itemsize
        raw = flat.view(np.uint8)
        byte_strides = tuple(stride * width for stride in strides)
        indices = self.indices
        loops = tile.loops
        base = tile.offset
        cache: dict[int, Array] = {}
        name = self.storages[tile.buffer].buffer.name

        def view(extra: int) -> Array:
            offset = base + extra
            for loop, step in loops:
                offset += indices[loop] * step
            found = cache.get(offset)
            if found is None:
                try:
                    found = np.ndarray(shape, dtype, raw, offset * width, byte_strides)
                except (ValueError, TypeError) as error:
                    raise NumericsError(f"Out-of-bound access for tensor `{name}`") from error
                if len(cache) < _CACHED_VIEWS:
                    cache[offset] = found
            return found

        return view

    def reader(self, tile: Tile, clamp: bool = False) -> Reader:
        """Returns a function from a clip to the tile's elements, in their storage type.

        Args:
            tile: The tile.
            clamp: Read the nearest element where the tile leaves its buffer; the caller discards those.
        """
        if tile.scatter is not None or tile.indirect or clamp:
            positions = self._positions(tile)
            flat = self.flat(tile.buffer)

            def gather(clip: Clip) -> Array:
                where = positions()
                if clamp:
                    where = np.clip(where, 0, flat.size - 1)
                return flat[_sliced(where, clip)]

            return gather
        whole = self.strided(tile, tile.shape, tile.strides)
        clipped: dict[Clip, Callable[[int], Array]] = {}

        def read(clip: Clip) -> Array:
            if clip is None:
                return whole(0)
            found = clipped.get(clip)
            if found is None:
                found = self._clipped(tile, clip)
                clipped[clip] = found
            return found(0)

        return read

    def writer(self, tile: Tile) -> Callable[[Array, Clip, Array | None], None]:
        """Returns a function that writes values to the tile with the device's cast.

        The function takes the values (in the shape of the clipped tile), the clip, and where to write (or None for
        everywhere).
        """
        dtype = tile.dtype
        if tile.scatter is not None or tile.indirect:
            positions = self._positions(tile)
            flat = self.flat(tile.buffer)

            def scatter(values: Array, clip: Clip, where: Array | None) -> None:
                target = _sliced(positions(), clip)
                converted = np.broadcast_to(cast(values, dtype), target.shape)
                if where is None:
                    flat[target] = converted
                else:
                    chosen = np.broadcast_to(where, target.shape)
                    flat[target[chosen]] = converted[chosen]

            return scatter
        read = self.reader(tile)

        def write(values: Array, clip: Clip, where: Array | None) -> None:
            if where is None:
                np.copyto(read(clip), cast(values, dtype))
            else:
                np.copyto(read(clip), cast(values, dtype), where=where)

        return write

    def adder(self, tile: Tile) -> Callable[[Array], None]:
        """Returns a function that adds values at gathered positions; a position that occurs twice gets both."""
        positions = self._positions(tile)
        flat = self.flat(tile.buffer)
        dtype = tile.dtype

        def add(values: Array) -> None:
            where = positions()
            np.add.at(flat, where, np.broadcast_to(cast(values, dtype), where.shape))

        return add

    def _clipped(self, tile: Tile, clip: Sequence[tuple[int, int, int]]) -> Callable[[int], Array]:
        shape = list(tile.shape)
        extra = 0
        for axis, low, high in clip:
            shape[axis] = high - low
            extra += low * tile.strides[axis]
        view = self.strided(tile, tuple(shape), tile.strides)
        return lambda offset: view(offset + extra)

    def _positions(self, tile: Tile) -> Callable[[], NDArray[np.int64]]:
        grid = np.zeros(tile.shape, np.int64)
        for axis, (extent, stride) in enumerate(zip(tile.shape, tile.strides, strict=False)):
            along = np.arange(extent, dtype=np.int64) * stride
            grid += along.reshape([-1 if a == axis else 1 for a in range(len(tile.shape))])
        if tile.scatter is not None:
            grid = grid + tile.scatter
        grid += tile.offset
        readers = [(self.reader(inner), stride, extent, len(inner.shape)) for inner, stride, extent in tile.indirect]
        rank = len(tile.shape)
        name = self.storages[tile.buffer].buffer.name

        def compute() -> NDArray[np.int64]:
            result = grid
            start = sum(self.indices[loop] * step for loop, step in tile.loops)
            if start:
                result = result + start
            for read, stride, extent, inner_rank in readers:
                values = np.asarray(read(None)).astype(np.int64)
                if values.size and (values.min() < 0 or values.max() >= extent):
                    raise NumericsError(
                        f"Out-of-bound access for tensor `{name}`: index range "
                        f"[{values.min()}, {values.max()}] exceed dimension size of {extent}"
                    )
                result = result + stride * values.reshape(values.shape + (1,) * (rank - inner_rank))
            return result

        return compute


def _sliced(array: NDArray[np.int64], clip: Clip) -> NDArray[np.int64]:
    if clip is None:
        return array
    slices = [slice(None)] * array.ndim
    for axis, low, high in clip:
        slices[axis] = slice(low, high)
    return array[tuple(slices)]


def reads_as_float32(read: Reader, dtype: str) -> Reader:
    """Wraps a reader so that it yields float32, as every engine computes."""
    if dtype == "float32":
        return read
    if is_integer(dtype) or storage(dtype) != np.dtype(np.float32):
        return lambda clip: read(clip).astype(np.float32)
    return read
