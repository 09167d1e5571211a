"""Steps of products, transposes, reductions and scans."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.numerics.casts import TFLOAT32, round_to_tfloat32
from accelopt_ray.nki_sim.numerics.layout import Tile
from accelopt_ray.nki_sim.numerics.masks import EVERYTHING, Mask
from accelopt_ray.nki_sim.numerics.matmul import Arrangement, arrange, suits_blas
from accelopt_ray.nki_sim.numerics.memory import Clip, Reader
from accelopt_ray.nki_sim.numerics.operations import BITVECTOR, operation, reduce_into, reduction
from accelopt_ray.nki_sim.numerics.scan import scan as run_scan
from accelopt_ray.nki_sim.numerics.site import Site, Step, clipped_shape
from accelopt_ray.nki_sim.program import Access, Opcode, Role

Array = NDArray[Any]

#: Transposes of rows further apart than this many bytes go strip by strip, or every element misses the cache.
_WIDE_ROW_BYTES = 1024
_STRIP = 16


def matmul(site: Site) -> Step:
    """``out = stationary.T @ moving`` in float32, added to ``out`` where the instruction accumulates."""
    if site.attribute("is_transpose") and _is_identity(site, site.access("moving")):
        return _transpose(site, site.access("stationary"))
    stationary, moving = site.tile(site.access("stationary")), site.tile(site.access("moving"))
    sweep = _sweep_loops(site)
    contraction = site.attribute("contraction_mask")
    if site.mask is None and not contraction:
        return _product(site, stationary, moving, site.out, sweep)
    mask, batch = site.mask, site.batch
    depth = Mask(tuple(contraction or ()), (stationary.shape[batch], 1), 0, site.memory)
    rows_end = batch + 1
    steps: dict[tuple[Clip, tuple[tuple[int, int, int], ...]], Step] = {}

    def step() -> None:
        extent = EVERYTHING if mask is None else mask.extent()
        if extent.empty:
            return
        if extent.where is not None:
            raise site.unsupported("a mask over two axes at once is not supported on a matrix product")
        used = depth.extent()
        deep = tuple((axis + batch, low, high) for axis, low, high in used.clip or ())
        if used.empty:
            deep = ((batch, 0, 0),)
        found = steps.get((extent.clip, deep))
        if found is None:
            clip = extent.clip or ()
            row_clip = tuple((axis + 1, low, high) for axis, low, high in clip if axis < rows_end)
            column_clip = tuple((axis, low, high) for axis, low, high in clip if axis >= rows_end)
            found = _product(
                site,
                _clip_tile(stationary, (*deep, *row_clip)),
                _clip_tile(moving, (*deep, *column_clip)),
                _clip_tile(site.out, clip),
                sweep,
            )
            steps[extent.clip, deep] = found
        found()

    return step


def _clip_tile(tile: Tile, clip: tuple[tuple[int, int, int], ...]) -> Tile:
    if not clip:
        return tile
    shape = list(tile.shape)
    offset = tile.offset
    for axis, low, high in clip:
        shape[axis] = high - low
        offset += low * tile.strides[axis]
    return Tile(tile.buffer, tile.dtype, tuple(shape), tile.strides, offset, tile.loops, tile.batch)


def _sweep_loops(site: Site) -> tuple[int, ...] | None:
    """Returns the loops whose first iteration overwrites the output, or None when every iteration adds."""
    instruction = site.instruction
    if not instruction.accumulate:
        return ()
    buffer = instruction.outputs[0].buffer
    if instruction.id not in site.plan.initialisations[buffer].overwrites:
        return None
    scope = site.plan.storages[buffer].scope
    loops = site.statement.loops
    inside = loops if scope is None else loops[loops.index(scope) + 1 :]
    moved = {loop for loop, _ in site.out.loops}
    return tuple(loop for loop in inside if loop not in moved and loop not in site.batch_loops)


def _product(site: Site, stationary: Tile, moving: Tile, out: Tile, sweep: tuple[int, ...] | None) -> Step:
    plan = arrange(stationary, moving, out, site.line)
    left = _matrices(site, stationary, plan.stationary_shape, plan.stationary_strides)
    right = _matrices(site, moving, plan.moving_shape, plan.moving_strides)
    steps = plan.steps
    indices = site.memory.indices
    multiply = site.plan.products.matmul
    is_plain = out.dtype == "float32" and suits_blas(plan.out_shape, plan.out_strides)
    target = site.memory.strided(out, plan.out_shape, plan.out_strides)
    scratch = site.memory.scratch(plan.out_shape) if not is_plain or sweep is None or sweep or len(steps) > 1 else None
    write = None if out.dtype == "float32" else _cast_writer(site, out, plan)

    def step() -> None:
        replaces = sweep is not None and not any(indices[loop] for loop in sweep)
        result = target(0)
        if write is not None:
            assert scratch is not None
            total = None if replaces else result.astype(np.float32)
            for left_offset, right_offset in steps:
                multiply(left(left_offset), right(right_offset), scratch)
                total = scratch.copy() if total is None else total + scratch
            assert total is not None
            write(total)
            return
        for left_offset, right_offset in steps:
            if replaces and is_plain:
                multiply(left(left_offset), right(right_offset), result)
            else:
                assert scratch is not None
                multiply(left(left_offset), right(right_offset), scratch)
                if replaces:
                    np.copyto(result, scratch)
                else:
                    np.add(result, scratch, out=result)
            replaces = False

    return step


def _cast_writer(site: Site, out: Tile, plan: Arrangement) -> Callable[[Array], None]:
    arranged = Tile(out.buffer, out.dtype, plan.out_shape, plan.out_strides, out.offset, out.loops, 0)
    write = site.memory.writer(arranged)
    return lambda values: write(values, None, None)


def _matrices(site: Site, tile: Tile, shape: tuple[int, ...], strides: tuple[int, ...]) -> Callable[[int], Array]:
    """Returns a function from an offset to the operand as float32 matrices that BLAS takes."""
    if tile.scatter is not None or tile.indirect:
        raise site.unsupported("a matrix product of gathered elements is not supported")
    view = site.memory.strided(tile, shape, strides)
    if tile.dtype == TFLOAT32:
        return lambda offset: round_to_tfloat32(view(offset))
    if tile.dtype != "float32":
        return lambda offset: view(offset).astype(np.float32)
    if suits_blas(shape, strides):
        return view
    return lambda offset: np.ascontiguousarray(view(offset))


def _is_identity(site: Site, access: Access) -> bool:
    """Tells whether the tile provably holds an identity matrix: a constant, or an unchanged copy of one."""
    nest = site.plan.nest
    buffer = nest.program.buffers[access.buffer]
    if buffer.role is Role.CONSTANT:
        return _constant_is_identity(site, access)
    writes = [touch for touch in nest.touches[access.buffer] if touch.is_write]
    if len(writes) != 1 or any(index.start.terms for index in access.index):
        return False
    instruction = writes[0].statement.instruction
    written = writes[0].access
    moves = (Opcode.LOAD, Opcode.COPY, Opcode.DMA_COPY)
    source = instruction.operands.get("src")
    if instruction.opcode not in moves or instruction.mask or instruction.accumulate or not isinstance(source, Access):
        return False
    if written.shape != access.shape or written.index != access.index or written.view_shape != access.view_shape:
        return False
    return _is_identity(site, source)


def _constant_is_identity(site: Site, access: Access) -> bool:
    if any(index.start.terms or index.tables or index.indirect for index in access.index):
        return False
    values = site.memory.reader(site.tile(access))(None)
    values = values.reshape(access.shape) if values.size == np.prod(access.shape) else values[(0,) * site.batch]
    return values.ndim == 2 and np.array_equal(values, np.eye(*values.shape, dtype=values.dtype))


def transpose(site: Site) -> Step:
    """(P, F) to (F, P)."""
    return _transpose(site, site.access("data", "src"))


def _transpose(site: Site, access: Access) -> Step:
    """Copies a transposed tile. Unlike a product with the identity, a NaN or infinity stays in its own element."""
    tile, out, batch = site.tile(access), site.out, site.batch
    if len(tile.shape) - batch != 2:
        tile = _as_matrix(site, tile)
    if len(out.shape) - batch != 2:
        out = _as_matrix(site, out)
    order = (*range(batch), batch + 1, batch)
    read = site.raw(tile)
    same = tile.dtype == out.dtype and not site.instruction.accumulate
    rows = tile.shape[batch]
    width = site.memory.flat(tile.buffer).dtype.itemsize
    by_strips = tile.strides[batch] * width >= _WIDE_ROW_BYTES and rows > _STRIP
    if site.mask is None and same and out.scatter is None:
        target = site.memory.reader(out)
        strips = [slice(low, low + _STRIP) for low in range(0, rows, _STRIP)] if by_strips else [slice(None)]

        def step() -> None:
            result, flipped = target(None), read(None).transpose(order)
            for strip in strips:
                np.copyto(result[..., strip], flipped[..., strip])

        return step
    commit, mask, shape = site.commit(), site.mask, site.out.shape
    swapped = {batch: batch + 1, batch + 1: batch}

    def general() -> None:
        clip: Clip = None
        where = None
        if mask is not None:
            extent = mask.extent()
            if extent.empty:
                return
            clip, where = extent.clip, extent.where
        inner = tuple((swapped.get(axis, axis), low, high) for axis, low, high in clip or ()) or None
        commit(read(inner).transpose(order).reshape(clipped_shape(shape, clip)), clip, where)

    return general


def _as_matrix(site: Site, tile: Tile) -> Tile:
    """Joins the free axes of a tile into one.

    Raises:
        NumericsError: They do not follow each other in memory.
    """
    batch = tile.batch
    free = zip(tile.shape[batch + 1 :], tile.strides[batch + 1 :], strict=True)
    axes = [(extent, stride) for extent, stride in free if extent != 1] or [(1, 1)]
    for (_, outer), (extent, inner) in pairwise(axes):
        if outer != extent * inner:
            raise site.unsupported("a transpose of scattered free axes is not supported")
    extent = 1
    for size, _ in axes:
        extent *= size
    return Tile(
        tile.buffer,
        tile.dtype,
        (*tile.shape[: batch + 1], extent),
        (*tile.strides[: batch + 1], axes[-1][1]),
        tile.offset,
        tile.loops,
        batch,
    )


def tensor_reduce(site: Site) -> Step:
    """Reduces tile axes of ``data``."""
    axes = tuple(int(axis) + site.batch for axis in site.attribute("axes", ()))
    return _reduce(site, axes, bool(site.attribute("negate", False)))


def partition_reduce(site: Site) -> Step:
    """Reduces over the partitions."""
    return _reduce(site, (site.batch,), False)


def _reduce(site: Site, axes: tuple[int, ...], negate: bool) -> Step:
    ufunc = reduction(site.attribute("op", "add"), site.line)
    tile = site.tile(site.access("data"))
    is_bitwise = site.attribute("op") in BITVECTOR
    read = site.raw(tile) if is_bitwise else site.values(tile)
    kept = [axis for axis in range(len(tile.shape)) if axis not in axes]
    out_shape = site.out.shape
    if len(out_shape) == len(tile.shape):
        sources = {axis: axis for axis in range(len(out_shape)) if axis not in axes}
    else:
        sources = dict(enumerate(kept))
    commit, mask, scratch = site.commit(), site.mask, site.memory.scratch
    terms = site.attribute("input_mask")
    chosen = Mask(tuple(terms), tile.shape, site.batch, site.memory) if terms else None
    if chosen is not None and chosen.needs_choice:
        raise site.unsupported("a mask over two axes at once is not supported on a reduction")

    def step() -> None:
        clip: Clip = None
        inner: Clip = None
        where = None
        if mask is not None:
            extent = mask.extent()
            if extent.empty:
                return
            clip, where = extent.clip, extent.where
            inner = tuple((sources[a], low, high) for a, low, high in clip or () if a in sources) or None
        if chosen is not None:
            taken = chosen.extent()
            if taken.empty:
                return
            inner = (*(inner or ()), *(taken.clip or ())) or None
        values = read(inner)
        if is_bitwise:
            commit(ufunc.reduce(values, axis=axes).reshape(clipped_shape(out_shape, clip)), clip, where)
            return
        results = scratch(tuple(values.shape[axis] for axis in kept))
        reduce_into(ufunc, values, axes, results)
        if negate:
            np.negative(results, out=results)
        commit(results.reshape(clipped_shape(out_shape, clip)), clip, where)

    return step


def loop_reduce(site: Site) -> Step:
    """``out = op(out, data)`` over loops; the first iteration of all of them starts from ``data``."""
    apply = operation(site.attribute("op", "add"), site.line)
    ufunc = reduction(site.attribute("op", "add"), site.line)
    loops = tuple(int(loop) for loop in site.attribute("loops", ()))
    folded = tuple(n for n in range(site.batch) if site.out.strides[n] == 0 and site.out.shape[n] > 1)
    sequential = [loop for loop in loops if loop not in site.batch_loops and loop in site.statement.loops]
    out = _without_axes(site.out, folded)
    target = site.memory.reader(out)
    write = site.memory.writer(out)
    read = site.aligned(site.access("data", "src", "x"))
    indices, mask = site.memory.indices, site.mask
    is_float32 = out.dtype == "float32"

    def step() -> None:
        clip: Clip = None
        where = None
        if mask is not None:
            extent = mask.extent()
            if extent.empty:
                return
            clip, where = extent.clip, extent.where
        values = read(clip)
        if folded:
            values = ufunc.reduce(values, axis=folded)
            clip = tuple((axis - sum(f < axis for f in folded), low, high) for axis, low, high in clip or ()) or None
        if any(indices[loop] for loop in sequential):
            old = target(clip)
            if is_float32 and where is None:
                apply(old, values, old)
                return
            fresh = np.empty(old.shape, np.float32)
            apply(old.astype(np.float32), values, fresh)
            values = fresh
        write(values, clip, where)

    return step


def _without_axes(tile: Tile, axes: tuple[int, ...]) -> Tile:
    kept = [axis for axis in range(len(tile.shape)) if axis not in axes]
    return Tile(
        tile.buffer,
        tile.dtype,
        tuple(tile.shape[axis] for axis in kept),
        tuple(tile.strides[axis] for axis in kept),
        tile.offset,
        tile.loops,
        tile.batch - len(axes),
    )


def scan(site: Site) -> Step:
    """``out[t] = (out[t - 1] op0 data0[t]) op1 data1[t]`` along the last axis."""
    first, second = operation(site.attribute("op0"), site.line), operation(site.attribute("op1"), site.line)
    reverse0, reverse1 = bool(site.attribute("reverse0", False)), bool(site.attribute("reverse1", False))
    data0, data1 = site.aligned(site.access("data0")), site.aligned(site.access("data1"))
    initial = site.operand("initial")
    start: Reader = site.aligned(0.0 if initial is None else initial)
    shared = [
        o
        for o in site.instruction.operands.values()
        if isinstance(o, Access) and o.buffer == site.out.buffer and o != site.instruction.outputs[0]
    ]

    def compute(out: Array, factors: Array, terms: Array, before: Any) -> None:
        shape = out.shape
        value = np.asarray(before)
        value = value[..., 0] if value.ndim == len(shape) else value
        run_scan(
            np.broadcast_to(factors, shape),
            np.broadcast_to(terms, shape),
            value,
            first,
            reverse0,
            second,
            reverse1,
            out,
        )

    return site.elementwise(compute, [data0, data1, start], list(shared))
