"""Index expressions: affine in the loop indices, strided over the axes of a tile.

``nl.arange``, ``nl.mgrid`` and the loop iterators give :class:`Index` values; arithmetic on them stays symbolic, and a
comparison gives a :class:`Condition`, usable as a mask. Where a kernel needs a number instead (``if i > 0``, ``i % 2``
of a loop index, a list index), :class:`ConcreteLoopsNeeded` tells the tracer to trace again with those loops
unrolled.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from accelopt_ray.nki_sim import errors
from accelopt_ray.nki_sim.loop_variables import ConcreteLoopsNeeded, LoopVariable, Site
from accelopt_ray.nki_sim.program import Affine, DimIndex

#: Longest axis that may be indexed through a table: what the hardware's access patterns can count.
MAX_TABLE = 65_536


def broadcast_shapes(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """NumPy's broadcast of two shapes, or None when there is none."""
    if left == right:
        return left
    if len(left) < len(right):
        left = (1,) * (len(right) - len(left)) + left
    elif len(right) < len(left):
        right = (1,) * (len(left) - len(right)) + right
    result = []
    for a, b in zip(left, right, strict=True):
        if a not in (b, 1) and b != 1:
            return None
        result.append(b if a == 1 else a)
    return tuple(result)


_NO_TERMS: dict[LoopVariable, int] = {}
_NO_TABLES: dict[int, tuple[int, ...]] = {}


class Index:
    """``constant + sum(coefficient * loop index)``, plus a stride or a table over each axis of ``shape``.

    Immutable; the name is the one that the compiler's messages use.
    """

    __slots__ = ("constant", "shape", "strides", "tables", "terms")
    __array_ufunc__ = None

    def __init__(
        self,
        constant: int = 0,
        terms: Mapping[LoopVariable, int] = _NO_TERMS,
        shape: tuple[int, ...] = (),
        strides: tuple[int, ...] = (),
        tables: Mapping[int, tuple[int, ...]] = _NO_TABLES,
    ) -> None:
        self.constant = constant
        self.terms = terms
        self.shape = shape
        self.strides = strides
        self.tables = tables

    # Structure.

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def is_constant(self) -> bool:
        """Whether it has one value, known now."""
        return not self.terms and not self.varies

    @property
    def varies(self) -> bool:
        """Whether it differs between tile coordinates."""
        return bool(self.tables) or any(self.strides)

    def expand(self, shape: tuple[int, ...]) -> Index:
        """Broadcasts to ``shape``, of which its own shape is a suffix up to axes of extent 1."""
        if shape == self.shape:
            return self
        pad = len(shape) - len(self.shape)
        strides = [0] * pad
        tables: dict[int, tuple[int, ...]] = {}
        constant = self.constant
        for axis, stride in enumerate(self.strides):
            if self.shape[axis] == shape[axis + pad]:
                strides.append(stride)
                if axis in self.tables:
                    tables[axis + pad] = self.tables[axis]
            else:  # an axis of extent 1 that is repeated
                strides.append(0)
                constant += self.tables[axis][0] if axis in self.tables else 0
        return Index(constant, self.terms, shape, tuple(strides), tables)

    def bounds(self) -> tuple[int, int]:
        """Smallest and largest value over all iterations and coordinates."""
        low = high = self.constant
        for loop, coefficient in self.terms.items():
            reach = coefficient * (loop.trips - 1)
            if reach < 0:
                low += reach
            else:
                high += reach
        for axis, stride in enumerate(self.strides):
            table = self.tables.get(axis)
            if table is not None:
                values = [entry + stride * position for position, entry in enumerate(table)]
                low += min(values)
                high += max(values)
                continue
            reach = stride * (self.shape[axis] - 1)
            if reach < 0:
                low += reach
            else:
                high += reach
        return low, high

    def affine(self) -> Affine:
        """The part that does not depend on the coordinates."""
        return Affine(self.constant, tuple(sorted((loop.id, value) for loop, value in self.terms.items() if value)))

    def dim_index(self) -> DimIndex:
        """As plain data."""
        strides = tuple((axis, stride) for axis, stride in enumerate(self.strides) if stride)
        return DimIndex(self.affine(), strides, tuple(sorted(self.tables.items())))

    def value(self) -> int:
        """The number it stands for.

        Raises:
            ConcreteLoopsNeeded: When that depends on a loop.
            KernelError: When it differs between tile coordinates.
        """
        if self.varies:
            raise errors.arange_in_control_flow()
        if self.terms:
            raise ConcreteLoopsNeeded(loop.site for loop in self.terms)
        return self.constant

    # Arithmetic.

    def __add__(self, other: Any) -> Any:
        if type(other) is int:
            return Index(self.constant + other, self.terms, self.shape, self.strides, self.tables)
        right = as_index(other)
        return self._not_affine(other, operator.add) if right is None else _combine(self, right, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        right = as_index(other)
        return self._not_affine(other, operator.sub) if right is None else _combine(self, right, -1)

    def __rsub__(self, other: Any) -> Any:
        left = as_index(other)
        if left is None:
            return self._not_affine(other, lambda mine, its: its - mine)
        return _combine(left, self, -1)

    def __neg__(self) -> Index:
        return self.scaled(-1)

    def __pos__(self) -> Index:
        return self

    def scaled(self, factor: int) -> Index:
        """Multiplied by an integer."""
        if factor == 1:
            return self
        if factor == 0:
            return Index(0, _NO_TERMS, self.shape, (0,) * len(self.shape))
        return Index(
            self.constant * factor,
            {loop: value * factor for loop, value in self.terms.items()},
            self.shape,
            tuple(stride * factor for stride in self.strides),
            {axis: tuple(entry * factor for entry in table) for axis, table in self.tables.items()},
        )

    def __mul__(self, other: Any) -> Any:
        right = as_index(other)
        if right is None:
            return self._not_affine(other, operator.mul)
        if not right.terms and not right.varies:
            product = self.scaled(right.constant)
        elif not self.terms and not self.varies:
            product = right.scaled(self.constant)
        else:
            sites = [loop.site for factor in (self, right) for loop in factor.terms]
            if not sites:
                raise errors.unsupported("the product of two nl.arange expressions as an index")
            raise ConcreteLoopsNeeded(sites)
        shape = broadcast_shapes(self.shape, right.shape)
        if shape is None:
            raise errors.shapes_not_broadcastable([("index", self.shape), ("index", right.shape)], "multiply")
        return product.expand(shape)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        divisor = as_index(other)
        if divisor is None:
            return self._not_affine(other, operator.floordiv)
        return self._divide(divisor.value())[0]

    def __mod__(self, other: Any) -> Any:
        divisor = as_index(other)
        if divisor is None:
            return self._not_affine(other, operator.mod)
        return self._divide(divisor.value())[1]

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def _divide(self, divisor: int) -> tuple[Index, Index]:
        """Quotient and remainder: what is divisible leaves the quotient, the rest must not depend on a loop."""
        if divisor == 0:
            raise ZeroDivisionError("integer division or modulo by zero")
        if divisor < 0:
            raise errors.unsupported("division of an index by a negative number")
        quotient = Index(
            self.constant // divisor,
            {loop: value // divisor for loop, value in self.terms.items() if value % divisor == 0},
            self.shape,
            tuple(
                stride // divisor if stride % divisor == 0 and axis not in self.tables else 0
                for axis, stride in enumerate(self.strides)
            ),
        )
        rest = self - quotient.scaled(divisor)
        low, high = rest.bounds()
        if low >= 0 and high < divisor:
            return quotient, rest
        if rest.terms:
            raise ConcreteLoopsNeeded(loop.site for loop in rest.terms)
        axes = [axis for axis, stride in enumerate(rest.strides) if stride or axis in rest.tables]
        if len(axes) != 1:
            raise errors.unsupported("// or % of an index that mixes several nl.arange axes")
        axis = axes[0]
        if self.shape[axis] > MAX_TABLE:
            raise errors.unsupported(f"// or % of an nl.arange of more than {MAX_TABLE} elements")
        table = rest.tables.get(axis) or (0,) * self.shape[axis]
        values = [rest.constant + rest.strides[axis] * i + entry for i, entry in enumerate(table)]
        zeros = (0,) * len(self.shape)
        carried = Index(0, _NO_TERMS, self.shape, zeros, {axis: tuple(v // divisor for v in values)})
        remainder = Index(0, _NO_TERMS, self.shape, zeros, {axis: tuple(v % divisor for v in values)})
        return quotient + carried, remainder

    def _not_affine(self, other: Any, operation: Any) -> Any:
        """Arithmetic with what is no integer: concrete for a loop index, not defined otherwise."""
        if isinstance(other, (float, np.floating)) and not self.varies:
            return operation(self.value(), other)
        return NotImplemented

    def __truediv__(self, other: Any) -> Any:
        return self.value() / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / self.value()

    def __rfloordiv__(self, other: Any) -> Any:
        return other // self.value()

    def __rmod__(self, other: Any) -> Any:
        return other % self.value()

    def __pow__(self, other: Any) -> Any:
        return self.value() ** other

    def __rpow__(self, other: Any) -> Any:
        return other ** self.value()

    def __abs__(self) -> Any:
        return self if self.bounds()[0] >= 0 else abs(self.value())

    def __and__(self, other: Any) -> Any:
        return self.value() & other

    def __lshift__(self, other: Any) -> Any:
        return self * (1 << as_int(other))

    def __rshift__(self, other: Any) -> Any:
        return self // (1 << as_int(other))

    def __xor__(self, other: Any) -> Any:
        return self.value() ^ other

    # Comparison.

    def __ge__(self, other: Any) -> Any:
        return _compare(self, other, lambda a, b: [_combine(a, b, -1)])

    def __gt__(self, other: Any) -> Any:
        return _compare(self, other, lambda a, b: [_combine(a, b, -1) + -1])

    def __le__(self, other: Any) -> Any:
        return _compare(self, other, lambda a, b: [_combine(b, a, -1)])

    def __lt__(self, other: Any) -> Any:
        return _compare(self, other, lambda a, b: [_combine(b, a, -1) + -1])

    def __eq__(self, other: object) -> Any:
        if other is None or isinstance(other, str):
            return False
        return _compare(self, other, lambda a, b: [_combine(a, b, -1), _combine(b, a, -1)])

    def __ne__(self, other: object) -> Any:
        if other is None or isinstance(other, str):
            return True
        return _compare(self, other, lambda a, b: [_combine(a, b, -1), _combine(b, a, -1)], negated=True)

    # Concrete uses.

    def __bool__(self) -> bool:
        low, high = self.bounds()
        if low > 0 or high < 0:
            return True
        return bool(self.value())

    def __index__(self) -> int:
        return self.value()

    def __int__(self) -> int:
        return self.value()

    def __float__(self) -> float:
        return float(self.value())

    def __hash__(self) -> int:
        return hash(self.value())

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec) if self.is_constant else repr(self)

    def __repr__(self) -> str:
        parts = [f"{value}*{loop.name}" if value != 1 else loop.name for loop, value in self.terms.items()]
        parts += [f"{stride}*arange({self.shape[axis]})" for axis, stride in enumerate(self.strides) if stride]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)

    def __getitem__(self, key: Any) -> Index:
        """Inserts axes: ``[:, None]`` and the like."""
        items = key if isinstance(key, tuple) else (key,)
        given = sum(1 for item in items if item is not None and item is not Ellipsis)
        expanded: list[Any] = []
        for item in items:
            if item is Ellipsis:
                expanded.extend([slice(None)] * (self.ndim - given))
            else:
                expanded.append(item)
        expanded.extend([slice(None)] * (self.ndim - sum(1 for item in expanded if item is not None)))
        shape: list[int] = []
        strides: list[int] = []
        tables: dict[int, tuple[int, ...]] = {}
        axis = 0
        for item in expanded:
            if item is None:
                shape.append(1)
                strides.append(0)
            elif isinstance(item, slice) and item == slice(None) and axis < self.ndim:
                if axis in self.tables:
                    tables[len(shape)] = self.tables[axis]
                shape.append(self.shape[axis])
                strides.append(self.strides[axis])
                axis += 1
            else:
                raise errors.unsupported("indexing nl.arange with anything but ':' and None")
        return Index(self.constant, self.terms, tuple(shape), tuple(strides), tables)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise errors.cannot_assign_to_index()

    def __iter__(self) -> Any:
        raise TypeError("an index is not iterable")

    def reshape(self, *shape: Any) -> Index:
        """Inserts or removes axes of extent 1."""
        target = tuple(as_int(size) for size in (shape[0] if isinstance(shape[0], (tuple, list)) else shape))
        kept = [axis for axis, size in enumerate(self.shape) if size != 1]
        if tuple(self.shape[axis] for axis in kept) != tuple(size for size in target if size != 1):
            raise errors.unsupported(f"reshape of an index of shape {self.shape} to {target}")
        strides = [0] * len(target)
        tables: dict[int, tuple[int, ...]] = {}
        for old, new in zip(kept, (axis for axis, size in enumerate(target) if size != 1), strict=True):
            strides[new] = self.strides[old]
            if old in self.tables:
                tables[new] = self.tables[old]
        return Index(self.constant, self.terms, target, tuple(strides), tables)


def _combine(left: Index, right: Index, sign: int) -> Index:
    """``left + sign * right``."""
    shape = broadcast_shapes(left.shape, right.shape)
    if shape is None:
        raise errors.shapes_not_broadcastable([("index", left.shape), ("index", right.shape)], "add")
    a, b = left.expand(shape), right.expand(shape)
    terms: Mapping[LoopVariable, int]
    if not b.terms:
        terms = a.terms
    else:
        merged = dict(a.terms)
        for loop, value in b.terms.items():
            total = merged.get(loop, 0) + sign * value
            if total:
                merged[loop] = total
            else:
                merged.pop(loop, None)
        terms = merged
    strides = tuple(x + sign * y for x, y in zip(a.strides, b.strides, strict=True))
    tables: Mapping[int, tuple[int, ...]] = a.tables
    if b.tables:
        joined = dict(a.tables)
        for axis, table in b.tables.items():
            base = joined.get(axis) or (0,) * len(table)
            joined[axis] = tuple(x + sign * y for x, y in zip(base, table, strict=True))
        tables = joined
    return Index(a.constant + sign * b.constant, terms, shape, strides, tables)


def as_index(value: Any) -> Index | None:
    """An integer or an index as an :class:`Index`; None for anything else."""
    if isinstance(value, Index):
        return value
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, (int, np.integer)):
        return Index(int(value))
    if isinstance(value, np.ndarray) and value.ndim == 0 and np.issubdtype(value.dtype, np.integer):
        return Index(int(value))
    return None


def as_int(value: Any) -> int:
    """A concrete integer; asks for unrolling when it depends on a loop.

    Raises:
        TypeError: When it is no integer.
    """
    if isinstance(value, (bool, int)):
        return int(value)
    return operator.index(value)


def arange(length: int, start: int = 0, step: int = 1) -> Index:
    """``start + step * coordinate`` over one axis."""
    return Index(start, _NO_TERMS, (length,), (step,))


@dataclass(frozen=True)
class Condition:
    """A conjunction: every term is non-negative. ``negated`` turns it into its opposite (``!=``)."""

    terms: tuple[Index, ...]
    negated: bool = False
    __array_ufunc__ = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Broadcast shape of the terms."""
        shape: tuple[int, ...] = ()
        for term in self.terms:
            joined = broadcast_shapes(shape, term.shape)
            if joined is None:
                raise errors.unsupported_mask_expression()
            shape = joined
        return shape

    def __and__(self, other: Any) -> Any:
        if isinstance(other, (bool, np.bool_)):
            return self if other else False
        if not isinstance(other, Condition):
            raise errors.unsupported_mask_expression()
        if self.negated or other.negated:
            raise errors.mask_not_equal()
        return Condition(self.terms + other.terms)

    __rand__ = __and__
    __mul__ = __and__

    def __or__(self, other: Any) -> Any:
        raise errors.mask_logical_or()

    __ror__ = __or__

    def __invert__(self) -> Condition:
        if self.negated:
            return Condition(self.terms)
        if len(self.terms) != 1:
            raise errors.unsupported_mask_expression()
        return Condition((-self.terms[0] + -1,))

    def __bool__(self) -> bool:
        if any(term.varies for term in self.terms):
            raise errors.arange_in_control_flow()
        undecided: list[Site] = []
        for term in self.terms:
            low, high = term.bounds()
            if high < 0:
                return self.negated
            if low < 0:
                undecided += [loop.site for loop in term.terms]
        if undecided:
            raise ConcreteLoopsNeeded(undecided)
        return not self.negated

    def __getitem__(self, key: Any) -> Condition:
        return Condition(tuple(term[key] for term in self.terms), self.negated)


def _compare(left: Index, other: Any, build: Any, negated: bool = False) -> Any:
    right = as_index(other)
    if right is None:
        if isinstance(other, (float, np.floating)) and not left.varies:
            number = float(other)
            if number.is_integer():
                right = Index(int(number))
            else:
                raise ConcreteLoopsNeeded(loop.site for loop in left.terms)
        else:
            return NotImplemented
    terms = tuple(build(left, right))
    if all(term.is_constant for term in terms) and not any(term.shape for term in terms):
        return all(term.constant >= 0 for term in terms) != negated
    return Condition(terms, negated)


@dataclass(frozen=True)
class DynamicSlice:
    """``nl.ds(start, size)``: ``size`` positions from ``start``."""

    start: Any
    size: int
    step: int = 1
