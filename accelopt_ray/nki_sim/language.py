"""``neuronxcc.nki.language``: tensors, loads and stores, mathematics, reductions.

Signatures follow the generation-A documentation, positional order included; what a call does is in
:mod:`accelopt_ray.nki_sim.lowering`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from accelopt_ray.nki_sim import dtypes, errors, lowering, operators
from accelopt_ray.nki_sim import symbolic as sym
from accelopt_ray.nki_sim.builder import current
from accelopt_ray.nki_sim.loops import affine_range, sequential_range, static_range
from accelopt_ray.nki_sim.program import Engine, Opcode, Role, Space
from accelopt_ray.nki_sim.symbolic import Condition, DynamicSlice, Index, as_int
from accelopt_ray.nki_sim.tile import Tensor, require_tile, whole

#: Bytes per partition that the compiler can use.
SBUF_USABLE_BYTES = {"trn1": 180_224, "trn2": 212_984, "trn3": 245_752}
PSUM_BYTES = 16_384


class MemorySpace(str):
    """``nl.sbuf`` and the like: compares equal to its name."""

    allocated = False

    def __call__(self, *_args: Any, **_kwargs: Any) -> MemorySpace:
        return self


class AllocatedSpace(MemorySpace):
    """A memory space with an address chosen by the kernel."""

    allocated = True


sbuf = MemorySpace("sbuf")
psum = MemorySpace("psum")
hbm = MemorySpace("hbm")
private_hbm = MemorySpace("private_hbm")
shared_hbm = MemorySpace("shared_hbm")

float32 = dtypes.DType("float32")
tfloat32 = dtypes.DType("tfloat32")
bfloat16 = dtypes.DType("bfloat16")
float16 = dtypes.DType("float16")
float8_e4m3 = dtypes.DType("float8_e4m3")
float8_e5m2 = dtypes.DType("float8_e5m2")
int8 = dtypes.DType("int8")
int16 = dtypes.DType("int16")
int32 = dtypes.DType("int32")
uint8 = dtypes.DType("uint8")
uint16 = dtypes.DType("uint16")
uint32 = dtypes.DType("uint32")
bool_ = dtypes.DType("uint8")


class fp32:  # noqa: N801 - the name is NKI's
    """Limits of fp32."""

    min = float(np.finfo(np.float32).min)
    max = float(np.finfo(np.float32).max)


class _TileSize:
    """``nl.tile_size``: the hardware's limits on tiles."""

    pmax = 128
    psum_fmax = 512
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    psum_num_banks = 8
    psum_bank_fmax = 512

    @property
    def total_available_sbuf_size(self) -> int:
        """Usable bytes of SBUF per partition."""
        return SBUF_USABLE_BYTES[current().target]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise errors.unsupported(f"nl.tile_size.{name}")


tile_size = _TileSize()


class ParDim(int):
    """A size marked as the partition dimension."""


def par_dim(size: Any) -> ParDim:
    """Marks a dimension of a shape as the partition dimension."""
    return ParDim(as_int(size))


# Indices.


def arange(*args: Any) -> Index:
    """Positions along one axis: ``arange(stop)`` or ``arange(start, stop[, step])``."""
    if not 1 <= len(args) <= 3:
        raise TypeError(f"arange() takes from 1 to 3 positional arguments but {len(args)} were given")
    values = range(*(as_int(value) for value in args))
    return sym.arange(len(values), values.start if len(values) else 0, values.step)


class _Grid(tuple):  # type: ignore[type-arg]
    """What ``nl.mgrid[...]`` gives: one index per axis, by position or as ``.p``, ``.x``, ``.y``, ``.z``."""

    def __getattr__(self, name: str) -> Index:
        position = {"p": 0, "x": 1, "y": 2, "z": 3, "w": 4, "f": 1}.get(name)
        if position is None or position >= len(self):
            raise AttributeError(f"mgrid has no axis {name!r}")
        return self[position]  # type: ignore[no-any-return]


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


def _resolve_shape(shape: Any) -> tuple[tuple[int, ...], int | None]:
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
    sizes, partition = _resolve_shape(shape)
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
        made.shared = space_name == "shared_hbm"
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
    shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", lazy_initialization: bool = False,
) -> Tensor:
    """A tensor without values."""
    return _create(shape, dtype, buffer, name, None, "ndarray")


def zeros(
    shape: Any, dtype: Any, *, buffer: Any = None, name: str = "", lazy_initialization: bool = False
) -> Tensor:
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
    made = builder.new_buffer(
        Space.HBM, tuple(values.shape), element, role=Role.CONSTANT, outside=tuple(builder.loops)
    )
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
    return tensor


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
    lowering.check_destination(destination, tile, "dst = value")
    tile = lowering.fit(tile, destination.shape)
    builder.check_output_dependencies(destination)
    builder.emit(
        Opcode.STORE, Engine.DMA, [destination], {"src": tile}, {}, lowering.mask_for(mask, destination.shape)
    )


def _constant_tile(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, Index) and (value.terms or value.varies):
        out = lowering.new_tile(like.shape, like.buffer.dtype)
        current().emit(Opcode.IOTA, Engine.GPSIMD, [out], {}, lowering.iota_attributes(value.expand(like.shape)))
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
        {"src": lowering.fit(tile, destination.shape)},
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
        return data.reshape(data.shape[:axis] + (1,) + data.shape[axis:])
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
    return lowering.transpose(tile, api="transpose", engine=Engine.TENSOR, dtype=dtype, mask=mask)


def matmul(x: Any, y: Any, *, transpose_x: bool = False, mask: Any = None) -> Tensor:
    """``x @ y`` into PSUM; without ``transpose_x`` the compiler transposes ``x`` (M, K) first."""
    left, right = require_tile(x, "x", "matmul"), require_tile(y, "y", "matmul")
    left = lowering.two_dimensional(left, "x", "matmul")
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
        turned = lowering.transpose(left, api="matmul", engine=Engine.TENSOR)
        left = lowering.copy(turned, api="matmul", dtype=left.buffer.dtype)
    return lowering.matmul(left, right, api="matmul", mask=mask, attributes={"high_level": True})


# Mathematics.


def _unary(name: str, op: str) -> Callable[..., Tensor]:
    def function(x: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
        return lowering.unary(op, x, api=name, dtype=dtype, mask=mask)

    return _named(function, name, op)


def _binary(name: str, op: str) -> Callable[..., Tensor]:
    def function(x: Any, y: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
        return lowering.binary(op, x, y, api=name, dtype=dtype, mask=mask)

    return _named(function, name, op)


def _reduction(name: str, op: str) -> Callable[..., Tensor]:
    def function(
        x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False
    ) -> Tensor:
        tile = require_tile(x, "x", name)
        axes = lowering.normalise_axes(axis, tile.ndim, name)
        return lowering.reduce(op, tile, axes, api=name, dtype=dtype, mask=mask, keepdims=keepdims)

    return _named(function, name, op)


def _named(function: Callable[..., Tensor], name: str, op: str) -> Callable[..., Tensor]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"``{op}``, element by element or over axes."
    function.nki_op = op  # type: ignore[attr-defined]
    return function


_UNARY = {
    "abs": "abs", "arctan": "arctan", "ceil": "ceil", "cos": "cos", "erf": "erf", "erf_dx": "erf_dx", "exp": "exp",
    "floor": "floor", "gelu": "gelu", "gelu_apprx_sigmoid": "gelu_apprx_sigmoid", "gelu_apprx_tanh": "gelu_apprx_tanh",
    "gelu_dx": "gelu_dx", "invert": "invert", "log": "log", "logical_not": "logical_not", "mish": "mish",
    "negative": "negative", "reciprocal": "reciprocal", "relu": "relu", "rsqrt": "rsqrt", "sigmoid": "sigmoid",
    "sign": "sign", "silu": "silu", "silu_dx": "silu_dx", "sin": "sin", "softplus": "softplus", "sqrt": "sqrt",
    "square": "square", "tan": "tan", "tanh": "tanh", "trunc": "trunc",
}
_BINARY = {
    "add": "add", "subtract": "subtract", "multiply": "multiply", "divide": "divide", "maximum": "maximum",
    "minimum": "minimum", "power": "power", "mod": "mod", "fmod": "mod", "equal": "equal", "not_equal": "not_equal",
    "less": "less", "less_equal": "less_equal", "greater": "greater", "greater_equal": "greater_equal",
    "logical_and": "logical_and", "logical_or": "logical_or", "logical_xor": "logical_xor",
    "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor",
    "left_shift": "left_shift", "right_shift": "right_shift", "arctan2": "arctan2",
}
_REDUCTIONS = {"sum": "add", "max": "maximum", "min": "minimum", "prod": "multiply", "all": "logical_and"}

#: Functions built from tables, by their name in ``nl``.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _unary(name, op) for name, op in _UNARY.items()},
    **{name: _binary(name, op) for name, op in _BINARY.items()},
    **{name: _reduction(name, op) for name, op in _REDUCTIONS.items()},
}
FUNCTIONS["bitwise_not"] = FUNCTIONS["invert"]


def mean(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False) -> Tensor:
    """Mean over free axes: a sum and a multiplication."""
    tile = require_tile(x, "x", "mean")
    axes = lowering.normalise_axes(axis, tile.ndim, "mean")
    total = lowering.reduce("add", tile, axes, api="mean", mask=mask, keepdims=keepdims, default="float32")
    count = prod(tile.shape[axis] for axis in axes)
    return lowering.tensor_scalar(
        total, [("multiply", 1.0 / count, False)], api="mean", dtype=dtype, default=tile.buffer.dtype, mask=None,
        engine=Engine.ANY,
    )


def var(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False) -> Tensor:
    """Variance over free axes."""
    tile = require_tile(x, "x", "var")
    axes = lowering.normalise_axes(axis, tile.ndim, "var")
    centre = mean(tile, axes, dtype="float32", mask=mask, keepdims=True)
    centred = lowering.binary("subtract", tile, centre, api="var", dtype="float32", mask=mask)
    squares = lowering.unary("square", centred, api="var", mask=mask)
    return mean(squares, axes, dtype=dtype or tile.buffer.dtype, mask=mask, keepdims=keepdims)


def softmax(x: Any, axis: Any, *, dtype: Any = None, compute_dtype: Any = None, mask: Any = None) -> Tensor:
    """``exp(x - max) / sum`` over free axes."""
    tile = require_tile(x, "x", "softmax")
    axes = lowering.normalise_axes(axis, tile.ndim, "softmax")
    lowest = lowering.reduce("maximum", tile, axes, api="softmax", mask=mask, negate=True, keepdims=True)
    if prod(tile.shape[1:]) == prod(tile.shape[axis] for axis in axes):
        vector = lowest.reshape((tile.shape[0], 1))
        powers = lowering.activation(
            "exp", tile, api="softmax", dtype=compute_dtype, default="float32", mask=mask, bias=vector
        )
    else:
        shifted = lowering.binary("add", tile, lowest, api="softmax", dtype="float32", mask=mask)
        powers = lowering.unary("exp", shifted, api="softmax", dtype=compute_dtype, mask=mask)
    total = lowering.reduce("add", powers, axes, api="softmax", mask=mask, keepdims=True)
    inverse = lowering.reciprocal(total, api="softmax", dtype=None, mask=None)
    return lowering.binary(
        "multiply", powers, inverse, api="softmax", dtype=dtype or tile.buffer.dtype, mask=mask
    )


def rms_norm(
    x: Any, w: Any, axis: Any, n: Any, epsilon: float = 1e-6, *, dtype: Any = None, compute_dtype: Any = None,
    mask: Any = None
) -> Tensor:
    """``x * rsqrt(mean(x**2) + epsilon) * w`` over a free axis."""
    tile = require_tile(x, "x", "rms_norm")
    axes = lowering.normalise_axes(axis, tile.ndim, "rms_norm")
    squares = lowering.unary("square", tile, api="rms_norm", dtype=compute_dtype or "float32", mask=mask)
    total = lowering.reduce("add", squares, axes, api="rms_norm", mask=mask, keepdims=True)
    scaled = lowering.tensor_scalar(
        total, [("multiply", 1.0 / as_int(n), False), ("add", float(epsilon), False)], api="rms_norm", dtype=None,
        default="float32", mask=None, engine=Engine.ANY,
    )
    factor = lowering.unary("rsqrt", scaled, api="rms_norm")
    normal = lowering.binary("multiply", tile, factor, api="rms_norm", dtype="float32", mask=mask)
    return lowering.binary("multiply", normal, w, api="rms_norm", dtype=dtype or tile.buffer.dtype, mask=mask)


def where(condition: Any, x: Any, y: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """``x`` where the condition holds, else ``y``."""
    if isinstance(condition, Condition):
        fill = lowering.number(y)
        if fill is None:
            raise errors.unsupported("nl.where with an index condition and a tile as 'y'")
        return affine_select(condition, require_tile(x, "x", "where"), fill, dtype=dtype, mask=mask, api="where")
    predicate = require_tile(condition, "condition", "where")
    operands: dict[str, Any] = {}
    shape = predicate.shape
    types = []
    for name, value in (("on_true", x), ("on_false", y)):
        scalar = lowering.number(value)
        operands[name] = require_tile(value, name, "where") if scalar is None else scalar
        if scalar is None:
            tile = operands[name]
            if tile.shape[0] != predicate.shape[0]:
                raise errors.partition_mismatch([("condition", predicate.shape), (name, tile.shape)], "where")
            joined = sym.broadcast_shapes(shape, tile.shape)
            if joined is None:
                raise errors.shapes_not_broadcastable([("condition", shape), (name, tile.shape)], "where")
            shape = joined
            types.append(tile.buffer.dtype)
    default = types[0] if types else "float32"
    for other in types[1:]:
        default = dtypes.promote(default, other)
    for value in operands.values():
        if not isinstance(value, Tensor):
            default = dtypes.promote_scalar(default, value)
    element, explicit = lowering.result_dtype(dtype, default, "where")
    out = lowering.new_tile(shape, element)
    fitted = {
        name: value.broadcast_view(shape) if isinstance(value, Tensor) else value for name, value in operands.items()
    }
    record = current().emit(
        Opcode.SELECT,
        Engine.VECTOR,
        [out],
        {"predicate": predicate.broadcast_view(shape), **fitted},
        {},
        lowering.mask_for(mask, shape),
    )
    return lowering.fresh(out, record, explicit)


def affine_select(
    condition: Condition, on_true: Tensor, on_false: Any, *, dtype: Any, mask: Any, api: str
) -> Tensor:
    """``on_true`` where an affine condition over the tile's axes holds, else a number; one instruction per term."""
    fill = lowering.number(on_false)
    if fill is None:
        raise errors.unexpected_operand("on_false_value", api, on_false)
    if condition.negated:
        raise errors.mask_not_equal()
    if on_true.space is Space.PSUM:  # GpSimd does not reach PSUM: the compiler copies first
        on_true = lowering.copy(on_true, api=api)
    element, explicit = lowering.result_dtype(dtype, on_true.buffer.dtype, api)
    tile = on_true
    for term in condition.terms:
        terms = lowering.mask_for(Condition((term,)), tile.shape) or [Index(0, {}, tile.shape, (0,) * tile.ndim)]
        out = lowering.new_tile(tile.shape, element)
        record = current().emit(
            Opcode.AFFINE_SELECT,
            Engine.GPSIMD,
            [out],
            {"on_true": tile, "on_false": fill},
            {"predicate": terms[0]},
            lowering.mask_for(mask, tile.shape),
        )
        tile = lowering.fresh(out, record, explicit)
    return tile


def loop_reduce(x: Any, op: Any, loop_indices: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """Combines a tile over the iterations of loops."""
    name = operators.require_op(op, operators.REDUCE_OPS, "loop_reduce")
    return lowering.loop_reduce(x, name, loop_indices, dtype=dtype, mask=mask)


def rand(shape: Any, dtype: Any = None) -> Tensor:
    """A tile of uniform random numbers in [0, 1)."""
    sizes, _ = _resolve_shape(shape)
    element, explicit = lowering.result_dtype(dtype, "float32", "rand")
    out = lowering.new_tile(sizes, element)
    record = current().emit(Opcode.RANDOM, Engine.VECTOR, [out], {}, {})
    return lowering.fresh(out, record, explicit)


def random_seed(seed: Any, *, mask: Any = None) -> None:
    """Sets the seed of ``rand`` and ``dropout``; simulated random numbers have a seed of their own."""
    require_tile(seed, "seed", "random_seed")


def dropout(x: Any, rate: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """Sets random elements to zero."""
    tile = require_tile(x, "x", "dropout")
    probability = lowering.number(rate)
    element, explicit = lowering.result_dtype(dtype, tile.buffer.dtype, "dropout")
    out = lowering.new_tile(tile.shape, element)
    operand = lowering.partition_vector(rate, tile, "rate", "dropout") if probability is None else probability
    record = current().emit(
        Opcode.DROPOUT, Engine.VECTOR, [out], {"data": tile, "probability": operand}, {},
        lowering.mask_for(mask, tile.shape),
    )
    return lowering.fresh(out, record, explicit)


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


__all__ = ["affine_range", "sequential_range", "static_range"]
