"""Assignments to tiles: naming a fresh result's destination, copies, accumulation, reductions over loops."""

from __future__ import annotations

from math import prod
from typing import Any

from accelopt_ray.nki_sim import errors, operators
from accelopt_ray.nki_sim.builder import current
from accelopt_ray.nki_sim.loop_variables import LoopVariable, OnlyIndex
from accelopt_ray.nki_sim.lowering import binary, broadcast_to, fresh, mask_for, new_tile, number, result_dtype
from accelopt_ray.nki_sim.program import Engine, Opcode, Space
from accelopt_ray.nki_sim.symbolic import Index, as_index, broadcast_shapes
from accelopt_ray.nki_sim.tile import Tensor, require_tile
from accelopt_ray.nki_sim.trace_records import Record


def assign(destination: Tensor, value: Any) -> None:
    """``destination[...] = value``: names a fresh result's destination, copies a named tile, fills with a number."""
    if destination.space is Space.HBM:
        raise errors.unsupported_memory("dst", "assign", "psum|sbuf", "hbm")
    require_tile(destination, "dst", "assign")
    builder = current()
    if isinstance(value, Tensor):
        if destination.same_place(value):
            return
        if value.space is Space.HBM:
            raise errors.unsupported_memory("src", "assign", "psum|sbuf", "hbm")
        if value.indirect:
            raise errors.copy_of_indirect_access(destination.name)
        check_destination(destination, value)
        target = match_destination(destination, value)
        if builder.can_name(value, target):
            record = builder.rename(value, target)
            _check_dependencies(record, target)
            return
        record = builder.emit(Opcode.COPY, Engine.ANY, [destination], {"src": fit(value, destination.shape)}, {})
        destination.buffer.producer = None
        _check_dependencies(record, destination)
        return
    if isinstance(value, Index) and (value.varies or value.terms):
        shape = broadcast_shapes(value.shape, destination.shape)
        if shape != destination.shape:
            raise errors.destination_too_small(destination.shape, value.shape)
        record = builder.emit(
            Opcode.IOTA, Engine.GPSIMD, [destination], {}, iota_attributes(value.expand(destination.shape))
        )
    else:
        fill = number(value)
        if fill is None:
            raise errors.compile_error(
                f"cannot assign a value of type {type(value).__name__} to tensor `{destination.name}`"
            )
        record = builder.emit(Opcode.MEMSET, Engine.ANY, [destination], {}, {"value": fill})
    destination.buffer.producer = None
    _check_dependencies(record, destination)


def iota_attributes(expression: Index) -> dict[str, Any]:
    """Attributes of an IOTA instruction: ``start`` and one stride per axis."""
    if expression.tables:
        raise errors.unsupported("iota of an index that is not affine")
    return {"start": Index(expression.constant, expression.terms), "strides": tuple(expression.strides)}


def check_destination(destination: Tensor, value: Tensor, expression: str = "a = b") -> None:
    """Checks that ``value`` fits into ``destination``, repeated where its axes have extent 1."""
    if destination.shape == value.shape:
        return
    if destination.size == value.size and destination.shape[0] == value.shape[0]:
        return
    if broadcast_shapes(value.shape, destination.shape) != destination.shape:
        raise errors.destination_too_small(destination.shape, value.shape, expression)


def match_destination(destination: Tensor, value: Tensor) -> Tensor:
    """The destination in the value's shape, when both have the same elements per partition."""
    if destination.shape != value.shape and destination.size == value.size:
        try:
            return destination.reshape(value.shape)
        except errors.KernelError:
            return destination
    return destination


def fit(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The value in the destination's shape."""
    if value.shape == shape:
        return value
    if value.size == prod(shape) and value.shape[0] == shape[0]:
        return value.reshape(shape)
    return broadcast_to(value, shape)


def _check_dependencies(record: Record, destination: Tensor) -> None:
    if record.accumulate or record.opcode is Opcode.LOOP_REDUCE:
        return
    op = record.attributes.get("op", record.attributes.get("op0"))
    if op in operators.ASSOCIATIVE_OPS and any(
        isinstance(operand, Tensor) and destination.same_place(operand) for operand in record.operands.values()
    ):
        return
    current().check_output_dependencies(destination)


def in_place(op: str, destination: Tensor, other: Any) -> Tensor:
    """``destination op= other``: accumulation in PSUM for a fresh matmul, a vector instruction otherwise."""
    if destination.space is Space.HBM:
        raise errors.unsupported_memory("x", op, "psum|sbuf", "hbm")
    builder = current()
    if number(other) is None and not isinstance(other, Tensor):
        return NotImplemented  # type: ignore[no-any-return]
    if isinstance(other, Tensor) and op == "add" and destination.space is Space.PSUM:
        record = other.buffer.producer
        if (
            record is not None
            and record.opcode is Opcode.MATMUL
            and builder.can_name(other, target := match_destination(destination, other))
        ):
            builder.rename(other, target)
            record.accumulate = True
            return destination
    result = binary(op, destination, other, api=op)
    if result.shape != destination.shape:
        raise errors.destination_too_small(destination.shape, result.shape)
    record = result.buffer.producer
    if record is not None and builder.can_name(result, destination):
        builder.rename(result, destination)
    else:
        builder.emit(Opcode.COPY, Engine.ANY, [destination], {"src": result}, {})
    destination.buffer.producer = None
    return destination


def _loop_of(entry: Any) -> LoopVariable:
    """The loop that an index belongs to."""
    index = as_index(entry)
    if isinstance(entry, OnlyIndex):
        loop = entry.loop
    elif index is not None and len(index.terms) == 1:
        loop = next(iter(index.terms))
    elif index is not None and index.is_constant:
        raise errors.unsupported("nl.loop_reduce over an unrolled loop")
    else:
        raise errors.compile_error("loop_indices of 'loop_reduce' must be indices of enclosing loops")
    if not loop.open:
        raise errors.local_variable_out_of_scope(loop.name)
    return loop


def loop_reduce(x: Any, op: str, loop_indices: Any, *, dtype: Any, mask: Any) -> Tensor:
    """Combines ``x`` over iterations of the listed loops in the destination."""
    tile = require_tile(x, "x", "loop_reduce")
    builder = current()
    given = loop_indices if isinstance(loop_indices, (list, tuple)) else [loop_indices]
    loops = [_loop_of(entry) for entry in given]
    name, explicit = result_dtype(dtype, tile.buffer.dtype, "loop_reduce")
    out = new_tile(tile.shape, name, outside=loops)
    record = builder.emit(
        Opcode.LOOP_REDUCE,
        Engine.VECTOR,
        [out],
        {"data": tile},
        {"op": op, "loops": tuple(loop.id for loop in loops)},
        mask_for(mask, tile.shape),
    )
    return fresh(out, record, explicit)
