"""``neuronxcc.nki.isa``, second part: selection, statistics, gathering, shuffling, copies between memories."""

from __future__ import annotations

from math import prod
from typing import Any

from accelopt_ray.nki_sim import assignment, dtypes, errors, lowering, mathematics, operators
from accelopt_ray.nki_sim.builder import current
from accelopt_ray.nki_sim.isa import reduce_destination
from accelopt_ray.nki_sim.language import load_transpose2d
from accelopt_ray.nki_sim.program import Engine, Opcode, Role, Space
from accelopt_ray.nki_sim.spaces import fp32
from accelopt_ray.nki_sim.symbolic import Condition, Index
from accelopt_ray.nki_sim.tile import Tensor, require_tile


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


def affine_select(
    pred: Any,
    on_true_tile: Any,
    on_false_value: Any,
    *,
    mask: Any = None,
    dtype: Any = None,
) -> Tensor:
    """The tile where an affine condition over its axes holds, else a number."""
    tile = require_tile(on_true_tile, "on_true_tile", "affine_select")
    if isinstance(pred, bool):
        pred = Condition((Index(0 if pred else -1),))
    if not isinstance(pred, Condition):
        raise errors.unsupported_mask_expression()
    return mathematics.affine_select_tile(pred, tile, on_false_value, dtype=dtype, mask=mask, api="affine_select")


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
        assignment.assign(reduce_destination(reduce_res, tile, api), reduced)


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
    on_false_value: Any = fp32.min,
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
        outputs.append(reduce_destination(reduce_res, tile, api))
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
        Opcode.MATCH_REPLACE8,
        Engine.VECTOR,
        outputs,
        {"data": tile, "vals": values},
        {"imm": fill},
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
        Opcode.STREAM_SHUFFLE,
        Engine.VECTOR,
        [target],
        {"src": tile},
        {"shuffle_mask": order},
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
    return mathematics.dropout(data, prob, dtype=dtype, mask=mask)


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
