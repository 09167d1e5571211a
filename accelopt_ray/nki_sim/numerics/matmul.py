"""Matrix products over strided tiles, arranged so that BLAS does as much as possible in one call.

An instruction that runs batched over loops is a contraction of three strided tensors. Each axis belongs to the
contraction (K), to the rows (M), to the columns (N), or to a batch. Axes of one kind that follow each other in memory
in every operand merge into one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from accelopt_ray.nki_sim.numerics.errors import NumericsError
from accelopt_ray.nki_sim.numerics.layout import Tile


@dataclass(frozen=True)
class Axis:
    """An axis of the contraction with the elements per step in each tensor."""

    extent: int
    stationary: int
    moving: int
    out: int


@dataclass(frozen=True)
class Arrangement:
    """How to view the three tensors as (stacks of) matrices, in elements.

    Attributes:
        stationary_shape: (batch..., M, K).
        moving_shape: (batch..., K, N).
        out_shape: (batch..., M, N).
        stationary_strides: Matching strides; likewise for the others.
        steps: Offsets (stationary, moving) of the products to add up.
    """

    stationary_shape: tuple[int, ...]
    stationary_strides: tuple[int, ...]
    moving_shape: tuple[int, ...]
    moving_strides: tuple[int, ...]
    out_shape: tuple[int, ...]
    out_strides: tuple[int, ...]
    steps: tuple[tuple[int, int], ...]


def arrange(stationary: Tile, moving: Tile, out: Tile, line: int) -> Arrangement:
    """Plans the product ``out = stationary.T @ moving``.

    Args:
        stationary: Shape (batch..., K, M).
        moving: Shape (batch..., K, N...).
        out: Shape (batch..., M, N...); a batch axis that does not move it is summed over.
        line: Source line, for messages.
    """
    batch = out.batch
    rows: list[Axis] = []
    columns: list[Axis] = []
    depth: list[Axis] = []
    stacked: list[Axis] = []
    for number in range(batch):
        axis = Axis(out.shape[number], stationary.strides[number], moving.strides[number], out.strides[number])
        if axis.out == 0:
            depth.append(axis)
        elif axis.moving == 0 and axis.stationary != 0:
            rows.append(axis)
        elif axis.stationary == 0 and axis.moving != 0:
            columns.append(axis)
        else:
            stacked.append(axis)
    if stationary.shape[batch] != moving.shape[batch]:
        raise NumericsError("the contracted dimensions of a matrix product differ", line)
    depth.append(Axis(stationary.shape[batch], stationary.strides[batch], moving.strides[batch], 0))
    out_axes = list(zip(out.shape[batch:], out.strides[batch:], strict=False))
    row_axes = list(zip(stationary.shape[batch + 1 :], stationary.strides[batch + 1 :], strict=False))
    column_axes = list(zip(moving.shape[batch + 1 :], moving.strides[batch + 1 :], strict=False))
    row_count = prod(extent for extent, _ in row_axes)
    split, covered = 0, 1
    while split < len(out_axes) and (covered < row_count or split == 0):
        covered *= out_axes[split][0]
        split += 1
    for extent, mine, theirs in _pair(row_axes, out_axes[:split], line):
        rows.append(Axis(extent, mine, 0, theirs))
    for extent, mine, theirs in _pair(column_axes, out_axes[split:], line):
        columns.append(Axis(extent, 0, mine, theirs))
    merged_depth = _merge(depth, ("stationary", "moving"))
    merged_rows = _merge(rows, ("out", "stationary"))
    merged_columns = _merge(columns, ("out", "moving"))
    core_depth = _largest(merged_depth)
    core_row = _largest(merged_rows)
    core_column = _largest(merged_columns)
    outer = [axis for axis in merged_depth if axis is not core_depth]
    stacked += [axis for axis in merged_rows if axis is not core_row]
    stacked += [axis for axis in merged_columns if axis is not core_column]
    extents = tuple(axis.extent for axis in stacked)
    left = (core_row.extent, core_depth.extent)
    right = (core_depth.extent, core_column.extent)
    result = (core_row.extent, core_column.extent)
    return Arrangement(
        (*extents, *left),
        (*(a.stationary for a in stacked), *_tidy(left, core_row.stationary, core_depth.stationary)),
        (*extents, *right),
        (*(a.moving for a in stacked), *_tidy(right, core_depth.moving, core_column.moving)),
        (*extents, *result),
        (*(a.out for a in stacked), *_tidy(result, core_row.out, core_column.out)),
        tuple(
            (
                sum(i * a.stationary for i, a in zip(indices, outer, strict=False)),
                sum(i * a.moving for i, a in zip(indices, outer, strict=False)),
            )
            for indices in product(*(range(a.extent) for a in outer))
        ),
    )


def _tidy(shape: tuple[int, int], row_stride: int, column_stride: int) -> tuple[int, int]:
    """Gives axes of one element the strides that BLAS expects; they are never stepped along."""
    rows, columns = shape
    if columns == 1:
        column_stride = 1 if row_stride != 1 else max(1, rows)
    if rows == 1:
        row_stride = max(1, columns) if column_stride == 1 else 1
    return row_stride, column_stride


def _pair(first: list[tuple[int, int]], second: list[tuple[int, int]], line: int) -> list[tuple[int, int, int]]:
    """Matches two lists of (extent, stride) that describe the same elements, splitting axes where needed."""
    result: list[tuple[int, int, int]] = []
    mine = [axis for axis in reversed(first) if axis[0] != 1]
    theirs = [axis for axis in reversed(second) if axis[0] != 1]
    while mine and theirs:
        (a, a_stride), (b, b_stride) = mine.pop(0), theirs.pop(0)
        extent = min(a, b)
        if a % extent or b % extent:
            raise NumericsError("the tiles of a matrix product do not fit together", line)
        result.append((extent, a_stride, b_stride))
        if a > extent:
            mine.insert(0, (a // extent, a_stride * extent))
        if b > extent:
            theirs.insert(0, (b // extent, b_stride * extent))
    if mine or theirs:
        raise NumericsError("the tiles of a matrix product do not fit together", line)
    return result or [(1, 1, 1)]


def _merge(axes: Sequence[Axis], tensors: tuple[str, str]) -> list[Axis]:
    """Joins axes that follow each other in memory in both tensors, slowest first."""
    first, second = tensors
    ordered = sorted(
        (axis for axis in axes if axis.extent != 1),
        key=lambda axis: (-abs(getattr(axis, first)), -abs(getattr(axis, second))),
    )
    result: list[Axis] = []
    for axis in ordered:
        if result and all(getattr(result[-1], tensor) == getattr(axis, tensor) * axis.extent for tensor in tensors):
            extent = result.pop().extent * axis.extent
            result.append(Axis(extent, axis.stationary, axis.moving, axis.out))
        else:
            result.append(axis)
    return result or [axes[0]]


def _largest(axes: list[Axis]) -> Axis:
    return max(axes, key=lambda axis: axis.extent)


def suits_blas(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tells whether NumPy hands matrices of this form to BLAS as they are (strides in elements)."""
    rows, columns = shape[-2:]
    row_stride, column_stride = strides[-2:]
    return (column_stride == 1 and row_stride >= columns) or (row_stride == 1 and column_stride >= rows)
