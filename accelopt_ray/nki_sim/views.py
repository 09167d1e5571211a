"""Arithmetic of views: slices with symbolic bounds, tables of indices, axes that split and merge."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from accelopt_ray.nki_sim import errors
from accelopt_ray.nki_sim.loop_variables import ConcreteLoopsNeeded
from accelopt_ray.nki_sim.symbolic import DynamicSlice, Index, as_index, as_int


@dataclass(frozen=True)
class View:
    """How a tensor reads its buffer.

    Attributes:
        shape: Extent of each axis.
        dims: One index per dimension of ``view_shape``.
        view_shape: The shape the buffer is read in.
        on_chip: Whether axis 0 runs over partitions and must stay.
    """

    shape: tuple[int, ...]
    dims: tuple[Index, ...]
    view_shape: tuple[int, ...]
    on_chip: bool


@lru_cache(maxsize=4096)
def identity_dims(shape: tuple[int, ...]) -> tuple[Index, ...]:
    """One index per dimension that runs over the axis of the same position."""
    rank = len(shape)
    return tuple(
        Index(0, {}, shape, tuple(1 if axis == position else 0 for axis in range(rank))) for position in range(rank)
    )


def is_axis(dim: Index, axis: int) -> bool:
    """Whether an index runs over one axis from its start, and over nothing else."""
    if dim.constant or dim.terms or dim.tables or axis >= len(dim.strides):
        return False
    return dim.strides[axis] == 1 and not any(stride for a, stride in enumerate(dim.strides) if a != axis)


def same_index(left: Index, right: Index) -> bool:
    """Whether two indices are equal."""
    return (
        left.constant == right.constant
        and left.strides == right.strides
        and dict(left.terms) == dict(right.terms)
        and dict(left.tables) == dict(right.tables)
    )


def dim_text(dim: Index) -> str:
    """An index as the compiler prints it."""
    axes = [axis for axis, stride in enumerate(dim.strides) if stride]
    if not axes and not dim.tables:
        return repr(Index(dim.constant, dim.terms))
    low, high = Index(0, {}, dim.shape, dim.strides, dim.tables).bounds()
    base = repr(Index(dim.constant + low, dim.terms))
    return f"{base}:{dim.constant + high + 1}" if not dim.terms else f"{base} + 0:{high - low + 1}"


def lookup(table: tuple[int, ...], sub: Index) -> Index:
    """The index that reads ``table`` at the position that ``sub`` gives."""
    if sub.terms:
        raise ConcreteLoopsNeeded(loop.site for loop in sub.terms)
    axes = [axis for axis, stride in enumerate(sub.strides) if stride or axis in sub.tables]
    zeros = (0,) * sub.ndim
    if not axes:
        return Index(table[sub.constant], {}, sub.shape, zeros)
    if len(axes) > 1:
        raise errors.unsupported("a tile indexed with // or %, indexed again over several axes")
    axis = axes[0]
    inner = sub.tables.get(axis) or (0,) * sub.shape[axis]
    values = tuple(table[sub.constant + sub.strides[axis] * i + entry] for i, entry in enumerate(inner))
    return Index(0, {}, sub.shape, zeros, {axis: values})


def slice_bounds(item: slice | DynamicSlice, extent: int) -> tuple[Index, int, int]:
    """Start, size and step of a slice with symbolic bounds."""
    if isinstance(item, DynamicSlice):
        start = as_index(item.start)
        if start is None:
            raise errors.unsupported("nl.ds with a start that is no index")
        return start, item.size, item.step
    step = 1 if item.step is None else as_int(item.step)
    if step <= 0:
        raise errors.compile_error("slices with a step of 0 or less are not supported")
    start = _bound(item.start, 0, extent)
    stop = _bound(item.stop, extent, extent)
    length = stop - start
    if length.terms or length.varies:
        raise errors.compile_error("slices of variable size are not supported: the size of a slice must be constant")
    size = -(-length.constant // step)
    if size <= 0:
        raise errors.compile_error(f"a slice of size {size} is empty")
    return start, size, step


def _bound(value: Any, default: int, extent: int) -> Index:
    if value is None:
        return Index(default)
    index = as_index(value)
    if index is None:
        raise TypeError(f"slice indices must be integers or None, not {type(value).__name__}")
    if index.ndim:
        raise errors.mixing_basic_and_advanced()
    if index.is_constant and index.constant < 0:
        return Index(index.constant + extent)
    return index


def regroup(view: View, target: tuple[int, ...]) -> View | None:
    """Splits and merges axes where strides allow it; None where they do not."""
    groups = _axis_groups(view.shape, target)
    if groups is None:
        return None
    for old_axes, new_axes in groups:
        old_sizes = [size for axis in old_axes if (size := view.shape[axis]) != 1]
        new_sizes = [size for axis in new_axes if (size := target[axis]) != 1]
        if len(old_sizes) > 1 and old_sizes != new_sizes:
            return _merge(view, target, groups)
    rank = len(target)
    dims = []
    for dim in view.dims:
        strides = [0] * rank
        tables: dict[int, tuple[int, ...]] = {}
        for old_axes, new_axes in groups:
            old_wide = [axis for axis in old_axes if view.shape[axis] != 1]
            new_wide = [axis for axis in new_axes if target[axis] != 1]
            if len(old_wide) == len(new_wide):
                for old, new in zip(old_wide, new_wide, strict=True):
                    strides[new] = dim.strides[old]
                    if old in dim.tables:
                        tables[new] = dim.tables[old]
            elif len(old_wide) == 1:
                if old_wide[0] in dim.tables:
                    return None
                stride = dim.strides[old_wide[0]]
                for new in reversed(new_wide):
                    strides[new] = stride
                    stride *= target[new]
        dims.append(Index(dim.constant, dim.terms, target, tuple(strides), tables))
    return View(target, tuple(dims), view.view_shape, view.on_chip)


def _axis_groups(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]] | None:
    """Pairs the shortest runs of axes of equal size."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news = [], []
        a = b = 1
        if i < len(old):
            olds.append(i)
            a *= old[i]
            i += 1
        if j < len(new):
            news.append(j)
            b *= new[j]
            j += 1
        while a != b:
            if a < b and i < len(old):
                olds.append(i)
                a *= old[i]
                i += 1
            elif b < a and j < len(new):
                news.append(j)
                b *= new[j]
                j += 1
            else:
                return None
        groups.append((olds, news))
    return groups


def _merge(view: View, target: tuple[int, ...], groups: list[tuple[list[int], list[int]]]) -> View | None:
    """Merges axes: within one dimension by its strides, across whole trailing dimensions by another view shape."""
    sources = [[axis for axis in old_axes if view.shape[axis] != 1] for old_axes, _ in groups]
    merged = _merge_by_stride(view, sources)
    if merged is not None:
        return merged if merged.shape == target else regroup(merged, target)
    keep = len(view.view_shape) - len(view.shape)
    if keep < 0:
        return None
    for axis, extent in enumerate(view.shape):
        if not is_axis(view.dims[keep + axis], axis) or view.view_shape[keep + axis] != extent:
            return None
    if view.on_chip and target[0] != view.shape[0]:
        return None
    leading = tuple(Index(dim.constant, dim.terms, target, (0,) * len(target)) for dim in view.dims[:keep])
    return View(target, (*leading, *identity_dims(target)), view.view_shape[:keep] + target, view.on_chip)


def _merge_by_stride(view: View, sources: list[list[int]]) -> View | None:
    shape = tuple(prod(view.shape[axis] for axis in wide) for wide in sources)
    dims = []
    for dim in view.dims:
        strides = []
        for wide in sources:
            if any(axis in dim.tables for axis in wide) and len(wide) > 1:
                return None
            stride = dim.strides[wide[-1]] if wide else 0
            expected = stride
            for axis in reversed(wide):
                if dim.strides[axis] != expected:
                    return None
                expected *= view.shape[axis]
            strides.append(stride)
        tables = {
            position: dim.tables[wide[0]] for position, wide in enumerate(sources) if wide and wide[0] in dim.tables
        }
        dims.append(Index(dim.constant, dim.terms, shape, tuple(strides), tables))
    return View(shape, tuple(dims), view.view_shape, view.on_chip)
