"""From API calls to instructions: what several ``nl`` and ``nisa`` functions share.

Shapes are tile shapes, axis 0 being the partition axis. Every function checks its operands in the compiler's wording
and returns the tile that holds the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Union

from accelopt_ray.nki_sim import dtypes, errors, operators
from accelopt_ray.nki_sim.builder import current
from accelopt_ray.nki_sim.masks import resolve_mask
from accelopt_ray.nki_sim.program import Engine, Opcode, Space
from accelopt_ray.nki_sim.symbolic import Index, as_int, broadcast_shapes
from accelopt_ray.nki_sim.tile import Tensor, require_tile, whole
from accelopt_ray.nki_sim.trace_records import Record

Number = Union[float, int]


def number(value: Any) -> Number | None:
    """A Python number for anything that stands for one, None for a tile or something else."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Index):
        return value.value()
    if operators.is_numpy_scalar(value):
        item = value.item()
        if isinstance(item, (bool, int, float)):
            return int(item) if isinstance(item, bool) else item
        return float(value)
    return None


def result_dtype(dtype: Any, default: str, api: str) -> tuple[str, bool]:
    """The dtype of a result and whether the call asked for it."""
    if dtype is None:
        return default, False
    name = dtypes.canonical(dtype)
    if name is None:
        raise errors.dtype_not_supported(dtype, api, dtypes.NAMES)
    return name, True


def mask_for(mask: Any, shape: tuple[int, ...]) -> list[Index]:
    """The terms of a mask over the axes of a tile of ``shape``."""
    terms = []
    for term in resolve_mask(mask):
        joined = broadcast_shapes(term.shape, shape)
        if joined != shape:
            raise errors.shapes_not_broadcastable([("mask", term.shape), ("tile", shape)], "mask")
        terms.append(term.expand(shape))
    return terms


def new_tile(
    shape: Sequence[int], dtype: str, space: Space = Space.SBUF, name: str = "", outside: Sequence[Any] = ()
) -> Tensor:
    """A fresh temporary tile on chip."""
    size = tuple(int(extent) for extent in shape)
    if size[0] > 128:
        raise errors.partitions_exceed_limit(size[0])
    return whole(current().new_buffer(space, size, dtype, name=name, outside=outside))


def fresh(tile: Tensor, record: Record, explicit_dtype: bool = False) -> Tensor:
    """Marks ``tile`` as the unnamed result of ``record``."""
    record.explicit_dtype = explicit_dtype
    tile.buffer.producer = record
    return tile


# Elementwise operations.


def binary(
    op: str,
    x: Any,
    y: Any,
    *,
    api: str,
    dtype: Any = None,
    mask: Any = None,
    engine: Engine = Engine.ANY,
    broadcast_partitions: bool = True,
    names: tuple[str, str] = ("x", "y"),
) -> Tensor:
    """``op`` of two operands, each a tile or a number; lowers to tensor_tensor or tensor_scalar.

    Args:
        op: Canonical operation name.
        x: Left operand.
        y: Right operand.
        api: Name for messages.
        dtype: Result dtype, or None for the promoted one.
        mask: Condition over the result.
        engine: What the source asks for.
        broadcast_partitions: Whether one partition may be spread over many, at the cost of an instruction.
        names: Parameter names for messages.
    """
    left, right = number(x), number(y)
    if left is not None and right is not None:
        raise errors.unexpected_operand(names[0], api, x)
    if left is not None or right is not None:
        tile = require_tile(y if left is not None else x, names[1] if left is not None else names[0], api)
        scalar = left if left is not None else right
        assert scalar is not None
        default = "uint8" if op in operators.COMPARISON_OPS else dtypes.promote_scalar(tile.buffer.dtype, scalar)
        return tensor_scalar(
            tile, [(op, scalar, left is not None)], api=api, dtype=dtype, default=default, mask=mask, engine=engine
        )
    a, b = require_tile(x, names[0], api), require_tile(y, names[1], api)
    if a.shape[0] != b.shape[0]:
        if not broadcast_partitions or 1 not in (a.shape[0], b.shape[0]):
            raise errors.partition_mismatch([(names[0], a.shape), (names[1], b.shape)], api)
        partitions = max(a.shape[0], b.shape[0])
        a, b = spread_partitions(a, partitions), spread_partitions(b, partitions)
    promoted = dtypes.promote(a.buffer.dtype, b.buffer.dtype)
    default = "uint8" if op in operators.COMPARISON_OPS else promoted
    for data, vector, reverse in ((a, b, False), (b, a, True)):
        if prod(vector.shape[1:]) == 1 and prod(data.shape[1:]) > 1:
            column = vector.reshape((vector.shape[0], 1))
            return tensor_scalar(
                data, [(op, column, reverse)], api=api, dtype=dtype, default=default, mask=mask, engine=engine
            )
    shape = broadcast_shapes(a.shape, b.shape)
    if shape is None:
        raise errors.shapes_not_broadcastable([(names[0], a.shape), (names[1], b.shape)], api)
    return tensor_tensor(op, a, b, api=api, dtype=dtype, default=default, mask=mask, engine=engine)


def tensor_tensor(
    op: str, a: Tensor, b: Tensor, *, api: str, dtype: Any, default: str, mask: Any, engine: Engine
) -> Tensor:
    """One instruction over two tiles of one shape, or of shapes that broadcast along free axes."""
    if a.space is Space.PSUM and b.space is Space.PSUM and api == "tensor_tensor":
        raise errors.compile_error(f"'data1' and 'data2' of '{api}' cannot both be in address space 'psum'")
    if a.space is Space.PSUM and b.space is Space.PSUM:  # the compiler moves one of them
        b = copy(b, api=api)
    shape = broadcast_shapes(a.shape, b.shape)
    if shape is None:
        raise errors.shapes_not_broadcastable([("data1", a.shape), ("data2", b.shape)], api)
    _require_integers(op, [a, b], api)
    name, explicit = result_dtype(dtype, default, api)
    out = new_tile(shape, name)
    record = current().emit(
        Opcode.TENSOR_TENSOR,
        engine,
        [out],
        {"a": _pad(a, shape), "b": _pad(b, shape)},
        {"op": op},
        mask_for(mask, shape),
    )
    return fresh(out, record, explicit)


def _pad(tile: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tile.ndim < len(shape):
        tile = tile.reshape((tile.shape[0],) + (1,) * (len(shape) - tile.ndim) + tile.shape[1:])
    return tile.broadcast_view(shape)


def tensor_scalar(
    data: Tensor,
    steps: Sequence[tuple[str, Any, bool]],
    *,
    api: str,
    dtype: Any,
    default: str,
    mask: Any,
    engine: Engine,
) -> Tensor:
    """One or two operations, each with a number or a vector of one value per partition."""
    name, explicit = result_dtype(dtype, default, api)
    operands: dict[str, Union[Tensor, Number]] = {"data": data}
    attributes: dict[str, Any] = {}
    for position, (op, operand, reverse) in enumerate(steps):
        _require_integers(op, [data], api)
        operands[f"operand{position}"] = operand
        attributes[f"op{position}"] = op
        attributes[f"reverse{position}"] = bool(reverse)
    out = new_tile(data.shape, name)
    record = current().emit(Opcode.TENSOR_SCALAR, engine, [out], operands, attributes, mask_for(mask, data.shape))
    return fresh(out, record, explicit)


def _require_integers(op: str, tiles: Sequence[Tensor], api: str) -> None:
    if op in operators.BITVECTOR_OPS or op == "invert":
        for tile in tiles:
            if dtypes.is_float(tile.buffer.dtype):
                raise errors.compile_error(f"bitvec op operand of '{api}' dtype '{tile.buffer.dtype}' must be integer")


def partition_vector(value: Any, data: Tensor, name: str, api: str) -> Tensor:
    """Checks a vector operand: one value for each partition of ``data``."""
    vector = require_tile(value, name, api)
    if vector.shape[0] != data.shape[0]:
        raise errors.partition_mismatch([("data", data.shape), (name, vector.shape)], api)
    if prod(vector.shape[1:]) != 1:
        raise errors.compile_error(
            f"'{name}' of '{api}' must be a scalar or a vector of shape [{data.shape[0]}, 1], got "
            f"{errors.shape_text(vector.shape)}"
        )
    return vector if vector.ndim == 2 else vector.reshape((vector.shape[0], 1))


def unary(op: str, x: Any, *, api: str, dtype: Any = None, mask: Any = None) -> Tensor:
    """A function of one tile: an activation, or what the vector engine offers for it."""
    tile = require_tile(x, "x", api)
    if op == "reciprocal":
        return reciprocal(tile, api=api, dtype=dtype, mask=mask, name="x")
    scalar = {"negative": ("multiply", -1.0), "logical_not": ("equal", 0), "invert": ("invert", 0)}.get(op)
    if scalar is not None:
        default = "uint8" if op == "logical_not" else tile.buffer.dtype
        return tensor_scalar(
            tile, [(scalar[0], scalar[1], False)], api=api, dtype=dtype, default=default, mask=mask, engine=Engine.ANY
        )
    if current().allocated_kernel:
        raise errors.bias_required_in_allocated_kernel()
    default = tile.buffer.dtype
    return activation(op, tile, api=api, dtype=dtype, default=default, mask=mask)


def activation(
    op: str,
    data: Tensor,
    *,
    api: str,
    dtype: Any,
    default: str,
    mask: Any,
    scale: Union[Tensor, Number] = 1.0,
    bias: Tensor | None = None,
    reduction: tuple[str, Tensor] | None = None,
    attributes: dict[str, Any] | None = None,
) -> Tensor:
    """``op(data * scale + bias)`` on the scalar engine, with an optional reduction over the free axes."""
    name, explicit = result_dtype(dtype, default, api)
    operands: dict[str, Union[Tensor, Number]] = {"data": data, "scale": scale}
    if bias is not None:
        operands["bias"] = bias
    out = new_tile(data.shape, name)
    outputs = [out]
    details: dict[str, Any] = {"op": op, **(attributes or {})}
    if reduction is not None:
        details["reduce_op"] = reduction[0]
        outputs.append(reduction[1])
        current().check_output_dependencies(reduction[1])
        reduction[1].buffer.producer = None
    record = current().emit(Opcode.ACTIVATION, Engine.SCALAR, outputs, operands, details, mask_for(mask, data.shape))
    return fresh(out, record, explicit)


def reciprocal(tile: Tensor, *, api: str, dtype: Any, mask: Any, name: str = "data") -> Tensor:
    """1 / data on the vector engine."""
    result, explicit = result_dtype(dtype, tile.buffer.dtype, api)
    out = new_tile(tile.shape, result)
    record = current().emit(Opcode.RECIPROCAL, Engine.VECTOR, [out], {"data": tile}, {}, mask_for(mask, tile.shape))
    return fresh(out, record, explicit)


def copy(
    tile: Tensor,
    *,
    api: str,
    dtype: Any = None,
    mask: Any = None,
    engine: Engine = Engine.ANY,
    space: Space = Space.SBUF,
) -> Tensor:
    """A copy on chip, cast to ``dtype``."""
    result, explicit = result_dtype(dtype, tile.buffer.dtype, api)
    out = new_tile(tile.shape, result)
    record = current().emit(Opcode.COPY, engine, [out], {"src": tile}, {}, mask_for(mask, tile.shape))
    return fresh(out, record, explicit)


def cast(tensor: Tensor, dtype: Any) -> Tensor:
    """``tensor.astype(dtype)``; nothing to do when it has that type already."""
    name, _ = result_dtype(dtype, tensor.buffer.dtype, "astype")
    if name == tensor.buffer.dtype:
        return tensor
    return copy(require_tile(tensor, "x", "astype"), api="astype", dtype=name)


# Reductions.


def normalise_axes(axis: Any, rank: int, api: str) -> tuple[int, ...]:
    """The free axes a reduction runs over, sorted."""
    given = axis if isinstance(axis, (list, tuple)) else (axis,)
    axes = []
    for entry in given:
        position = as_int(entry)
        if position < 0:
            position += rank
        if not 0 < position < rank:
            raise errors.compile_error(
                f"axis {entry} of '{api}' must be a free dimension of a tile with {rank} dimensions; the partition "
                "dimension (axis 0) cannot be reduced"
            )
        axes.append(position)
    if len(set(axes)) != len(axes) or not axes:
        raise errors.compile_error(f"axis {given} of '{api}' must name different free dimensions")
    return tuple(sorted(axes))


def reduce(
    op: str,
    data: Tensor,
    axes: tuple[int, ...],
    *,
    api: str,
    dtype: Any = None,
    mask: Any = None,
    negate: bool = False,
    keepdims: bool = False,
    default: str | None = None,
) -> Tensor:
    """Reduces free axes; mask terms over them select the elements that take part (attribute ``input_mask``)."""
    if op in operators.BITVECTOR_OPS:
        _require_integers(op, [data], api)
        if negate:
            raise errors.compile_error(f"negate option can only be used with arithmetic ops, unsupported op={op}")
    name, explicit = result_dtype(dtype, default or data.buffer.dtype, api)
    kept = [axis for axis in range(data.ndim) if axis not in axes]
    shape: tuple[int, ...]
    if keepdims:
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(data.shape))
    else:
        shape = tuple(data.shape[axis] for axis in kept)
        if len(shape) == 1:
            shape = (*shape, 1)
    attributes: dict[str, Any] = {"op": op, "axes": tuple(axes), "negate": bool(negate), "keepdims": bool(keepdims)}
    output_mask: list[Index] = []
    input_mask: list[Index] = []
    for term in mask_for(mask, data.shape):
        if any(term.strides[axis] or axis in term.tables for axis in axes):
            refuse_mixed_condition(term, api)
            input_mask.append(term)
            continue
        strides = [0] * len(shape)
        tables = {}
        for position, axis in enumerate(range(data.ndim) if keepdims else kept):
            strides[position] = term.strides[axis]
            if axis in term.tables:
                tables[position] = term.tables[axis]
        output_mask.append(Index(term.constant, term.terms, shape, tuple(strides), tables))
    if input_mask:
        attributes["input_mask"] = tuple(input_mask)
    out = new_tile(shape, name)
    record = current().emit(Opcode.TENSOR_REDUCE, Engine.VECTOR, [out], {"data": data}, attributes, output_mask)
    return fresh(out, record, explicit)


def refuse_mixed_condition(term: Index, api: str) -> None:
    """Refuses a condition on what a reduction takes part in that compares axes: the executor knows boxes only."""
    moving = [axis for axis, size in enumerate(term.shape) if size > 1 and (term.strides[axis] or axis in term.tables)]
    if len(moving) > 1:
        raise errors.unsupported(f"a mask of '{api}' over several axes in one condition")


# Broadcasts.


def spread_partitions(tile: Tensor, partitions: int) -> Tensor:
    """Repeats a tile of one partition over ``partitions`` partitions."""
    if tile.shape[0] == partitions:
        return tile
    if tile.shape[0] != 1:
        raise errors.compile_error(
            f"cannot broadcast `{tile.name}{errors.shape_text(tile.shape)}` to {partitions} partitions"
        )
    out = new_tile((partitions, *tile.shape[1:]), tile.buffer.dtype)
    record = current().emit(Opcode.PARTITION_BROADCAST, Engine.TENSOR, [out], {"src": tile}, {})
    return fresh(out, record)


def broadcast_to(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``tensor.broadcast_to(shape)``: a view, except over the partitions of a tile."""
    if broadcast_shapes(tensor.shape, shape) != shape:
        raise errors.compile_error(
            f"cannot broadcast `{tensor.name}{errors.shape_text(tensor.shape)}` to shape {errors.shape_text(shape)}"
        )
    if tensor.space is Space.HBM:
        return tensor.broadcast_view(shape)
    tile = require_tile(tensor, "x", "broadcast_to")
    if tile.ndim < len(shape):
        tile = tile.reshape((tile.shape[0],) + (1,) * (len(shape) - tile.ndim) + tile.shape[1:])
    return spread_partitions(tile, shape[0]).broadcast_view(shape)


# Assignment.


def operator_call(op: str, tensor: Tensor, other: Any, *, reverse: bool) -> Any:
    """An arithmetic operator on tiles; partitions must match."""
    if number(other) is None and not isinstance(other, Tensor):
        return NotImplemented
    left, right = (other, tensor) if reverse else (tensor, other)
    return binary(op, left, right, api=op, broadcast_partitions=False)


# Matrix products.
