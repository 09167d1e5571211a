"""The mathematics of ``neuronxcc.nki.language``: functions of tiles, reductions, selections, normalisations."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from accelopt_ray.nki_sim import assignment, dtypes, errors, lowering, operators
from accelopt_ray.nki_sim import symbolic as sym
from accelopt_ray.nki_sim.builder import current
from accelopt_ray.nki_sim.program import Engine, Opcode, Space
from accelopt_ray.nki_sim.symbolic import Condition, Index, as_int
from accelopt_ray.nki_sim.tile import Tensor, require_tile


def _unary(name: str, op: str) -> Callable[..., Tensor]:
    def function(x: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
        return lowering.unary(op, x, api=name, dtype=dtype, mask=mask)

    return _named(function, name, op)


def _binary(name: str, op: str) -> Callable[..., Tensor]:
    def function(x: Any, y: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
        return lowering.binary(op, x, y, api=name, dtype=dtype, mask=mask)

    return _named(function, name, op)


def _reduction(name: str, op: str) -> Callable[..., Tensor]:
    def function(x: Any, axis: Any, *, dtype: Any = None, mask: Any = None, keepdims: bool = False) -> Tensor:
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
    "abs": "abs",
    "arctan": "arctan",
    "ceil": "ceil",
    "cos": "cos",
    "erf": "erf",
    "erf_dx": "erf_dx",
    "exp": "exp",
    "floor": "floor",
    "gelu": "gelu",
    "gelu_apprx_sigmoid": "gelu_apprx_sigmoid",
    "gelu_apprx_tanh": "gelu_apprx_tanh",
    "gelu_dx": "gelu_dx",
    "invert": "invert",
    "log": "log",
    "logical_not": "logical_not",
    "mish": "mish",
    "negative": "negative",
    "reciprocal": "reciprocal",
    "relu": "relu",
    "rsqrt": "rsqrt",
    "sigmoid": "sigmoid",
    "sign": "sign",
    "silu": "silu",
    "silu_dx": "silu_dx",
    "sin": "sin",
    "softplus": "softplus",
    "sqrt": "sqrt",
    "square": "square",
    "tan": "tan",
    "tanh": "tanh",
    "trunc": "trunc",
}


_BINARY = {
    "add": "add",
    "subtract": "subtract",
    "multiply": "multiply",
    "divide": "divide",
    "maximum": "maximum",
    "minimum": "minimum",
    "power": "power",
    "mod": "mod",
    "fmod": "mod",
    "equal": "equal",
    "not_equal": "not_equal",
    "less": "less",
    "less_equal": "less_equal",
    "greater": "greater",
    "greater_equal": "greater_equal",
    "logical_and": "logical_and",
    "logical_or": "logical_or",
    "logical_xor": "logical_xor",
    "bitwise_and": "bitwise_and",
    "bitwise_or": "bitwise_or",
    "bitwise_xor": "bitwise_xor",
    "left_shift": "left_shift",
    "right_shift": "right_shift",
    "arctan2": "arctan2",
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
        total,
        [("multiply", 1.0 / count, False)],
        api="mean",
        dtype=dtype,
        default=tile.buffer.dtype,
        mask=None,
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
    return lowering.binary("multiply", powers, inverse, api="softmax", dtype=dtype or tile.buffer.dtype, mask=mask)


def rms_norm(
    x: Any,
    w: Any,
    axis: Any,
    n: Any,
    epsilon: float = 1e-6,
    *,
    dtype: Any = None,
    compute_dtype: Any = None,
    mask: Any = None,
) -> Tensor:
    """``x * rsqrt(mean(x**2) + epsilon) * w`` over a free axis."""
    tile = require_tile(x, "x", "rms_norm")
    axes = lowering.normalise_axes(axis, tile.ndim, "rms_norm")
    squares = lowering.unary("square", tile, api="rms_norm", dtype=compute_dtype or "float32", mask=mask)
    total = lowering.reduce("add", squares, axes, api="rms_norm", mask=mask, keepdims=True)
    scaled = lowering.tensor_scalar(
        total,
        [("multiply", 1.0 / as_int(n), False), ("add", float(epsilon), False)],
        api="rms_norm",
        dtype=None,
        default="float32",
        mask=None,
        engine=Engine.ANY,
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
        return affine_select_tile(condition, require_tile(x, "x", "where"), fill, dtype=dtype, mask=mask, api="where")
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


def affine_select_tile(
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
    return assignment.loop_reduce(x, name, loop_indices, dtype=dtype, mask=mask)


def dropout(x: Any, rate: Any, *, dtype: Any = None, mask: Any = None) -> Tensor:
    """Sets random elements to zero."""
    tile = require_tile(x, "x", "dropout")
    probability = lowering.number(rate)
    element, explicit = lowering.result_dtype(dtype, tile.buffer.dtype, "dropout")
    out = lowering.new_tile(tile.shape, element)
    operand = lowering.partition_vector(rate, tile, "rate", "dropout") if probability is None else probability
    record = current().emit(
        Opcode.DROPOUT,
        Engine.VECTOR,
        [out],
        {"data": tile, "probability": operand},
        {},
        lowering.mask_for(mask, tile.shape),
    )
    return lowering.fresh(out, record, explicit)
