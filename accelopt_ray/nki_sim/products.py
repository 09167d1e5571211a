"""Matrix products and transposes: operand limits, and masks over the axes of both operands."""

from __future__ import annotations

from math import prod
from typing import Any

from accelopt_ray.nki_sim import errors
from accelopt_ray.nki_sim.builder import current
from accelopt_ray.nki_sim.lowering import fresh, mask_for, new_tile, result_dtype
from accelopt_ray.nki_sim.masks import resolve_mask
from accelopt_ray.nki_sim.program import Engine, Opcode, Space
from accelopt_ray.nki_sim.symbolic import Index
from accelopt_ray.nki_sim.tile import Tensor


def two_dimensional(tile: Tensor, name: str, api: str) -> Tensor:
    """The tile with its free axes merged."""
    if tile.ndim == 2:
        return tile
    try:
        return tile.reshape((tile.shape[0], prod(tile.shape[1:])))
    except errors.KernelError as error:
        raise errors.unsupported(
            f"'{name}{errors.shape_text(tile.shape)}' of '{api}' with free dimensions that do not merge"
        ) from error


def matmul(
    stationary: Tensor, moving: Tensor, *, api: str, mask: Any = None, attributes: dict[str, Any] | None = None
) -> Tensor:
    """``stationary.T @ moving`` into PSUM, operands (K, M) and (K, N)."""
    for tile, name in ((stationary, "stationary"), (moving, "moving")):
        if tile.space is not Space.SBUF:
            raise errors.unsupported_memory(name, api, "sbuf", tile.space.value)
    s, m = two_dimensional(stationary, "stationary", api), two_dimensional(moving, "moving", api)
    if s.shape[0] != m.shape[0]:
        raise errors.partition_mismatch([("stationary", s.shape), ("moving", m.shape)], api)
    if s.shape[1] > 128:
        raise errors.dimension_exceeds_limit(1, "stationary", s.shape, api, 128)
    if m.shape[1] > 512:
        raise errors.dimension_exceeds_limit(1, "moving", m.shape, api, 512)
    details: dict[str, Any] = dict(attributes or {})
    shape = (s.shape[1], m.shape[1])
    output_mask, contraction = _matmul_mask(mask, s, m, api)
    if contraction:
        details["contraction_mask"] = tuple(contraction)
    dtype = s.buffer.dtype if details.get("is_transpose") else "float32"
    out = new_tile(shape, dtype, Space.PSUM)
    record = current().emit(Opcode.MATMUL, Engine.TENSOR, [out], {"stationary": s, "moving": m}, details, output_mask)
    return fresh(out, record)


def _matmul_mask(mask: Any, stationary: Tensor, moving: Tensor, api: str) -> tuple[list[Index], list[Index]]:
    """Splits a mask over the operands' axes: terms over the result (M, N) and terms over the contraction (K, 1)."""
    k, m, n = stationary.shape[0], stationary.shape[1], moving.shape[1]
    output: list[Index] = []
    contraction: list[Index] = []
    for term in resolve_mask(mask):
        flat = term.expand((1,) * max(0, 2 - term.ndim) + term.shape)
        if flat.ndim != 2 or flat.tables:
            raise errors.unsupported_mask_expression()
        stride_0, stride_1 = flat.strides
        if not stride_0 and not stride_1:
            output.append(Index(flat.constant, flat.terms, (m, n), (0, 0)))
        elif stride_0 and stride_1:
            raise errors.unsupported(f"a mask of '{api}' over both axes of an operand in one condition")
        elif stride_0:
            if flat.shape[0] != k:
                raise errors.shapes_not_broadcastable([("mask", term.shape), ("stationary", stationary.shape)], api)
            contraction.append(Index(flat.constant, flat.terms, (k, 1), (stride_0, 0)))
        elif _mask_is_for_moving(flat, stationary, moving, api):
            output.append(Index(flat.constant, flat.terms, (m, n), (0, stride_1)))
        else:
            output.append(Index(flat.constant, flat.terms, (m, n), (stride_1, 0)))
    return output, contraction


def _mask_is_for_moving(term: Index, stationary: Tensor, moving: Tensor, api: str) -> bool:
    """Which operand's free axis a condition speaks of: by extent, else by the loops that move both."""
    extent, m, n = term.shape[1], stationary.shape[1], moving.shape[1]
    if (extent == m) != (extent == n):
        return extent == n
    if extent != n:
        raise errors.shapes_not_broadcastable([("mask", term.shape), ("moving", moving.shape)], api)
    loops = set(term.terms)
    in_moving = bool(loops & _free_loops(moving))
    in_stationary = bool(loops & _free_loops(stationary))
    if in_moving == in_stationary:
        raise errors.unsupported(
            f"a mask of '{api}' that fits the free axis of both 'stationary' and 'moving'; mask the operands instead"
        )
    return in_moving


def _free_loops(tile: Tensor) -> set[Any]:
    return {loop for dim in tile.dims if any(dim.strides[1:]) for loop in dim.terms}


def transpose(tile: Tensor, *, api: str, engine: Engine, dtype: Any = None, mask: Any = None) -> Tensor:
    """Swaps partition and free axis: through the tensor engine into PSUM, or in 32 x 32
    blocks on the vector engine."""
    flat = two_dimensional(tile, "data", api)
    for dimension in (0, 1):
        if flat.shape[dimension] > 128:
            raise errors.dimension_exceeds_limit(dimension, "data", flat.shape, api, 128)
    if engine is Engine.TENSOR:
        if current().allocated_kernel:
            raise errors.transpose_in_allocated_kernel()
        if flat.space is not Space.SBUF:
            raise errors.unsupported_memory("data", api, "sbuf", flat.space.value)
    name, explicit = result_dtype(dtype, flat.buffer.dtype, api)
    shape = (flat.shape[1], flat.shape[0])
    terms = [
        Index(term.constant, term.terms, shape, (term.strides[1], term.strides[0]))
        for term in mask_for(mask, flat.shape)
    ]
    out = new_tile(shape, name, Space.PSUM if engine is Engine.TENSOR else Space.SBUF)
    record = current().emit(Opcode.TRANSPOSE, engine, [out], {"data": flat}, {}, terms)
    return fresh(out, record, explicit)
