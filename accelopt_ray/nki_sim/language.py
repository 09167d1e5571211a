"""``neuronxcc.nki.language``: indices, tensors, loads and stores, products, the launch grid.

Signatures follow the generation-A documentation, positional order included; what a call does is in
:mod:`accelopt_ray.nki_sim.lowering`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from accelopt_ray.nki_sim import assignment, dtypes, errors, lowering, operators, products
from accelopt_ray.nki_sim import symbolic as sym
from accelopt_ray.nki_sim.builder import current
from accelopt_ray.nki_sim.program import Engine, Opcode, Role, Space
from accelopt_ray.nki_sim.spaces import PSUM_BYTES, SBUF_USABLE_BYTES, ParDim
from accelopt_ray.nki_sim.symbolic import DynamicSlice, Index, as_int
from accelopt_ray.nki_sim.tile import Tensor, require_tile, whole

# Indices.


def arange(*args: Any) -> Index:
    """Positions along one axis: ``arange(stop)`` or ``arange(start, stop[, step])``."""
    if not 1 <= len(args) <= 3:
        raise TypeError(f"arange() takes from 1 to 3 positional arguments but {len(args)} were given")
    values = range(*(as_int(value) for value in args))
    return sym.arange(len(values), values.start if values else 0, values.step)


class _Grid(tuple[Index, ...]):
    """What ``nl.mgrid[...]`` gives: one index per axis, by position or as ``.p``, ``.x``, ``.y``, ``.z``."""

    def __getattr__(self, name: str) -> Index:
        position = {"p": 0, "x": 1, "y": 2, "z": 3, "w": 4, "f": 1}.get(name)
        if position is None or position >= len(self):
            raise AttributeError(f"mgrid has no axis {name!r}")
        return self[position]


class _MeshGrid:
    """``nl.mgrid``."""

    def __getitem__(self, key: Any) -> Any:
        slices = key if isinstance(key, tuple) else (key,)
        grid = []
        for axis, item in enumerate(slices):
            if not isinstance(item, slice):
                raise TypeError("nl.mgrid takes slices")
            start = 0 if item.start is None else item.start
            step = 1 if item.step is None else as_int(item.step)
            length = as_int(item.stop - start)
            index = sym.arange(-(-length // step), 0, step)
            shape = tuple(index.shape[0] if position == axis else 1 for position in range(len(slices)))
            strides = tuple(step if position == axis else 0 for position in range(len(slices)))
            grid.append(Index(0, {}, shape, strides) + start)
        return _Grid(grid)


mgrid = _MeshGrid()


def ds(start: Any, size: Any) -> DynamicSlice:
    """``size`` positions from ``start``, which may be a loop index."""
    return DynamicSlice(start, as_int(size))


# Creation of tensors.


def _resolve_space(buffer: Any) -> tuple[Space, str]:
    name = "sbuf" if buffer is None else str(buffer)
    space = {
        "sbuf": Space.SBUF,
        "psum": Space.PSUM,
        "hbm": Space.HBM,
        "private_hbm": Space.HBM,
        "shared_hbm": Space.HBM,
    }.get(name)
    if space is None:
        raise errors.compile_error(f"unknown buffer '{name}'; expected one of sbuf, psum, hbm, private_hbm, shared_hbm")
    return space, name


def resolve_shape(shape: Any) -> tuple[tuple[int, ...], int | None]:
    given = shape if isinstance(shape, (tuple, list)) else (shape,)
    sizes = []
    partition: int | None = None
    for position, size in enumerate(given):
        if isinstance(size, ParDim):
            if partition is not None:
                raise errors.compile_error("a shape can have only one partition dimension")
            partition = position
        sizes.append(as_int(size))
    if any(size <= 0 for size in sizes):
        raise errors.compile_error(
            f"invalid shape {errors.shape_text(sizes)}, which must be all positive, non-zero values."
        )
    return tuple(sizes), partition


def _create(shape: Any, dtype: Any, buffer: Any, name: str, fill: float | None, api: str) -> Tensor:
    builder = current()
    sizes, partition = resolve_shape(shape)
    space, space_name = _resolve_space(buffer)
    element, _ = lowering.result_dtype(dtype, "float32", api)
    if space is Space.HBM:
        if fill is not None:
            raise errors.hbm_with_initial_value()
        if space_name == "shared_hbm":
            frame = builder.frame()
            at_top = frame is None or builder.entry_code is None or frame.f_code is builder.entry_code
            if len(builder.loops) > len(builder.grid) or not at_top:
                raise errors.shared_hbm_not_at_top_level()
        outside = builder.grid if space_name == "shared_hbm" else ()
        made = builder.new_buffer(space, sizes, element, name=str(name or ""), outside=outside)
        return whole(made)
    allocated = bool(getattr(buffer, "allocated", False))
    if allocated:
        builder.allocated_kernel = True
        if fill is not None:
            raise errors.scratchpad_with_initial_value()
    block_dims = partition or 0
    if len(sizes) - block_dims < 2:
        raise errors.compile_error(
            f"Insufficient rank: tensors in {space.value} must have a partition and a free dimension, got shape "
            f"{errors.shape_text(sizes)}"
        )
    if sizes[block_dims] > 128:
        raise errors.partitions_exceed_limit(sizes[block_dims])
    free_bytes = prod(sizes[block_dims + 1 :]) * dtypes.itemsize(element)
    if space is Space.SBUF and free_bytes > SBUF_USABLE_BYTES[builder.target]:
        raise errors.compile_error(
            f"stack overflow: required sbuf size {free_bytes} exceeds available sbuf size "
            f"{SBUF_USABLE_BYTES[builder.target]}"
        )
    if space is Space.PSUM and free_bytes > PSUM_BYTES:
        raise errors.compile_error(
            f"stack overflow: required psum banks {-(-free_bytes // 2048)} exceeds available psum banks 8"
        )
    made = builder.new_buffer(space, sizes, element, name=str(name or ""), block_dims=block_dims, fill=fill)
    made.allocated = allocated
    made.written = fill is not None
    tensor = whole(made)
    if block_dims:  # the shape keeps its mark, so that a tensor made from it has the same partition dimension
        tensor.shape = (*sizes[:block_dims], ParDim(sizes[block_dims]), *sizes[block_dims + 1 :])
    return tensor


def ndarray(
    shape: Any,
    dtype: Any,
    *,
    buffer: Any = None,
    name: str = "",
    lazy_initialization: bool = False,
) -> Tensor:
    """A tensor without values."""
    return _create(shape, dtype, buffer, name, None, "ndarray")


def zeros(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", lazy_initialization: bool = False) -> Tensor:
    """A tensor of zeros on chip."""
    return _create(shape, dtype, buffer, name, 0.0, "zeros")


def ones(shape: Any, dtype: Any, *, buffer: Any = None, name: str = "") -> Tensor:
    """A tensor of ones on chip."""
    return _create(shape, dtype, buffer, name, 1.0, "ones")


def full(
    shape: Any,
    fill_value: Any,
    dtype: Any,
    *,
    buffer: Any = None,
    name: str = "",
    lazy_initialization: bool = False,
) -> Tensor:
    """A tensor of one value on chip."""
    value = lowering.number(fill_value)
    if value is None:
        raise errors.compile_error("fill_value of 'full' must be a number")
    return _create(shape, dtype, buffer, name, float(value), "full")


def empty_like(x: Tensor, dtype: Any = None, *, buffer: Any = None, name: str = "") -> Tensor:
    """A tensor of the same shape without values."""
    return _create(x.shape, dtype or x.dtype, buffer, name, None, "empty_like")


def zeros_like(x: Tensor, dtype: Any = None, *, buffer: Any = None, name: str = "") -> Tensor:
    """A tensor of zeros of the same shape."""
    return _create(x.shape, dtype or x.dtype, buffer, name, 0.0, "zeros_like")


def shared_constant(constant: Any, dtype: Any = None) -> Tensor:
    """A constant tensor in HBM."""
    builder = current()
    if isinstance(constant, Tensor):
        return constant
    values = np.asarray(constant)
    element = dtypes.canonical(dtype if dtype is not None else values.dtype)
    if element is None and dtype is None and values.dtype == np.float64:
        element = "float32"
    if element is None and dtype is None and np.issubdtype(values.dtype, np.integer):
        element = "int32"
    if element is None:
        raise errors.dtype_not_supported(dtype if dtype is not None else values.dtype, "shared_constant", dtypes.NAMES)
    made = builder.new_buffer(Space.HBM, tuple(values.shape), element, role=Role.CONSTANT, outside=tuple(builder.loops))
    made.constant = np.ascontiguousarray(values.astype(dtypes.storage(element)))
    made.written = True
    return whole(made)


def shared_identity_matrix(n: int, dtype: Any = "uint8") -> Tensor:
    """The identity matrix as a constant in HBM."""
    return shared_constant(np.identity(as_int(n)), dtype)


# Loads and stores.


def _hbm_tile(tensor: Any, name: str, api: str) -> Tensor:
    if not isinstance(tensor, Tensor):
        if tensor is None:
            raise errors.operand_missing(name)
        raise errors.unexpected_operand(name, api, tensor)
    if tensor.space is not Space.HBM:
        raise errors.unsupported_memory(name, api, "hbm", tensor.space.value)
    if tensor.ndim == 0:
        tensor = tensor.broadcast_view((1, 1))
    if tensor.ndim == 1:
        shape = (tensor.shape[0], 1)
        tensor = tensor.with_axes(
            shape, [Index(d.constant, d.terms, shape, (*d.strides, 0), d.tables) for d in tensor.dims]
        )
    if tensor.shape[0] > 128:
        raise errors.partitions_exceed_limit(tensor.shape[0])
    tile: Tensor = tensor
    return tile


def load(src: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Copies a tile from HBM into SBUF."""
    source = _hbm_tile(src, "src", "load")
    element, explicit = lowering.result_dtype(dtype, source.buffer.dtype, "load")
    out = lowering.new_tile(source.shape, element)
    operands: dict[str, Any] = {"src": source}
    record = current().emit(Opcode.LOAD, Engine.DMA, [out], operands, {}, lowering.mask_for(mask, source.shape))
    return lowering.fresh(out, record, explicit)


def load_transpose2d(src: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Loads a 2-D tile with its axes exchanged."""
    if isinstance(src, Tensor) and src.indirect:
        raise errors.indirect_index_not_allowed("src")
    if not isinstance(src, Tensor) or src.space is not Space.HBM:
        return load(src)
    if src.ndim != 2:
        raise errors.too_many_dimensions("src", src.shape, "load_transpose2d", 2)
    source = _hbm_tile(src.swap_axes(0, 1), "src", "load_transpose2d")
    element, explicit = lowering.result_dtype(dtype, source.buffer.dtype, "load_transpose2d")
    terms = [
        Index(term.constant, term.terms, source.shape, term.strides[::-1])
        for term in lowering.mask_for(mask, src.shape)
    ]
    out = lowering.new_tile(source.shape, element)
    record = current().emit(Opcode.LOAD, Engine.DMA, [out], {"src": source}, {"transpose": True}, terms)
    return lowering.fresh(out, record, explicit)


def store(dst: Any, value: Any, *, mask: Any = None) -> None:
    """Copies a tile into HBM."""
    builder = current()
    destination = _hbm_tile(dst, "dst", "store")
    buffer = destination.buffer
    if buffer.role is Role.CONSTANT or (buffer.role is Role.INPUT and not buffer.mutable):
        raise errors.immutable_parameter(buffer.name)
    if isinstance(value, Tensor):
        if value.space is Space.HBM:
            raise errors.unsupported_memory("value", "store", "psum|sbuf", "hbm")
        tile = require_tile(value, "value", "store")
    else:
        tile = _constant_tile(value, destination)
    assignment.check_destination(destination, tile, "dst = value")
    tile = assignment.fit(tile, destination.shape)
    builder.check_output_dependencies(destination)
    builder.emit(Opcode.STORE, Engine.DMA, [destination], {"src": tile}, {}, lowering.mask_for(mask, destination.shape))


def _constant_tile(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, Index) and (value.terms or value.varies):
        out = lowering.new_tile(like.shape, like.buffer.dtype)
        current().emit(Opcode.IOTA, Engine.GPSIMD, [out], {}, assignment.iota_attributes(value.expand(like.shape)))
        return out
    fill = lowering.number(value)
    if fill is None:
        raise errors.unexpected_operand("value", "store", value)
    out = lowering.new_tile(like.shape, like.buffer.dtype)
    current().emit(Opcode.MEMSET, Engine.ANY, [out], {}, {"value": fill})
    return out


def atomic_rmw(dst: Any, value: Any, op: Any, *, mask: Any = None) -> None:
    """Adds a tile into HBM at positions given by a tile of indices."""
    destination = _hbm_tile(dst, "dst", "atomic_rmw")
    name = operators.op_name(op, "atomic_rmw")
    if name != "add":
        raise errors.compile_error(
            f"atomic_rmw `op` param only supports 'add' operation currently. An unsupported op={name}"
        )
    if not destination.indirect:
        raise errors.compile_error(
            "atomic_rmw `dst` only supports indirect dynamic indexing currently. Use a tile to index."
        )
    tile = require_tile(value, "value", "atomic_rmw")
    current().emit(
        Opcode.DMA_COPY,
        Engine.DMA,
        [destination],
        {"src": assignment.fit(tile, destination.shape)},
        {"rmw_op": name},
        lowering.mask_for(mask, destination.shape),
    )


def copy(src: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """A copy on chip."""
    return lowering.copy(require_tile(src, "src", "copy"), api="copy", dtype=dtype, mask=mask)


def static_cast(value: Any, dtype: Any) -> Any:
    """A tile, or a number, in another type."""
    if isinstance(value, Tensor):
        return lowering.cast(value, dtype)
    return value


def broadcast_to(src: Any, *, shape: Any = None) -> Tensor:
    """Repeats axes of extent 1."""
    return lowering.broadcast_to(src, tuple(as_int(size) for size in shape))


def expand_dims(data: Any, axis: int) -> Any:
    """Inserts an axis of extent 1."""
    if isinstance(data, Index):
        return data.reshape((*data.shape[:axis], 1, *data.shape[axis:]))
    return data.expand_dims(axis)


def transpose(x: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """Exchanges the partition axis and the free axis of a 2-D tile."""
    tile = require_tile(x, "x", "transpose")
    if tile.ndim > 2:
        raise errors.too_many_dimensions("x", tile.shape, "transpose", 2)
    for dimension in (0, 1):
        if tile.shape[dimension] > 128:
            raise errors.dimension_exceeds_limit(dimension, "x", tile.shape, "transpose", 128)
    if tile.space is Space.PSUM:
        tile = lowering.copy(tile, api="transpose")
    return products.transpose(tile, api="transpose", engine=Engine.TENSOR, dtype=dtype, mask=mask)


def matmul(x: Any, y: Any, *, transpose_x: bool = False, mask: Any = None) -> Tensor:
    """``x @ y`` into PSUM; without ``transpose_x`` the compiler transposes ``x`` (M, K) first."""
    left, right = require_tile(x, "x", "matmul"), require_tile(y, "y", "matmul")
    left = products.two_dimensional(left, "x", "matmul")
    contraction = left.shape[0] if transpose_x else left.shape[1]
    if contraction != right.shape[0]:
        raise errors.matmul_shapes([("x", left.shape), ("y", right.shape)], "matmul")
    for dimension in (0, 1):
        if left.shape[dimension] > 128:
            raise errors.dimension_exceeds_limit(dimension, "x", left.shape, "matmul", 128)
    if prod(right.shape[1:]) > 512:
        raise errors.dimension_exceeds_limit(1, "y", right.shape, "matmul", 512)
    if right.space is Space.PSUM:
        right = lowering.copy(right, api="matmul")
    if left.space is Space.PSUM:
        left = lowering.copy(left, api="matmul")
    if not transpose_x:
        turned = products.transpose(left, api="matmul", engine=Engine.TENSOR)
        left = lowering.copy(turned, api="matmul", dtype=left.buffer.dtype)
    return products.matmul(left, right, api="matmul", mask=mask, attributes={"high_level": True})


def rand(shape: Any, dtype: Any = None) -> Tensor:
    """A tile of uniform random numbers in [0, 1)."""
    sizes, _ = resolve_shape(shape)
    element, explicit = lowering.result_dtype(dtype, "float32", "rand")
    out = lowering.new_tile(sizes, element)
    record = current().emit(Opcode.RANDOM, Engine.VECTOR, [out], {}, {})
    return lowering.fresh(out, record, explicit)


def random_seed(seed: Any, *, mask: Any = None) -> None:
    """Sets the seed of ``rand`` and ``dropout``; simulated random numbers have a seed of their own."""
    require_tile(seed, "seed", "random_seed")


# SPMD.


def program_id(axis: Any) -> Any:
    """Index of this instance along an axis of the launch grid."""
    builder = current()
    position = as_int(axis)
    if not builder.grid_shape and position == 0:
        return 0
    if not 0 <= position < len(builder.grid_shape):
        raise errors.program_id_axis_out_of_bounds(position, len(builder.grid_shape))
    return builder.grid_indices[position]


def num_programs(axes: Any = None) -> Any:
    """Number of instances along one axis, several, or all."""
    shape = current().grid_shape
    if axes is None:
        return prod(shape)
    if isinstance(axes, (tuple, list)):
        return tuple(num_programs(axis) for axis in axes)
    position = as_int(axes)
    if not shape and position == 0:
        return 1
    if not 0 <= position < len(shape):
        raise errors.program_id_axis_out_of_bounds(position, len(shape))
    return shape[position]


def program_ndim() -> int:
    """Number of axes of the launch grid."""
    return len(current().grid_shape)


def nc(count: Any) -> int:
    """A number of NeuronCores in a launch grid; the simulator runs instances one after the other."""
    return as_int(count)


def spmd_dim(*sizes: Any) -> int:
    """A launch grid axis made of several."""
    return prod(as_int(size) for size in sizes)


def device_print(*_args: Any, **_kwargs: Any) -> None:
    """Prints on the device; nothing to do here."""
