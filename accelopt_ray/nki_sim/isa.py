"""``neuronxcc.nki.isa``: one function per hardware instruction.

Signatures follow the generation-A documentation, positional order included.
"""

from __future__ import annotations

from math import prod
from typing import Any

from accelopt_ray.nki_sim import assignment, dtypes, errors, language, lowering, operators, products
from accelopt_ray.nki_sim.builder import current
from accelopt_ray.nki_sim.program import Engine, Opcode, Space
from accelopt_ray.nki_sim.symbolic import Index, as_index
from accelopt_ray.nki_sim.tile import Tensor, require_tile

tensor_engine = Engine.TENSOR
vector_engine = Engine.VECTOR
scalar_engine = Engine.SCALAR
gpsimd_engine = Engine.GPSIMD
dma_engine = Engine.DMA
unknown_engine = Engine.ANY


class engine:
    """``nisa.engine``: the engines under their short names."""

    tensor = Engine.TENSOR
    vector = Engine.VECTOR
    scalar = Engine.SCALAR
    gpsimd = Engine.GPSIMD
    dma = Engine.DMA
    unknown = Engine.ANY


class reduce_cmd:
    """What an activation does with the reduction registers."""

    idle = "idle"
    reset = "reset"
    reduce = "reduce"
    reset_reduce = "reset_reduce"


class nc_version:
    """Hardware generations."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class oob_mode:
    """What a DMA does out of bounds."""

    error = "error"
    skip = "skip"


class dge_mode:
    """How DMA descriptors are made."""

    unknown = "unknown"
    none = "none"
    swdge = "swdge"
    hwdge = "hwdge"


def get_nc_version() -> int:
    """Generation of the target."""
    return {"trn1": nc_version.gen2, "trn2": nc_version.gen3, "trn3": nc_version.gen4}[current().target]


def _engine(value: Any, allowed: tuple[Engine, ...], api: str) -> Engine:
    if value is None:
        return Engine.ANY if len(allowed) > 1 else allowed[0]
    if not isinstance(value, Engine):
        raise errors.compile_error(f"engine of '{api}' must be one of nki.isa's engines, got {value!r}")
    if value is Engine.ANY:
        return Engine.ANY if len(allowed) > 1 else allowed[0]
    if value not in allowed:
        raise errors.op_not_supported(f"{value.value} engine", api)
    return value


_VECTOR_LIKE = (Engine.VECTOR, Engine.GPSIMD)
_ELEMENTWISE = (Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD)


def nc_matmul(
    stationary: Any,
    moving: Any,
    *,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    tile_position: Any = (),
    tile_size: Any = (),
    mask: Any = None,
) -> Tensor:
    """``stationary.T @ moving`` on the tensor engine into PSUM."""
    attributes = {
        "is_stationary_onezero": bool(is_stationary_onezero),
        "is_moving_onezero": bool(is_moving_onezero),
        "is_transpose": bool(is_transpose),
    }
    left, right = require_tile(stationary, "stationary", "nc_matmul"), require_tile(moving, "moving", "nc_matmul")
    for tile, name in ((left, "stationary"), (right, "moving")):
        if dtypes.is_integer(tile.buffer.dtype) and not (is_transpose or is_stationary_onezero or is_moving_onezero):
            raise errors.operand_dtype(name, "nc_matmul", tile.buffer.dtype, _FLOATS)
    return products.matmul(left, right, api="nc_matmul", mask=mask, attributes=attributes)


_FLOATS = ("float32", "tfloat32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2")


def nc_transpose(
    data: Any,
    *,
    mask: Any = None,
    dtype: Any = None,
    engine: Any = Engine.ANY,
) -> Tensor:
    """Exchanges partition and free axis: 128 x 128 on the tensor engine, 32 x 32 on the vector engine."""
    tile = require_tile(data, "data", "nc_transpose")
    chosen = _engine(engine, (Engine.TENSOR, Engine.VECTOR), "nc_transpose")
    if chosen is Engine.ANY:
        small = tile.shape[0] <= 32 and prod(tile.shape[1:]) <= 32
        chosen = Engine.VECTOR if small else Engine.TENSOR
    return products.transpose(tile, api="nc_transpose", engine=chosen, dtype=dtype, mask=mask)


def _scale_and_bias(data: Tensor, scale: Any, bias: Any, api: str) -> tuple[Any, Tensor | None]:
    factor: Any = lowering.number(scale)
    if factor is None:
        tile = require_tile(scale, "scale", api)
        if tile.buffer.dtype != "float32":
            raise errors.activation_scale_type(api, tile.buffer.dtype)
        if tile.shape[0] != data.shape[0] or prod(tile.shape[1:]) != 1:
            raise errors.activation_scale_shape(tile.shape)
        factor = lowering.partition_vector(tile, data, "scale", api)
    if bias is None:
        if current().allocated_kernel:
            raise errors.bias_required_in_allocated_kernel()
        return factor, None
    if not isinstance(bias, Tensor):
        raise errors.activation_bias_type(api, type(bias).__name__)
    vector = require_tile(bias, "bias", api)
    if vector.buffer.dtype not in ("float32", "float16", "bfloat16"):
        raise errors.activation_bias_type(api, vector.buffer.dtype)
    return factor, lowering.partition_vector(vector, data, "bias", api)


def reduce_destination(reduce_res: Any, data: Tensor, api: str) -> Tensor:
    """Checks the tile that receives a reduction: one value for each partition of ``data``."""
    return lowering.partition_vector(reduce_res, data, "reduce_res", api)


def activation(
    op: Any,
    data: Any,
    *,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Any = None,
    reduce_res: Any = None,
    reduce_cmd: Any = "idle",
    mask: Any = None,
    dtype: Any = None,
) -> Tensor:
    """``op(data * scale + bias)`` on the scalar engine, with an optional sum along the free axes."""
    name = operators.require_op(op, operators.ACTIVATION_OPS, "activation")
    tile = require_tile(data, "data", "activation")
    factor, vector = _scale_and_bias(tile, scale, bias, "activation")
    reduction = None
    attributes: dict[str, Any] = {}
    if reduce_cmd not in ("idle", "reset", "reduce", "reset_reduce"):
        raise errors.compile_error(f"reduce_cmd of 'activation' must be one of nisa.reduce_cmd, got {reduce_cmd!r}")
    if reduce_res is not None:
        operation = operators.require_op(reduce_op or "add", operators.REDUCE_OPS, "activation")
        reduction = (operation, reduce_destination(reduce_res, tile, "activation"))
        attributes["reduce_cmd"] = "reset_reduce" if reduce_cmd == "idle" else reduce_cmd
    elif reduce_cmd != "idle":
        attributes["reduce_op"] = operators.require_op(reduce_op or "add", operators.REDUCE_OPS, "activation")
        attributes["reduce_cmd"] = reduce_cmd
    return lowering.activation(
        name,
        tile,
        api="activation",
        dtype=dtype,
        default=tile.buffer.dtype,
        mask=mask,
        scale=factor,
        bias=vector,
        reduction=reduction,
        attributes=attributes,
    )


def activation_reduce(
    op: Any,
    data: Any,
    *,
    reduce_op: Any = None,
    reduce_res: Any = None,
    bias: Any = None,
    scale: Any = 1.0,
    mask: Any = None,
    dtype: Any = None,
) -> Tensor:
    """As :func:`activation`, with the reduction's result in ``reduce_res``."""
    name = operators.require_op(op, operators.ACTIVATION_OPS, "activation_reduce")
    tile = require_tile(data, "data", "activation_reduce")
    factor, vector = _scale_and_bias(tile, scale, bias, "activation_reduce")
    operation = operators.require_op(reduce_op or "add", operators.REDUCE_OPS, "activation_reduce")
    if operation != "add":
        raise errors.op_not_supported(operation, "activation_reduce")
    destination = reduce_destination(reduce_res, tile, "activation_reduce")
    return lowering.activation(
        name,
        tile,
        api="activation_reduce",
        dtype=dtype,
        default=tile.buffer.dtype,
        mask=mask,
        scale=factor,
        bias=vector,
        reduction=(operation, destination),
        attributes={"reduce_cmd": "reset_reduce"},
    )


def tensor_tensor(
    data1: Any,
    data2: Any,
    op: Any,
    *,
    dtype: Any = None,
    mask: Any = None,
    engine: Any = Engine.ANY,
) -> Tensor:
    """``op`` of two tiles of one shape."""
    name = operators.require_op(op, operators.ALU_OPS, "tensor_tensor")
    a, b = require_tile(data1, "data1", "tensor_tensor"), require_tile(data2, "data2", "tensor_tensor")
    if a.shape[0] != b.shape[0]:
        raise errors.partition_mismatch([("data1", a.shape), ("data2", b.shape)], "tensor_tensor")
    if prod(a.shape[1:]) != prod(b.shape[1:]):
        raise errors.shapes_mismatch([("data1", a.shape), ("data2", b.shape)], "tensor_tensor")
    if a.shape != b.shape:
        b = b.reshape(a.shape)
    promoted = dtypes.promote(a.buffer.dtype, b.buffer.dtype)
    default = "uint8" if name in operators.COMPARISON_OPS else promoted
    chosen = _engine(engine, _VECTOR_LIKE, "tensor_tensor")
    return lowering.tensor_tensor(
        name, a, b, api="tensor_tensor", dtype=dtype, default=default, mask=mask, engine=chosen
    )


def _steps(
    data: Tensor, triples: list[tuple[Any, Any, Any]], api: str, allowed: frozenset[str] = operators.ALU_OPS
) -> tuple[list[tuple[str, Any, bool]], str]:
    steps: list[tuple[str, Any, bool]] = []
    default = data.buffer.dtype
    kinds = set()
    for position, (op, operand, reverse) in enumerate(triples):
        name = operators.require_op(op, allowed, api)
        value: Any = lowering.number(operand)
        if value is None:
            if operand is None and name in operators.UNARY_ALU_OPS:
                value = 0
            else:
                value = lowering.partition_vector(operand, data, f"operand{position}", api)
                default = dtypes.promote(default, value.buffer.dtype)
        elif name not in operators.BITVECTOR_OPS:
            default = dtypes.promote_scalar(default, value)
        kinds.add(name in operators.BITVECTOR_OPS)
        if name in operators.COMPARISON_OPS:
            default = "uint8"
        steps.append((name, value, bool(reverse)))
    if len(kinds) > 1:
        raise errors.compile_error(f"op0 and op1 of '{api}' must both be bitvec operations or both be arithmetic")
    return steps, default


def tensor_scalar(
    data: Any,
    op0: Any,
    operand0: Any,
    reverse0: Any = False,
    op1: Any = None,
    operand1: Any = None,
    reverse1: Any = False,
    *,
    dtype: Any = None,
    mask: Any = None,
    engine: Any = Engine.ANY,
) -> Tensor:
    """One or two operations with a number or a vector of one value per partition."""
    tile = require_tile(data, "data", "tensor_scalar")
    triples = [(op0, operand0, reverse0)]
    if op1 is not None:
        triples.append((op1, operand1, reverse1))
    steps, default = _steps(tile, triples, "tensor_scalar")
    chosen = _engine(engine, _ELEMENTWISE, "tensor_scalar")
    return lowering.tensor_scalar(
        tile, steps, api="tensor_scalar", dtype=dtype, default=default, mask=mask, engine=chosen
    )


def tensor_scalar_reduce(
    *,
    data: Any,
    op0: Any,
    operand0: Any,
    reduce_op: Any,
    reduce_res: Any,
    reverse0: Any = False,
    dtype: Any = None,
    mask: Any = None,
) -> Tensor:
    """:func:`tensor_scalar` with a reduction of its result along the free axes."""
    tile = require_tile(data, "data", "tensor_scalar_reduce")
    steps, default = _steps(tile, [(op0, operand0, reverse0)], "tensor_scalar_reduce")
    operation = operators.require_op(reduce_op, operators.REDUCE_OPS, "tensor_scalar_reduce")
    destination = reduce_destination(reduce_res, tile, "tensor_scalar_reduce")
    current().check_output_dependencies(destination)
    element, explicit = lowering.result_dtype(dtype, default, "tensor_scalar_reduce")
    out = lowering.new_tile(tile.shape, element)
    name, operand, reverse = steps[0]
    record = current().emit(
        Opcode.TENSOR_SCALAR_REDUCE,
        Engine.VECTOR,
        [out, destination],
        {"data": tile, "operand0": operand},
        {"op0": name, "reverse0": reverse, "reduce_op": operation},
        lowering.mask_for(mask, tile.shape),
    )
    destination.buffer.producer = None
    return lowering.fresh(out, record, explicit)


def scalar_tensor_tensor(
    *,
    data: Any,
    op0: Any,
    operand0: Any,
    op1: Any,
    operand1: Any,
    reverse0: Any = False,
    reverse1: Any = False,
    dtype: Any = None,
    mask: Any = None,
) -> Tensor:
    """``(data op0 operand0) op1 operand1`` with a number or vector, then a tile."""
    api = "scalar_tensor_tensor"
    tile, other = require_tile(data, "data", api), require_tile(operand1, "operand1", api)
    if tile.space is Space.PSUM and other.space is Space.PSUM:
        raise errors.compile_error(f"'data' and 'operand1' of '{api}' cannot both be in address space 'psum'")
    if tile.shape[0] != other.shape[0]:
        raise errors.partition_mismatch([("data", tile.shape), ("operand1", other.shape)], api)
    if prod(tile.shape[1:]) != prod(other.shape[1:]):
        raise errors.shapes_mismatch([("data", tile.shape), ("operand1", other.shape)], api)
    steps, _ = _steps(tile, [(op0, operand0, reverse0)], api)
    second = operators.require_op(op1, operators.ALU_OPS, api)
    default = dtypes.promote(tile.buffer.dtype, other.buffer.dtype)
    element, explicit = lowering.result_dtype(dtype, default, api)
    out = lowering.new_tile(tile.shape, element)
    record = current().emit(
        Opcode.SCALAR_TENSOR_TENSOR,
        Engine.VECTOR,
        [out],
        {
            "data": tile,
            "operand0": steps[0][1],
            "operand1": other if other.shape == tile.shape else other.reshape(tile.shape),
        },
        {"op0": steps[0][0], "op1": second, "reverse0": steps[0][2], "reverse1": bool(reverse1)},
        lowering.mask_for(mask, tile.shape),
    )
    return lowering.fresh(out, record, explicit)


def tensor_reduce(
    op: Any,
    data: Any,
    axis: Any,
    *,
    mask: Any = None,
    dtype: Any = None,
    negate: bool = False,
    keepdims: bool = False,
) -> Tensor:
    """Reduces the last free axes."""
    name = operators.require_op(op, operators.REDUCE_OPS, "tensor_reduce")
    tile = require_tile(data, "data", "tensor_reduce")
    axes = lowering.normalise_axes(axis, tile.ndim, "tensor_reduce")
    if axes != tuple(range(tile.ndim - len(axes), tile.ndim)):
        raise errors.compile_error(
            f"axis {list(axes)} of 'tensor_reduce' must be the last contiguous free dimensions of "
            f"data{errors.shape_text(tile.shape)}"
        )
    return lowering.reduce(
        name, tile, axes, api="tensor_reduce", dtype=dtype, mask=mask, negate=negate, keepdims=keepdims
    )


def tensor_partition_reduce(op: Any, data: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Reduces the partition axis on the GpSimd engine."""
    api = "tensor_partition_reduce"
    name = operators.require_op(op, operators.REDUCE_OPS, api)
    if name not in ("add", "maximum", "bitwise_or", "bitwise_and"):
        raise errors.compile_error(f"par_reduce does not support operator={name}")
    tile = require_tile(data, "data", api)
    if tile.space is not Space.SBUF:
        raise errors.unsupported_memory("data", api, "sbuf", tile.space.value)
    element, explicit = lowering.result_dtype(dtype, tile.buffer.dtype, api)
    shape = (1, *tile.shape[1:])
    out = lowering.new_tile(shape, element)
    terms = lowering.mask_for(mask, tile.shape)
    attributes: dict[str, Any] = {"op": name}
    rows = [term for term in terms if term.strides[0]]
    for term in rows:
        lowering.refuse_mixed_condition(term, api)
    if rows:
        attributes["input_mask"] = tuple(rows)
    kept = [Index(term.constant, term.terms, shape, term.strides) for term in terms if not term.strides[0]]
    record = current().emit(Opcode.PARTITION_REDUCE, Engine.GPSIMD, [out], {"data": tile}, attributes, kept)
    return lowering.fresh(out, record, explicit)


def tensor_tensor_scan(
    data0: Any,
    data1: Any,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: Any = False,
    reverse1: Any = False,
    *,
    dtype: Any = None,
    mask: Any = None,
) -> Tensor:
    """``out[t] = (out[t-1] op0 data0[t]) op1 data1[t]`` along the free axis."""
    api = "tensor_tensor_scan"
    first = operators.require_op(op0, operators.ALU_OPS, api)
    second = operators.require_op(op1, operators.ALU_OPS, api)
    a, b = require_tile(data0, "data0", api), require_tile(data1, "data1", api)
    if a.shape[0] != b.shape[0]:
        raise errors.partition_mismatch([("data0", a.shape), ("data1", b.shape)], api)
    if prod(a.shape[1:]) != prod(b.shape[1:]):
        raise errors.shapes_mismatch([("data0", a.shape), ("data1", b.shape)], api)
    if a.space is Space.PSUM and b.space is Space.PSUM:
        raise errors.compile_error(f"'data0' and 'data1' of '{api}' cannot both be in address space 'psum'")
    start: Any = lowering.number(initial)
    if start is None:
        start = lowering.partition_vector(initial, a, "initial", api)
    default = dtypes.promote(a.buffer.dtype, b.buffer.dtype)
    element, explicit = lowering.result_dtype(dtype, default, api)
    out = lowering.new_tile(a.shape, element)
    record = current().emit(
        Opcode.SCAN,
        Engine.VECTOR,
        [out],
        {"data0": a, "data1": b.reshape(a.shape), "initial": start},
        {"op0": first, "op1": second, "reverse0": bool(reverse0), "reverse1": bool(reverse1)},
        lowering.mask_for(mask, a.shape),
    )
    return lowering.fresh(out, record, explicit)


def reciprocal(data: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """1 / data on the vector engine."""
    return lowering.reciprocal(require_tile(data, "data", "reciprocal"), api="reciprocal", dtype=dtype, mask=mask)


def tensor_copy(
    src: Any,
    *,
    mask: Any = None,
    dtype: Any = None,
    engine: Any = Engine.ANY,
) -> Tensor:
    """A copy on chip."""
    chosen = _engine(engine, _ELEMENTWISE, "tensor_copy")
    return lowering.copy(
        require_tile(src, "src", "tensor_copy"), api="tensor_copy", dtype=dtype, mask=mask, engine=chosen
    )


def memset(
    shape: Any,
    value: Any,
    dtype: Any,
    *,
    mask: Any = None,
    engine: Any = Engine.ANY,
) -> Tensor:
    """A tile of one value."""
    sizes, _ = language.resolve_shape(shape)
    fill = lowering.number(value)
    if fill is None:
        raise errors.unexpected_operand("value", "memset", value)
    element, _ = lowering.result_dtype(dtype, "float32", "memset")
    if len(sizes) < 2:
        raise errors.compile_error(
            f"Insufficient rank: shape {errors.shape_text(sizes)} of 'memset' needs a partition and a free dimension"
        )
    out = lowering.new_tile(sizes, element)
    record = current().emit(
        Opcode.MEMSET,
        _engine(engine, _VECTOR_LIKE, "memset"),
        [out],
        {},
        {"value": fill},
        lowering.mask_for(mask, sizes),
    )
    return lowering.fresh(out, record, True)


def iota(expr: Any, dtype: Any, *, mask: Any = None) -> Tensor:
    """A tile with the values of an index expression."""
    index = as_index(expr)
    if index is None:
        raise errors.unexpected_operand("expr", "iota", expr)
    shape = index.shape if index.ndim >= 2 else (1,) * (2 - index.ndim) + index.shape
    element, _ = lowering.result_dtype(dtype, "int32", "iota")
    out = lowering.new_tile(shape, element)
    record = current().emit(
        Opcode.IOTA,
        Engine.GPSIMD,
        [out],
        {},
        assignment.iota_attributes(index.expand(shape)),
        lowering.mask_for(mask, shape),
    )
    return lowering.fresh(out, record, True)
