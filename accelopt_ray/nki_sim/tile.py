"""Tensors as kernels handle them: a buffer and a symbolic access to it.

Indexing composes accesses; arithmetic operators and assignments are lowered in
:mod:`accelopt_ray.nki_sim.lowering`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from accelopt_ray.nki_sim import dtypes, errors
from accelopt_ray.nki_sim.program import Space
from accelopt_ray.nki_sim.symbolic import Condition, DynamicSlice, Index, as_index, as_int, broadcast_shapes
from accelopt_ray.nki_sim.trace_records import TracedBuffer
from accelopt_ray.nki_sim.views import View, dim_text, identity_dims, is_axis, lookup, regroup, same_index, slice_bounds

_NO_INDIRECT: Mapping[int, Any] = {}


class Tensor:
    """A view of a buffer.

    Attributes:
        buffer: What it views.
        view_shape: The shape the buffer is read in.
        dims: One index per dimension of ``view_shape``, each over the axes of ``shape``.
        shape: Extent of each axis.
        indirect: For dimensions that a tile of indices addresses: that tile.
    """

    __slots__ = ("buffer", "dims", "indirect", "shape", "view_shape")
    __array_ufunc__ = None

    def __init__(
        self,
        buffer: TracedBuffer,
        shape: tuple[int, ...],
        dims: Sequence[Index] | None = None,
        view_shape: tuple[int, ...] | None = None,
        indirect: Mapping[int, Tensor] = _NO_INDIRECT,
    ) -> None:
        self.buffer = buffer
        self.shape = shape
        self.dims = tuple(dims) if dims is not None else identity_dims(shape)
        self.view_shape = view_shape if view_shape is not None else buffer.shape
        self.indirect = indirect

    # What kernels read.

    @property
    def dtype(self) -> dtypes.DType:
        """Element type."""
        return dtypes.DType(self.buffer.dtype)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return dtypes.itemsize(self.buffer.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize

    @property
    def name(self) -> str:
        """The buffer's name."""
        return self.buffer.name

    @property
    def space(self) -> Space:
        """Memory space of the buffer."""
        return self.buffer.space

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        raise errors.compile_error("iterating over a tensor is not supported")

    def __bool__(self) -> bool:
        if self.size > 1:
            raise errors.ambiguous_truth_value()
        raise errors.dynamic_control_flow()

    def _no_value(self) -> Any:
        raise errors.compile_error("the value of a tensor is not known while the kernel is compiled")

    __int__ = __float__ = __index__ = _no_value

    def __array__(self, *_args: Any, **_kwargs: Any) -> Any:
        self._no_value()

    def __repr__(self) -> str:
        return f"{self.buffer.dtype} {self.buffer.name}{errors.shape_text(self.shape)}"

    def __hash__(self) -> int:
        return id(self)

    # Structure.

    def is_whole(self) -> bool:
        """Whether it views all of its buffer, axis by axis."""
        return (
            self.shape == self.buffer.shape
            and self.view_shape == self.buffer.shape
            and not self.indirect
            and all(is_axis(dim, axis) for axis, dim in enumerate(self.dims))
        )

    def buffer_size(self) -> int:
        """Number of elements of the whole buffer."""
        return int(np.prod(self.buffer.shape, dtype=np.int64))

    def same_place(self, other: Tensor) -> bool:
        """Whether both view the same elements in the same order."""
        return (
            self.buffer is other.buffer
            and self.shape == other.shape
            and self.view_shape == other.view_shape
            and not self.indirect
            and not other.indirect
            and all(same_index(a, b) for a, b in zip(self.dims, other.dims, strict=True))
        )

    def partition_dimension(self) -> int:
        """Position of the partition dimension in ``view_shape``."""
        return self.buffer.block_dims

    def index_text(self) -> str:
        """The access as the compiler prints it, for messages."""
        return "[" + ", ".join(dim_text(dim) for dim in self.dims) + "]"

    def with_axes(self, shape: tuple[int, ...], dims: Sequence[Index]) -> Tensor:
        """Another access to the same view."""
        return Tensor(self.buffer, shape, dims, self.view_shape, self.indirect)

    # Indexing.

    def __getitem__(self, key: Any) -> Tensor:
        items = list(key) if isinstance(key, tuple) else [key]
        if len(items) == 1 and items[0] is Ellipsis:
            return self
        for item in items:
            if isinstance(item, (Condition, str, float, bool, np.bool_, list, np.ndarray)):
                if isinstance(item, np.ndarray) and item.ndim == 0:
                    continue
                raise errors.compile_error(
                    f"tensor `{self.name}` indexed with unsupported index (type {type(item).__name__})"
                )
        advanced = any((isinstance(item, Index) and item.ndim > 0) or isinstance(item, Tensor) for item in items)
        if advanced:
            return self._advanced(items)
        return self._basic(items)

    def _expand_ellipsis(self, items: list[Any]) -> list[Any]:
        given = sum(1 for item in items if item is not None and item is not Ellipsis)
        if given > self.ndim:
            raise errors.compile_error(
                f"too many indices for tensor `{self.name}`: it has {self.ndim} dimensions, but {given} were indexed"
            )
        expanded: list[Any] = []
        for item in items:
            if item is Ellipsis:
                expanded.extend([slice(None)] * (self.ndim - given))
                given = self.ndim
            else:
                expanded.append(item)
        expanded.extend([slice(None)] * (self.ndim - given))
        return expanded

    def _advanced(self, items: list[Any]) -> Tensor:
        if any(isinstance(item, (slice, DynamicSlice)) or item is None for item in items):
            raise errors.mixing_basic_and_advanced()
        if any(item is Ellipsis for item in items):
            if len(items) - 1 != self.ndim:
                raise errors.mixing_basic_and_advanced()
            items = [item for item in items if item is not Ellipsis]
        if len(items) > self.ndim:
            self._expand_ellipsis(items)
        if len(items) < self.ndim:
            raise errors.compile_error(
                f"Insufficient rank: tensor `{self.name}{errors.shape_text(self.shape)}` is indexed with {len(items)} "
                f"of {self.ndim} indices"
            )
        shape: tuple[int, ...] = ()
        resolved: list[Index] = []
        indirect: dict[int, Tensor] = {}
        for axis, item in enumerate(items):
            if isinstance(item, Tensor):
                indirect[axis] = item
                index = Index(0, {}, item.shape, (0,) * item.ndim)
            else:
                found = as_index(item)
                if found is None:
                    raise TypeError(f"tensor indices must be integers, slices or nl.arange, not {type(item).__name__}")
                index = found
                if index.ndim == 0 and index.constant < 0 and not index.terms:
                    index = Index(index.constant + self.shape[axis])
            joined = broadcast_shapes(shape, index.shape)
            if joined is None:
                raise errors.compile_error(
                    f"shape mismatch: indices indexing tensor `{self.name}` have shapes that do not broadcast: "
                    f"{errors.shape_text(shape)} and {errors.shape_text(index.shape)}"
                )
            shape = joined
            resolved.append(index)
        if len(shape) == 1:
            raise errors.one_dimensional_arange(self.name)
        expanded = [index.expand(shape) for index in resolved]
        result = self._compose(shape, expanded)
        if indirect:
            result = self._with_indirect(result, indirect)
        return result

    def _with_indirect(self, result: Tensor, indirect: Mapping[int, Tensor]) -> Tensor:
        if len(self.dims) != self.ndim or not all(is_axis(dim, axis) for axis, dim in enumerate(self.dims)):
            raise errors.unsupported("indirect indexing of a view")
        for tile in indirect.values():
            if tile.space is not Space.SBUF:
                raise errors.compile_error("Indirect indices tile must be on SBUF.")
            if any(size != 1 for size in tile.shape[1:]):
                raise errors.indirect_index_on_free_dimension()
        return Tensor(self.buffer, result.shape, result.dims, self.view_shape, dict(indirect))

    def _basic(self, items: list[Any]) -> Tensor:
        items = self._expand_ellipsis(items)
        shape: list[int] = []
        parts: list[tuple[Index, int, int]] = []  # start, new axis or -1, step
        axis = 0
        dropped: list[int] = []
        for item in items:
            if item is None:
                shape.append(1)
                continue
            extent = self.shape[axis]
            if isinstance(item, (slice, DynamicSlice)):
                start, size, step = slice_bounds(item, extent)
                parts.append((start, len(shape), step))
                shape.append(size)
            else:
                found = as_index(item)
                if found is None:
                    raise TypeError(f"tensor indices must be integers, slices or nl.arange, not {type(item).__name__}")
                if found.is_constant and found.constant < 0:
                    found = Index(found.constant + extent)
                parts.append((found, -1, 0))
                dropped.append(axis)
            axis += 1
        if self.space is not Space.HBM:
            shape, parts = self._keep_tile_axes(shape, parts, dropped)
        full = tuple(shape)
        subs = []
        for start, new_axis, step in parts:
            strides = [0] * len(full)
            if new_axis >= 0:
                strides[new_axis] = step
            subs.append(Index(start.constant, start.terms, full, tuple(strides)))
        return self._compose(full, subs)

    def _keep_tile_axes(
        self, shape: list[int], parts: list[tuple[Index, int, int]], dropped: list[int]
    ) -> tuple[list[int], list[tuple[Index, int, int]]]:
        """On chip a tile keeps a partition axis and one free axis even where an integer picks a position."""
        partition = self.partition_axis()
        if partition is not None and partition in dropped:
            start, _, _ = parts[partition]
            shape = [1, *shape]
            parts = [(s, axis + 1 if axis >= 0 else axis, step) for s, axis, step in parts]
            parts[partition] = (start, -1, 0)
        if len(shape) == 1:
            shape = [*shape, 1]
        return shape, parts

    def partition_axis(self) -> int | None:
        """The axis of this view that runs over the partition dimension."""
        if self.space is Space.HBM:
            return None
        dim = self.dims[self.partition_dimension()]
        for axis, stride in enumerate(dim.strides):
            if stride:
                return axis
        return None if dim.terms or self.ndim == len(self.view_shape) else 0

    def _compose(self, shape: tuple[int, ...], subs: Sequence[Index]) -> Tensor:
        """Replaces the coordinate of each axis by an index over the axes of ``shape``."""
        dims = []
        for dim in self.dims:
            axes = [axis for axis, stride in enumerate(dim.strides) if stride]
            if not dim.tables and len(axes) == 1 and dim.strides[axes[0]] == 1 and not dim.terms and not dim.constant:
                dims.append(subs[axes[0]])
                continue
            result = Index(dim.constant, dim.terms, shape, (0,) * len(shape))
            for axis in axes:
                result = result + subs[axis].scaled(dim.strides[axis])
            for axis, table in dim.tables.items():
                result = result + lookup(table, subs[axis])
            dims.append(result)
        return Tensor(self.buffer, shape, dims, self.view_shape, self.indirect)

    def __setitem__(self, key: Any, value: Any) -> None:
        _assignment().assign(self[key], value)

    # Views.

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements under another shape; on chip the partition axis stays."""
        given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        target = [as_int(size) for size in given]
        if -1 in target:
            known = int(np.prod([size for size in target if size != -1], dtype=np.int64))
            target[target.index(-1)] = self.size // max(known, 1)
        result = tuple(target)
        if int(np.prod(result, dtype=np.int64)) != self.size:
            raise errors.compile_error(
                f"cannot reshape tensor `{self.name}{errors.shape_text(self.shape)}` into shape "
                f"{errors.shape_text(result)}"
            )
        if result == self.shape:
            return self
        if (
            self.space is Space.HBM
            and self.view_shape == self.shape
            and all(is_axis(dim, axis) for axis, dim in enumerate(self.dims))
        ):
            return Tensor(self.buffer, result, None, result)
        view = regroup(View(self.shape, self.dims, self.view_shape, self.space is not Space.HBM), result)
        if view is None:
            raise errors.unsupported(
                f"reshape of `{self.name}{errors.shape_text(self.shape)}` to {errors.shape_text(result)}"
            )
        return Tensor(self.buffer, result, view.dims, view.view_shape, self.indirect)

    def expand_dims(self, axis: int) -> Tensor:
        """Inserts an axis of extent 1."""
        position = axis if axis >= 0 else axis + self.ndim + 1
        shape = (*self.shape[:position], 1, *self.shape[position:])
        return self.reshape(shape)

    def broadcast_to(self, *shape: Any) -> Tensor:
        """Repeats axes of extent 1; on the partition axis of a tile that costs an instruction."""
        given = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        result: Tensor = _lowering().broadcast_to(self, tuple(as_int(size) for size in given))
        return result

    def broadcast_view(self, shape: tuple[int, ...]) -> Tensor:
        """Broadcasts without an instruction (stride 0)."""
        if shape == self.shape:
            return self
        dims = [dim.expand(shape) for dim in self.dims]
        return Tensor(self.buffer, shape, dims, self.view_shape, self.indirect)

    def swap_axes(self, first: int, second: int) -> Tensor:
        """The view with two axes exchanged."""
        order = list(range(self.ndim))
        order[first], order[second] = order[second], order[first]
        shape = tuple(self.shape[axis] for axis in order)
        dims = []
        for dim in self.dims:
            strides = tuple(dim.strides[axis] for axis in order)
            tables = {order.index(axis): table for axis, table in dim.tables.items()}
            dims.append(Index(dim.constant, dim.terms, shape, strides, tables))
        return Tensor(self.buffer, shape, dims, self.view_shape, self.indirect)

    def astype(self, dtype: Any) -> Tensor:
        """A copy in another element type."""
        result: Tensor = _lowering().cast(self, dtype)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise errors.unsupported(f"tensor.{name}")

    # Operators.

    def _operate(self, op: str, other: Any, *, reverse: bool = False) -> Any:
        return _lowering().operator_call(op, self, other, reverse=reverse)

    def _in_place(self, op: str, other: Any) -> Tensor:
        result: Tensor = _assignment().in_place(op, self, other)
        return result

    def __add__(self, other: Any) -> Any:
        return self._operate("add", other)

    def __radd__(self, other: Any) -> Any:
        return self._operate("add", other, reverse=True)

    def __sub__(self, other: Any) -> Any:
        return self._operate("subtract", other)

    def __rsub__(self, other: Any) -> Any:
        return self._operate("subtract", other, reverse=True)

    def __mul__(self, other: Any) -> Any:
        return self._operate("multiply", other)

    def __rmul__(self, other: Any) -> Any:
        return self._operate("multiply", other, reverse=True)

    def __truediv__(self, other: Any) -> Any:
        return self._operate("divide", other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._operate("divide", other, reverse=True)

    def __pow__(self, other: Any) -> Any:
        return self._operate("power", other)

    def __rpow__(self, other: Any) -> Any:
        return self._operate("power", other, reverse=True)

    def __mod__(self, other: Any) -> Any:
        return self._operate("mod", other)

    def __and__(self, other: Any) -> Any:
        return self._operate("bitwise_and", other)

    def __or__(self, other: Any) -> Any:
        return self._operate("bitwise_or", other)

    def __xor__(self, other: Any) -> Any:
        return self._operate("bitwise_xor", other)

    def __lshift__(self, other: Any) -> Any:
        return self._operate("left_shift", other)

    def __rshift__(self, other: Any) -> Any:
        return self._operate("right_shift", other)

    def __lt__(self, other: Any) -> Any:
        return self._operate("less", other)

    def __le__(self, other: Any) -> Any:
        return self._operate("less_equal", other)

    def __gt__(self, other: Any) -> Any:
        return self._operate("greater", other)

    def __ge__(self, other: Any) -> Any:
        return self._operate("greater_equal", other)

    def __eq__(self, other: object) -> Any:
        return False if other is None else self._operate("equal", other)

    def __ne__(self, other: object) -> Any:
        return True if other is None else self._operate("not_equal", other)

    def __neg__(self) -> Any:
        return self._operate("multiply", -1.0)

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Any:
        return _lowering().unary("abs", self, api="abs")

    def __invert__(self) -> Any:
        return _lowering().unary("invert", self, api="invert")

    def __iadd__(self, other: Any) -> Tensor:
        return self._in_place("add", other)

    def __isub__(self, other: Any) -> Tensor:
        return self._in_place("subtract", other)

    def __imul__(self, other: Any) -> Tensor:
        return self._in_place("multiply", other)

    def __itruediv__(self, other: Any) -> Tensor:
        return self._in_place("divide", other)

    def __matmul__(self, other: Any) -> Any:
        raise errors.compile_error("the operator @ is not supported on tensors; use nl.matmul or nisa.nc_matmul")


def _lowering() -> ModuleType:
    from accelopt_ray.nki_sim import lowering  # noqa: PLC0415 - lowering builds on tiles, tiles only call it

    return lowering


def _assignment() -> ModuleType:
    from accelopt_ray.nki_sim import assignment  # noqa: PLC0415 - as above

    return assignment


def require_tile(value: Any, name: str, api: str) -> Tensor:
    """Checks that an operand is a tile on chip: partition axis first, at least two axes, at most 128 partitions.

    Raises:
        KernelError: In the compiler's wording.
    """
    if isinstance(value, Tensor):
        if value.space is Space.HBM:
            raise errors.unsupported_memory(name, api, "psum|sbuf", "hbm")
        if value.indirect:
            raise errors.indirect_index_not_allowed(name)
        check_tile_layout(value)
        return value
    if value is None:
        raise errors.operand_missing(name)
    raise errors.unexpected_operand(name, api, value)


def check_tile_layout(tile: Tensor) -> None:
    """Checks that axis 0, and no other, runs over the partition dimension, in steps of one."""
    partition = tile.dims[tile.partition_dimension()]
    if any(partition.strides[1:]) or any(axis > 0 for axis in partition.tables):
        raise errors.failed_to_infer_tile(tile.name)
    for position, dim in enumerate(tile.dims):
        if position != tile.partition_dimension() and (dim.strides[0] or 0 in dim.tables):
            raise errors.failed_to_infer_tile(tile.name)
    if tile.shape[0] > 128:
        raise errors.partitions_exceed_limit(tile.shape[0])
    if tile.shape[0] > 1 and (partition.strides[0] != 1 or 0 in partition.tables):
        raise errors.compile_error(
            f"tile of tensor `{tile.name}` has a stride of {partition.strides[0]} on the partition dimension; "
            "partitions must be contiguous"
        )


def whole(buffer: TracedBuffer) -> Tensor:
    """The tensor that views all of ``buffer``."""
    return Tensor(buffer, buffer.shape)
