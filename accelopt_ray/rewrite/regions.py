"""What the analysis knows about a kernel: loops, buffers, regions of buffers, and operations on them."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cached_property

from accelopt_ray.outcome import StrEnum
from accelopt_ray.rewrite.poly import ONE, ZERO, Poly
from accelopt_ray.rewrite.syntax import walk


class Space(StrEnum):
    """Where a buffer lives."""

    HBM = "hbm"
    SBUF = "sbuf"
    PSUM = "psum"


@dataclass(frozen=True)
class Axis:
    """How a tile axis walks along one buffer dimension.

    Attributes:
        position: Tile axis (0 is the partition axis).
        stride: Elements per step.
        length: Number of steps.
    """

    position: int
    stride: int
    length: Poly


@dataclass(frozen=True)
class Dim:
    """Positions touched in one buffer dimension: ``start`` plus the walks of ``axes``."""

    start: Poly = ZERO
    axes: tuple[Axis, ...] = ()

    @property
    def is_point(self) -> bool:
        """Whether a single position is touched."""
        return not self.axes

    def covers(self, length: Poly) -> bool:
        """Whether it is exactly ``0 .. length - 1`` in steps of one."""
        return self.start == ZERO and len(self.axes) == 1 and self.axes[0].stride == 1 and self.axes[0].length == length

    def rename(self, mapping: dict[str, str]) -> Dim:
        """Renames loop indices."""
        return Dim(self.start.rename(mapping), self.axes)


@dataclass(eq=False)
class Loop:
    """A ``for`` loop over a counted range.

    Attributes:
        node: The statement.
        index: Name of the loop index.
        kind: ``affine_range``, ``sequential_range``, ``static_range`` or ``range``.
        start, step, trips: The range; ``trips`` is None when it is unknown.
        block: The statement list that holds ``node``.
    """

    node: ast.For
    index: str
    kind: str
    start: Poly
    step: Poly
    trips: Poly | None
    block: list[ast.stmt]

    @property
    def parallel(self) -> bool:
        """Whether the source declares the iterations independent (apart from reductions)."""
        return self.kind == "affine_range"


@dataclass(eq=False)
class Buffer:
    """A tensor: a kernel argument, a declared array, or the result of an operation bound to a name.

    Attributes:
        name: Name in the source.
        space: Memory space.
        shape: Extents, or None where unknown.
        block_dims: Leading dimensions before the partition dimension (on chip).
        declaration: The statement that allocates it, if any.
        loops: Loops open where it is created.
        origin: ``argument``, ``declared``, ``constant`` or ``value`` (bound result).
        fill: Source text of the initial value, or None.
    """

    name: str
    space: Space
    shape: tuple[Poly, ...] | None
    block_dims: int = 0
    declaration: ast.stmt | None = None
    block: list[ast.stmt] | None = None
    loops: tuple[Loop, ...] = ()
    origin: str = "declared"
    fill: str | None = None
    writes: list[Op] = field(default_factory=list)
    reads: list[tuple[Op, str]] = field(default_factory=list)
    returned: bool = False

    @property
    def tile_bytes(self) -> int | None:
        """Bytes per partition of one block, or None when unknown."""
        if self.shape is None or len(self.shape) <= self.block_dims:
            return None
        total = 4
        for extent in self.shape[self.block_dims + 1 :]:
            if extent.value is None:
                return None
            total *= extent.value
        return total


@dataclass(frozen=True, eq=False)
class Ref:
    """A region of a buffer as one operand names it.

    Attributes:
        buffer: The buffer.
        dims: One entry per buffer dimension, or None when the region is not understood.
        node: The expression in the source.
    """

    buffer: Buffer
    dims: tuple[Dim, ...] | None
    node: ast.expr

    def same_region(self, other: Ref) -> bool:
        """Whether both provably name the same elements in the same tile layout."""
        return self.buffer is other.buffer and self.dims is not None and self.dims == other.dims

    @property
    def is_whole(self) -> bool:
        """Whether it is provably the whole buffer."""
        extents = self.buffer.shape
        if self.dims is None or extents is None:
            return False
        return all(dim.covers(extent) for dim, extent in zip(self.dims, extents, strict=True))

    @cached_property
    def shape(self) -> tuple[Poly, ...] | None:
        """Extents of the tile, partition axis first; a tile has at least two axes."""
        if self.dims is None:
            return None
        lengths: dict[int, Poly] = {}
        for dim in self.dims:
            for axis in dim.axes:
                known = lengths.get(axis.position)
                if known is not None and known != axis.length:
                    return None
                lengths[axis.position] = axis.length
        if not lengths:
            return None
        rank = max(max(lengths) + 1, 2)
        return tuple(lengths.get(position, ONE) for position in range(rank))

    @property
    def indices(self) -> frozenset[str]:
        """Symbols in the region's starts (loop indices above all)."""
        if self.dims is None:
            return frozenset(n.id for n in walk(self.node) if isinstance(n, ast.Name))
        return frozenset(name for dim in self.dims for name in dim.start.symbols)

    @property
    def text(self) -> str:
        """Source text."""
        return ast.unparse(self.node)


@dataclass(frozen=True)
class Number:
    """A compile-time numeric operand.

    Attributes:
        value: Its value as a Python number.
        node: The expression in the source.
    """

    value: float
    node: ast.expr = field(compare=False, repr=False)

    @property
    def text(self) -> str:
        """Source text."""
        return ast.unparse(self.node)


@dataclass(frozen=True, eq=False)
class Opaque:
    """An operand the analysis does not understand, such as a runtime scalar argument."""

    node: ast.expr

    @property
    def text(self) -> str:
        """Source text."""
        return ast.unparse(self.node)


Argument = Ref | Number | Opaque


@dataclass(eq=False)
class Op:
    """One instruction-like statement.

    Attributes:
        node: The statement.
        block: The statement list that holds it.
        loops: Enclosing loops, outermost first.
        kind: Canonical operation (``load``, ``store``, ``activation``, ``tensor_scalar``, ``tensor_tensor`` ...).
        dest: The region written.
        args: Operands by canonical name.
        attrs: Static attributes by canonical name (``op``, ``op0``, ``axis`` ...), as text.
        mask: Source text of the mask, or ``""``.
        accumulate: Whether the result is added to the destination.
        position: Program order.
        call: The call or operator expression.
        function: Dotted canonical name of the function called, such as ``nl.multiply``.
        mask_symbols: Loop indices and sizes that the mask depends on.
        mask_axes: Tile axes that the mask depends on.
    """

    node: ast.stmt
    block: list[ast.stmt]
    loops: tuple[Loop, ...]
    kind: str
    dest: Ref | None
    args: dict[str, Argument]
    attrs: dict[str, str]
    mask: str
    accumulate: bool
    position: int
    call: ast.expr
    function: str = ""
    mask_symbols: frozenset[str] = frozenset()
    mask_axes: frozenset[int] = frozenset()

    def ref(self, name: str) -> Ref | None:
        """The named operand if it is a region."""
        value = self.args.get(name)
        return value if isinstance(value, Ref) else None

    def number(self, name: str) -> float | None:
        """The named operand if it is a compile-time number."""
        value = self.args.get(name)
        return value.value if isinstance(value, Number) else None

    def flag(self, name: str) -> bool:
        """Whether a boolean attribute is set."""
        return self.attrs.get(name, "False") == "True"

    @property
    def path(self) -> tuple[int, ...]:
        """Identity of the enclosing loops."""
        return tuple(id(loop) for loop in self.loops)

    @property
    def line(self) -> int:
        """Line of the statement in the text that was parsed."""
        return getattr(self.node, "lineno", 0)

    def reads(self) -> list[Ref]:
        """All regions it reads, a read-modify-write destination not included."""
        return [value for value in self.args.values() if isinstance(value, Ref)]
