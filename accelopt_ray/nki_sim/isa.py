"""``neuronxcc.nki.isa``: one function per hardware instruction.

Signatures follow the generation-A documentation, positional order included.
"""

from __future__ import annotations

from math import prod
from typing import Any

from accelopt_ray.nki_sim import dtypes, errors, language, lowering, operators
from accelopt_ray.nki_sim.builder import current
from accelopt_ray.nki_sim.language import load_transpose2d
from accelopt_ray.nki_sim.program import Engine, Opcode, Role, Space
from accelopt_ray.nki_sim.symbolic import Condition, Index, as_index
from accelopt_ray.nki_sim.tile import Tensor, require_tile

tensor_engine = Engine.TENSOR
vector_engine = Engine.VECTOR
scalar_engine = Engine.SCALAR
gpsimd_engine = Engine.GPSIMD
dma_engine = Engine.DMA
unknown_engine = Engine.ANY


class engine:  # noqa: N801 - the name is NKI's
    """``nisa.engine``: the engines under their short names."""

    tensor = Engine.TENSOR
    vector = Engine.VECTOR
    scalar = Engine.SCALAR
    gpsimd = Engine.GPSIMD
    dma = Engine.DMA
    unknown = Engine.ANY


class reduce_cmd:  # noqa: N801 - the name is NKI's
    """What an activation does with the reduction registers."""

    idle = "idle"
    reset = "reset"
    reduce = "reduce"
    reset_reduce = "reset_reduce"


class nc_version:  # noqa: N801 - the name is NKI's
    """Hardware generations."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class oob_mode:  # noqa: N801 - the name is NKI's
    """What a DMA does out of bounds."""

    error = "error"
    skip = "skip"


class dge_mode:  # noqa: N801 - the name is NKI's
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
    return lowering.matmul(left, right, api="nc_matmul", mask=mask, attributes=attributes)


_FLOATS = ("float32", "tfloat32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2")


def nc_transpose(
    data: Any, *, mask: Any = None, dtype: Any = None, engine: Any = Engine.ANY,
) -> Tensor:
    """Exchanges partition and free axis: 128 x 128 on the tensor engine, 32 x 32 on the vector engine."""
    tile = require_tile(data, "data", "nc_transpose")
    chosen = _engine(engine, (Engine.TENSOR, Engine.VECTOR), "nc_transpose")
    if chosen is Engine.ANY:
        small = tile.shape[0] <= 32 and prod(tile.shape[1:]) <= 32
        chosen = Engine.VECTOR if small else Engine.TENSOR
    return lowering.transpose(tile, api="nc_transpose", engine=chosen, dtype=dtype, mask=mask)


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


def _reduce_destination(reduce_res: Any, data: Tensor, api: str) -> Tensor:
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
        reduction = (operation, _reduce_destination(reduce_res, tile, "activation"))
        attributes["reduce_cmd"] = "reset_reduce" if reduce_cmd == "idle" else reduce_cmd
    elif reduce_cmd != "idle":
        attributes["reduce_op"] = operators.require_op(reduce_op or "add", operators.REDUCE_OPS, "activation")
        attributes["reduce_cmd"] = reduce_cmd
    return lowering.activation(
        name, tile, api="activation", dtype=dtype, default=tile.buffer.dtype, mask=mask, scale=factor, bias=vector,
        reduction=reduction, attributes=attributes,
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
    destination = _reduce_destination(reduce_res, tile, "activation_reduce")
    return lowering.activation(
        name, tile, api="activation_reduce", dtype=dtype, default=tile.buffer.dtype, mask=mask, scale=factor,
        bias=vector, reduction=(operation, destination), attributes={"reduce_cmd": "reset_reduce"},
    )


def tensor_tensor(
    data1: Any, data2: Any, op: Any, *, dtype: Any = None, mask: Any = None, engine: Any = Engine.ANY,
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
    destination = _reduce_destination(reduce_res, tile, "tensor_scalar_reduce")
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
        {"data": tile, "operand0": steps[0][1], "operand1": other if other.shape == tile.shape else other.reshape(tile.shape)},
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
        {"data0": a, "data1": b if b.shape == a.shape else b.reshape(a.shape), "initial": start},
        {"op0": first, "op1": second, "reverse0": bool(reverse0), "reverse1": bool(reverse1)},
        lowering.mask_for(mask, a.shape),
    )
    return lowering.fresh(out, record, explicit)


def reciprocal(data: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """1 / data on the vector engine."""
    return lowering.reciprocal(require_tile(data, "data", "reciprocal"), api="reciprocal", dtype=dtype, mask=mask)


def tensor_copy(
    src: Any, *, mask: Any = None, dtype: Any = None, engine: Any = Engine.ANY,
) -> Tensor:
    """A copy on chip."""
    chosen = _engine(engine, _ELEMENTWISE, "tensor_copy")
    return lowering.copy(
        require_tile(src, "src", "tensor_copy"), api="tensor_copy", dtype=dtype, mask=mask, engine=chosen
    )


def tensor_copy_predicated(
    *, src: Any, dst: Any, predicate: Any, mask: Any = None, dtype: Any = None, reverse_pred: bool = False
) -> None:
    """Copies where the predicate is not zero."""
    api = "tensor_copy_predicated"
    target, condition = require_tile(dst, "dst", api), require_tile(predicate, "predicate", api)
    if dtypes.is_float(condition.buffer.dtype):
        raise errors.operand_dtype("predicate", api, condition.buffer.dtype, ("uint8", "uint16", "uint32"))
    scalar = lowering.number(src)
    value: Any = require_tile(src, "src", api) if scalar is None else scalar
    if isinstance(value, Tensor) and value.space is Space.PSUM and condition.space is Space.PSUM:
        raise errors.compile_error(f"'src' and 'predicate' of '{api}' cannot both be in address space 'psum'")
    for name, tile in (("src", value), ("predicate", condition)):
        if isinstance(tile, Tensor) and tile.shape != target.shape:
            raise errors.shapes_mismatch([("dst", target.shape), (name, tile.shape)], api)
    current().emit(
        Opcode.COPY_PREDICATED,
        Engine.VECTOR,
        [target],
        {"src": value, "predicate": condition},
        {"reverse_pred": bool(reverse_pred)},
        lowering.mask_for(mask, target.shape),
    )
    target.buffer.producer = None


def memset(
    shape: Any, value: Any, dtype: Any, *, mask: Any = None, engine: Any = Engine.ANY,
) -> Tensor:
    """A tile of one value."""
    sizes, _ = language._resolve_shape(shape)
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
        Opcode.MEMSET, _engine(engine, _VECTOR_LIKE, "memset"), [out], {}, {"value": fill},
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
        Opcode.IOTA, Engine.GPSIMD, [out], {}, lowering.iota_attributes(index.expand(shape)),
        lowering.mask_for(mask, shape),
    )
    return lowering.fresh(out, record, True)


def affine_select(
    pred: Any, on_true_tile: Any, on_false_value: Any, *, mask: Any = None, dtype: Any = None,
) -> Tensor:
    """The tile where an affine condition over its axes holds, else a number."""
    tile = require_tile(on_true_tile, "on_true_tile", "affine_select")
    if isinstance(pred, bool):
        pred = Condition((Index(0 if pred else -1),))
    if not isinstance(pred, Condition):
        raise errors.unsupported_mask_expression()
    return language.affine_select(pred, tile, on_false_value, dtype=dtype, mask=mask, api="affine_select")


def select_reduce(
    *,
    dst: Any,
    predicate: Any,
    on_true: Any,
    on_false: Any,
    reduce_res: Any = None,
    reduce_cmd: Any = "idle",
    reduce_op: Any = "maximum",
    reverse_pred: bool = False,
    mask: Any = None,
    dtype: Any = None,
) -> None:
    """Selects by a predicate, with an optional reduction along the free axes."""
    api = "select_reduce"
    target, condition = require_tile(dst, "dst", api), require_tile(predicate, "predicate", api)
    if dtypes.is_float(condition.buffer.dtype):
        raise errors.operand_dtype("predicate", api, condition.buffer.dtype, ("uint8", "uint16", "uint32"))
    tile = require_tile(on_true, "on_true", api)
    if tile.space is Space.PSUM and condition.space is Space.PSUM:
        raise errors.compile_error(f"'on_true' and 'predicate' of '{api}' cannot both be in address space 'psum'")
    other: Any = lowering.number(on_false)
    if other is None:
        other = lowering.partition_vector(on_false, tile, "on_false", api).broadcast_view(tile.shape)
    sources: dict[str, Any] = {"predicate": condition, "on_true": tile, "on_false": other}
    if reverse_pred:
        sources["on_true"], sources["on_false"] = other, tile
    current().emit(Opcode.SELECT, Engine.VECTOR, [target], sources, {}, lowering.mask_for(mask, target.shape))
    target.buffer.producer = None
    if reduce_res is not None:
        operation = operators.require_op(reduce_op, operators.REDUCE_OPS, api)
        axes = tuple(range(1, target.ndim))
        reduced = lowering.reduce(operation, target, axes, api=api, mask=mask)
        lowering.assign(_reduce_destination(reduce_res, tile, api), reduced)


_COMPARISONS = frozenset(("equal", "less", "less_equal", "greater", "greater_equal"))


def range_select(
    *,
    on_true_tile: Any,
    comp_op0: Any,
    comp_op1: Any,
    bound0: Any,
    bound1: Any,
    reduce_cmd: Any = "reset_reduce",
    reduce_res: Any = None,
    reduce_op: Any = "maximum",
    range_start: Any = 0,
    on_false_value: Any = language.fp32.min,
    mask: Any = None,
    dtype: Any = None,
) -> Tensor:
    """Selects the elements whose position lies between two bounds per partition; NC-v3 and newer."""
    api = "range_select"
    if current().target == "trn1":
        raise errors.minimum_target(api, "NeuronCore-v3")
    tile = require_tile(on_true_tile, "on_true_tile", api)
    start = lowering.number(range_start)
    fill = lowering.number(on_false_value)
    if start is None or fill is None:
        raise errors.compile_error(f"range_start and on_false_value of '{api}' must be numbers")
    element, explicit = lowering.result_dtype(dtype, tile.buffer.dtype, api)
    out = lowering.new_tile(tile.shape, element)
    outputs = [out]
    attributes: dict[str, Any] = {
        "comp_op0": operators.require_op(comp_op0, _COMPARISONS, api),
        "comp_op1": operators.require_op(comp_op1, _COMPARISONS, api),
        "range_start": start,
        "on_false_value": fill,
    }
    if reduce_res is not None:
        outputs.append(_reduce_destination(reduce_res, tile, api))
        attributes["reduce_op"] = operators.require_op(reduce_op, operators.REDUCE_OPS, api)
    record = current().emit(
        Opcode.RANGE_SELECT,
        Engine.VECTOR,
        outputs,
        {
            "on_true": tile,
            "bound0": lowering.partition_vector(bound0, tile, "bound0", api),
            "bound1": lowering.partition_vector(bound1, tile, "bound1", api),
        },
        attributes,
        lowering.mask_for(mask, tile.shape),
    )
    return lowering.fresh(out, record, explicit)


def bn_stats(data: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Count, mean and variance of even and odd elements: six values per partition."""
    tile = require_tile(data, "data", "bn_stats")
    if prod(tile.shape[1:]) > 512:
        raise errors.dimension_exceeds_limit(1, "data", tile.shape, "bn_stats", 512)
    return _per_partition(Opcode.BN_STATS, Engine.VECTOR, tile, (tile.shape[0], 6), dtype, mask, "bn_stats")


def bn_aggr(data: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Mean and variance from the results of :func:`bn_stats`."""
    tile = require_tile(data, "data", "bn_aggr")
    if prod(tile.shape[1:]) % 3:
        raise errors.compile_error(
            f"'data{errors.shape_text(tile.shape)}' of 'bn_aggr' must hold a multiple of 3 elements per partition"
        )
    return _per_partition(Opcode.BN_AGGR, Engine.VECTOR, tile, (tile.shape[0], 2), dtype, mask, "bn_aggr")


def _per_partition(
    opcode: Opcode, chosen: Engine, tile: Tensor, shape: tuple[int, ...], dtype: Any, mask: Any, api: str
) -> Tensor:
    """An instruction whose result has another free extent than its input; masks can only select partitions."""
    element, explicit = lowering.result_dtype(dtype, tile.buffer.dtype, api)
    terms = lowering.mask_for(mask, tile.shape)
    if any(any(term.strides[1:]) for term in terms):
        raise errors.unsupported(f"a mask of '{api}' over the free axis")
    kept = [Index(term.constant, term.terms, shape, (term.strides[0],) + (0,) * (len(shape) - 1)) for term in terms]
    out = lowering.new_tile(shape, element)
    record = current().emit(opcode, chosen, [out], {"data": tile}, {}, kept)
    return lowering.fresh(out, record, explicit)


def max8(src: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """The eight largest values of each partition, largest first."""
    tile = require_tile(src, "src", "max8")
    _eight_limits(tile, "src", "max8")
    return _per_partition(Opcode.MAX8, Engine.VECTOR, tile, (tile.shape[0], 8), dtype, mask, "max8")


def _eight_limits(tile: Tensor, name: str, api: str) -> None:
    count = prod(tile.shape[1:])
    if not 8 <= count <= 16_384:
        raise errors.compile_error(
            f"'{name}' of '{api}' has {count} elements per partition, but must be between 8 and 16384"
        )


def _eight_values(vals: Any, data: Tensor, api: str) -> Tensor:
    tile = require_tile(vals, "vals", api)
    if tile.shape[0] != data.shape[0]:
        raise errors.partition_mismatch([("data", data.shape), ("vals", tile.shape)], api)
    if prod(tile.shape[1:]) != 8:
        raise errors.compile_error(
            f"'vals' of '{api}' has {prod(tile.shape[1:])} elements per partition, but must have exactly 8"
        )
    return tile


def nc_find_index8(data: Any = None, vals: Any = None, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Positions of eight values in each partition."""
    api = "nc_find_index8"
    tile = require_tile(data, "data", api)
    _eight_limits(tile, "data", api)
    values = _eight_values(vals, tile, api)
    element, explicit = lowering.result_dtype(dtype, "uint32", api)
    if element not in ("uint16", "uint32"):
        raise errors.dtype_not_supported(element, api, ("uint16", "uint32"))
    out = lowering.new_tile((tile.shape[0], 8), element)
    record = current().emit(Opcode.FIND_INDEX8, Engine.VECTOR, [out], {"data": tile, "vals": values}, {}, ())
    return lowering.fresh(out, record, explicit)


def nc_match_replace8(
    data: Any = None, vals: Any = None, imm: Any = None, *, dst_idx: Any = None, mask: Any = None, dtype: Any = None
) -> Tensor:
    """Replaces the first occurrence of each of eight values by a number."""
    api = "nc_match_replace8"
    tile = require_tile(data, "data", api)
    _eight_limits(tile, "data", api)
    values = _eight_values(vals, tile, api)
    fill = lowering.number(imm)
    if fill is None:
        raise errors.compile_error(f"imm of '{api}' must be a number")
    element, explicit = lowering.result_dtype(dtype, tile.buffer.dtype, api)
    out = lowering.new_tile(tile.shape, element)
    outputs = [out]
    if dst_idx is not None:
        outputs.append(_eight_values(dst_idx, tile, api))
    record = current().emit(
        Opcode.MATCH_REPLACE8, Engine.VECTOR, outputs, {"data": tile, "vals": values}, {"imm": fill},
        lowering.mask_for(mask, tile.shape),
    )
    return lowering.fresh(out, record, explicit)


def nc_stream_shuffle(src: Any, dst: Any, shuffle_mask: Any, *, dtype: Any = None, mask: Any = None) -> None:
    """Moves partitions within groups of 32; an entry of 255 leaves the destination partition as it is."""
    api = "nc_stream_shuffle"
    tile, target = require_tile(src, "src", api), require_tile(dst, "dst", api)
    order = tuple(int(entry) for entry in shuffle_mask)
    if len(order) != 32 or any(entry not in range(32) and entry != 255 for entry in order):
        raise errors.compile_error(f"shuffle_mask of '{api}' must have 32 entries, each below 32 or 255")
    if tile.shape != target.shape:
        raise errors.shapes_mismatch([("src", tile.shape), ("dst", target.shape)], api)
    current().emit(
        Opcode.STREAM_SHUFFLE, Engine.VECTOR, [target], {"src": tile}, {"shuffle_mask": order},
        lowering.mask_for(mask, target.shape),
    )
    target.buffer.producer = None


def local_gather(
    src_buffer: Any, index: Any, num_elem_per_idx: Any = 1, num_valid_indices: Any = None, *, mask: Any = None
) -> Tensor:
    """Gathers elements of each partition group by indices held in its 16 partitions."""
    api = "local_gather"
    tile, indices = require_tile(src_buffer, "src_buffer", api), require_tile(index, "index", api)
    for name, operand in (("src_buffer", tile), ("index", indices)):
        if operand.space is not Space.SBUF:
            raise errors.unsupported_memory(name, api, "sbuf", operand.space.value)
    if indices.buffer.dtype != "uint16":
        raise errors.operand_dtype("index", api, indices.buffer.dtype, ("uint16",))
    if tile.shape[0] % 16 or tile.shape[0] != indices.shape[0]:
        raise errors.partition_mismatch([("src_buffer", tile.shape), ("index", indices.shape)], api)
    per_index = lowering.number(num_elem_per_idx)
    available = prod(indices.shape[1:]) * 16
    valid = available if num_valid_indices is None else lowering.number(num_valid_indices)
    if per_index not in (1, 2, 4, 8, 16, 32) or valid is None or not 0 < valid <= available:
        raise errors.compile_error(
            f"num_elem_per_idx of '{api}' must be one of 1, 2, 4, 8, 16, 32 and num_valid_indices at most {available}"
        )
    shape = (tile.shape[0], int(valid)) if per_index == 1 else (tile.shape[0], int(valid), int(per_index))
    out = lowering.new_tile(shape, tile.buffer.dtype)
    record = current().emit(
        Opcode.LOCAL_GATHER,
        Engine.GPSIMD,
        [out],
        {"src": tile, "index": indices},
        {"num_elem_per_idx": int(per_index), "num_valid_indices": int(valid)},
        lowering.mask_for(mask, shape),
    )
    return lowering.fresh(out, record)


def dropout(data: Any, prob: Any, *, mask: Any = None, dtype: Any = None) -> Tensor:
    """Sets random elements to zero."""
    return language.dropout(data, prob, dtype=dtype, mask=mask)


def dma_copy(
    *,
    dst: Any,
    src: Any,
    mask: Any = None,
    dst_rmw_op: Any = None,
    oob_mode: Any = "error",
    dge_mode: Any = "unknown",
) -> None:
    """Copies between HBM and SBUF, either way."""
    api = "dma_copy"
    for name, value in (("dst", dst), ("src", src)):
        if not isinstance(value, Tensor):
            raise errors.unexpected_operand(name, api, value)
    target, source = dst, src
    for name, tensor in (("dst", target), ("src", source)):
        if tensor.space is Space.PSUM and name == "dst":
            raise errors.unsupported_memory(name, api, "sbuf|hbm", "psum")
        if tensor.space is not Space.HBM:
            require_tile(tensor, name, api)
    if target.buffer.role is Role.CONSTANT or (target.buffer.role is Role.INPUT and not target.buffer.mutable):
        raise errors.immutable_parameter(target.name)
    if target.shape != source.shape:
        if target.size != source.size:
            raise errors.compile_error(
                f"src and dst must have the same shape, src.shape={errors.shape_text(source.shape)} "
                f"dst.shape={errors.shape_text(target.shape)}"
            )
        source = source.reshape(target.shape)
    if target.ndim == 0:
        raise errors.compile_error(f"'dst' of '{api}' must have at least one dimension")
    attributes = {} if dst_rmw_op is None else {"rmw_op": operators.require_op(dst_rmw_op, operators.REDUCE_OPS, api)}
    if dst_rmw_op is None:
        current().check_output_dependencies(target)
    current().emit(
        Opcode.DMA_COPY, Engine.DMA, [target], {"src": source}, attributes, lowering.mask_for(mask, target.shape)
    )
    target.buffer.producer = None


def dma_transpose(src: Any, *, axes: Any = None, mask: Any = None, dtype: Any = None) -> Tensor:
    """Loads a 2-D tile of HBM with its axes exchanged."""
    if axes is not None and tuple(axes) != (1, 0):
        raise errors.unsupported(f"nisa.dma_transpose with axes {tuple(axes)}")
    return load_transpose2d(src, mask=mask, dtype=dtype)
