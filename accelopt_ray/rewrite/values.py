"""Static values in a kernel: sizes, constants, index grids and names, evaluated without running anything."""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass

from accelopt_ray.rewrite.calls import canonical_module
from accelopt_ray.rewrite.poly import ZERO, Poly
from accelopt_ray.rewrite.regions import Axis, Buffer, Dim, Ref
from accelopt_ray.rewrite.syntax import names_read

_TILE_SIZES = {
    "pmax": 128,
    "psum_fmax": 512,
    "gemm_stationary_fmax": 128,
    "gemm_moving_fmax": 512,
    "bn_stats_fmax": 512,
}


@dataclass(frozen=True)
class Grid:
    """An index expression built from ``arange``: a start and walks along tile axes.

    ``rank`` is 1 for a bare ``arange`` that has not been given its tile axis yet.
    """

    start: Poly
    axes: tuple[Axis, ...]
    rank: int


@dataclass(frozen=True)
class Span:
    """``nl.ds(start, size)``."""

    start: Poly
    size: Poly


Static = Poly | float | Grid | Span | Ref | tuple  # type: ignore[type-arg]


@dataclass(frozen=True)
class Selection:
    """What a condition on positions depends on.

    Attributes:
        symbols: Loop indices and sizes.
        axes: Tile axes; all that a tile can have where the condition is not understood.
    """

    symbols: frozenset[str] = frozenset()
    axes: frozenset[int] = frozenset()

    def __or__(self, other: Selection) -> Selection:
        return Selection(self.symbols | other.symbols, self.axes | other.axes)


_ALL_AXES = frozenset(range(8))


class Names:
    """What the names of one kernel stand for at the current point of the walk."""

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}
        self.values: dict[str, Static] = {}
        self.views: dict[str, Buffer] = {}
        self.loop_symbols: set[str] = set()
        self.limits: dict[str, int] = {}
        #: Conditions that a name stands for, by what they depend on.
        self.conditions: dict[str, Selection] = {}

    def dotted(self, node: ast.expr) -> str:
        """Canonical dotted name of a function or module reference, or ``""``."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self.values:
            return ""
        root = self.modules.get(node.id, node.id)
        parts.append(root)
        full = ".".join(reversed(parts))
        head, _, last = full.rpartition(".")
        return f"{canonical_module(head)}.{last}" if head else full

    def evaluate(self, node: ast.expr | None) -> Static | None:
        """Value of an expression, or None when it is not static or not understood."""
        if node is None:
            return None
        if isinstance(node, ast.Constant):
            if isinstance(node.value, bool) or node.value is None:
                return None
            if isinstance(node.value, int):
                return Poly.of(node.value)
            return node.value if isinstance(node.value, float) else None
        if isinstance(node, ast.Name):
            return self.values.get(node.id)
        if isinstance(node, ast.Tuple):
            items = [self.evaluate(item) for item in node.elts]
            return None if any(item is None for item in items) else tuple(items)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return _negate(self.evaluate(node.operand))
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        return None

    def poly(self, node: ast.expr | None) -> Poly | None:
        """The expression as a size or index; an expression of plain sizes that is not polynomial becomes opaque."""
        value = self.evaluate(node)
        return value if isinstance(value, Poly) else None

    def at_most(self, size: Poly, limit: int) -> bool:
        """Whether a size is provably no larger than ``limit``."""
        if size.value is not None:
            return size.value <= limit
        if len(size.terms) == 1 and len(size.terms[0][0]) == 1:
            known = self.limits.get(size.terms[0][0][0])
            return known is not None and known * size.terms[0][1] <= limit
        return False

    def selection(self, node: ast.expr) -> Selection:
        """What a condition, such as a mask, depends on."""
        if isinstance(node, ast.Name) and node.id in self.conditions:
            return self.conditions[node.id]
        value = self.evaluate(node)
        if isinstance(value, float):
            return Selection()
        if isinstance(value, Poly):
            return Selection(value.symbols)
        if isinstance(value, Grid) and value.rank > 1:
            return Selection(value.start.symbols, frozenset(axis.position for axis in value.axes))
        found = Selection()
        if isinstance(node, (ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp)):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    found |= self.selection(child)
            return found
        return Selection(frozenset(names_read(node)), _ALL_AXES)

    def learn_limit(self, name: str, value: ast.expr) -> None:
        """Learns the upper limit of ``name = max(w for w in range(a, b) if ...)``."""
        if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "max"):
            return
        generator = value.args[0] if value.args else None
        if not isinstance(generator, ast.GeneratorExp) or not isinstance(generator.elt, ast.Name):
            return
        span = generator.generators[0].iter
        if isinstance(span, ast.Call) and ast.unparse(span.func) == "range" and len(span.args) >= 2:
            stop = self.poly(span.args[1])
            if stop is not None and stop.value is not None:
                self.limits[name] = stop.value - 1

    def _binary(self, node: ast.BinOp) -> Static | None:
        left, right = self.evaluate(node.left), self.evaluate(node.right)
        if isinstance(left, (Ref, tuple)) or isinstance(right, (Ref, tuple)) or left is None or right is None:
            return None
        if isinstance(left, Span) or isinstance(right, Span):
            return None
        if isinstance(left, Grid) or isinstance(right, Grid):
            return _grid_binary(node.op, left, right)
        if isinstance(left, Poly) and isinstance(right, Poly):
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            if isinstance(node.op, ast.Mult):
                return left * right
            if (left + right).depends_on(self.loop_symbols):
                return None
        return _arithmetic(node, left, right)

    def _attribute(self, node: ast.Attribute) -> Static | None:
        dotted = self.dotted(node)
        head, _, last = dotted.rpartition(".")
        if head.endswith("tile_size") and last in _TILE_SIZES:
            return Poly.of(_TILE_SIZES[last])
        if node.attr == "shape":
            base = self.evaluate(node.value)
            if isinstance(base, Ref) and base.shape is not None and base.buffer.shape is not None:
                return base.buffer.shape if base.node is node.value else base.shape
        return None

    def _subscript(self, node: ast.Subscript) -> Static | None:
        base = self.evaluate(node.value)
        if base is None and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            return Poly.symbol(ast.unparse(node)) if isinstance(node.slice, ast.Constant) else None
        if isinstance(base, tuple):
            index = self.poly(node.slice)
            number = index.value if index is not None else None
            if number is not None and -len(base) <= number < len(base):
                element: Static = base[number]
                return element
            return None
        if isinstance(base, Grid) and base.rank == 1:
            return _place_grid(base, node.slice)
        if isinstance(base, Ref):
            return self.region(base, node)
        if ast.unparse(node.value).endswith("mgrid"):
            return self._mgrid(node.slice)
        return None

    def _mgrid(self, index: ast.expr) -> Static | None:
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        grids: list[Grid] = []
        for position, part in enumerate(parts):
            if not isinstance(part, ast.Slice):
                return None
            start = self.poly(part.lower) if part.lower is not None else ZERO
            stop = self.poly(part.upper)
            if start is None or stop is None or part.step is not None:
                return None
            grids.append(Grid(start, (Axis(position, 1, stop - start),), len(parts)))
        return tuple(grids)

    def _call(self, node: ast.Call) -> Static | None:
        name = self.dotted(node.func)
        if name == "nl.arange" and 1 <= len(node.args) <= 2 and not node.keywords:
            start = self.poly(node.args[0]) if len(node.args) == 2 else ZERO
            stop = self.poly(node.args[-1])
            return None if start is None or stop is None else Grid(start, (Axis(0, 1, stop - start),), 1)
        if name in ("nl.par_dim", "par_dim", "neuronxcc.nki.language.par_dim") and node.args:
            return self.evaluate(node.args[0])
        if name == "nl.ds" and len(node.args) == 2:
            first, size = self.poly(node.args[0]), self.poly(node.args[1])
            return None if first is None or size is None else Span(first, size)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "type" and len(node.args) == 1:
            return self.evaluate(node.args[0])  # np.dtype(np.float32).type(x)
        if name in ("np.float32", "float", "int") and len(node.args) == 1:
            return self.evaluate(node.args[0])
        if name in ("math.sqrt", "np.sqrt") and len(node.args) == 1:
            value = _number(self.evaluate(node.args[0]))
            return math.sqrt(value) if value is not None and value >= 0 else None
        if isinstance(node.func, ast.Attribute) and node.func.attr == "reshape":
            return self._reshape(node)
        return None

    def _reshape(self, node: ast.Call) -> Static | None:
        base = self.evaluate(node.func.value)  # type: ignore[attr-defined]
        if not isinstance(base, Ref) or len(node.args) != 1:
            return None
        shape = self.evaluate(node.args[0])
        text = ast.unparse(node)
        view = self.views.get(text)
        if view is None:
            known = shape if isinstance(shape, tuple) and all(isinstance(item, Poly) for item in shape) else None
            view = Buffer(base.buffer.name, base.buffer.space, known, origin=base.buffer.origin)
            self.views[text] = view
        return whole(view, node)

    def region(self, base: Ref, node: ast.Subscript) -> Ref:
        """The region that ``base[index]`` names; its ``dims`` is None when the index is not understood."""
        buffer = base.buffer
        if isinstance(node.slice, ast.Constant) and node.slice.value is Ellipsis:
            return Ref(buffer, base.dims, node)
        unknown = Ref(buffer, None, node)
        full = whole(buffer, node)
        is_whole = base.dims is None or base.dims == full.dims
        if not is_whole or (buffer.shape is None and buffer.origin != "argument"):
            return unknown
        parts = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        rank = len(buffer.shape) if buffer.shape is not None else len(parts)
        if len(parts) > rank:
            return unknown
        parts += [ast.Slice()] * (rank - len(parts))
        dims: list[Dim] = []
        slices = 0
        for number, part in enumerate(parts):
            extent = buffer.shape[number] if buffer.shape is not None else None
            dim = self._dim(part, extent, slices)
            if dim is None:
                return unknown
            if isinstance(part, ast.Slice) or isinstance(self.evaluate(part), Span):
                slices += 1
            dims.append(dim)
        return Ref(buffer, tuple(dims), node)

    def _dim(self, part: ast.expr, extent: Poly | None, position: int) -> Dim | None:
        if isinstance(part, ast.Slice):
            if part.step is not None:
                return None
            start = self.poly(part.lower) if part.lower is not None else ZERO
            stop = self.poly(part.upper) if part.upper is not None else extent
            if start is None or stop is None:
                return None
            return Dim(start, (Axis(position, 1, stop - start),))
        value = self.evaluate(part)
        if isinstance(value, Poly):
            return Dim(value)
        if isinstance(value, Span):
            return Dim(value.start, (Axis(position, 1, value.size),))
        if isinstance(value, Grid) and value.rank > 1:
            return Dim(value.start, tuple(sorted(value.axes, key=lambda axis: axis.position)))
        return None


def whole(buffer: Buffer, node: ast.expr) -> Ref:
    """The region that a bare name stands for."""
    if buffer.shape is None or buffer.block_dims:
        return Ref(buffer, None, node)
    dims = tuple(Dim(ZERO, (Axis(position, 1, extent),)) for position, extent in enumerate(buffer.shape))
    return Ref(buffer, dims, node)


def _place_grid(grid: Grid, index: ast.expr) -> Grid | None:
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    positions = [number for number, part in enumerate(parts) if isinstance(part, ast.Slice)]
    others = [part for part in parts if not isinstance(part, ast.Slice)]
    if len(positions) != 1 or any(not (isinstance(o, ast.Constant) and o.value is None) for o in others):
        return None
    axis = grid.axes[0]
    return Grid(grid.start, (Axis(positions[0], axis.stride, axis.length),), len(parts))


def _grid_binary(op: ast.operator, left: Static, right: Static) -> Grid | None:
    if isinstance(op, ast.Mult):
        grid, factor = (left, right) if isinstance(left, Grid) else (right, left)
        number = factor.value if isinstance(factor, Poly) else None
        if not isinstance(grid, Grid) or number is None or not isinstance(factor, Poly):
            return None
        axes = tuple(Axis(axis.position, axis.stride * number, axis.length) for axis in grid.axes)
        return Grid(grid.start * factor, axes, grid.rank)
    if isinstance(op, ast.Sub) and isinstance(left, Grid) and isinstance(right, Poly):
        return Grid(left.start - right, left.axes, left.rank)
    if not isinstance(op, ast.Add):
        return None
    if isinstance(left, Grid) and isinstance(right, Grid):
        if {a.position for a in left.axes} & {a.position for a in right.axes}:
            return None
        return Grid(left.start + right.start, left.axes + right.axes, max(left.rank, right.rank))
    grid, offset = (left, right) if isinstance(left, Grid) else (right, left)
    if not isinstance(grid, Grid) or not isinstance(offset, Poly):
        return None
    return Grid(grid.start + offset, grid.axes, grid.rank)


def _negate(value: Static | None) -> Static | None:
    if isinstance(value, (Poly, float)):
        return -value
    return None


def _number(value: Static | None) -> float | None:
    if isinstance(value, Poly):
        return None if value.value is None else float(value.value)
    return value if isinstance(value, float) else None


def _arithmetic(node: ast.BinOp, left: Static, right: Static) -> Static | None:
    a, b = _number(left), _number(right)
    integers = isinstance(left, Poly) and isinstance(right, Poly)
    if a is None or b is None:
        if integers and isinstance(node.op, (ast.FloorDiv, ast.Mod)):
            return Poly.symbol(ast.unparse(node))
        return None
    try:
        if isinstance(node.op, ast.FloorDiv):
            result = a // b
        elif isinstance(node.op, ast.Div):
            return a / b
        elif isinstance(node.op, ast.Pow):
            result = a**b
            if not integers or b < 0:
                return float(result)
        elif isinstance(node.op, ast.Mod):
            result = a % b
        else:
            operations = {ast.Add: a + b, ast.Sub: a - b, ast.Mult: a * b}
            return operations.get(type(node.op))
    except (ZeroDivisionError, OverflowError, ValueError):
        return None
    return Poly.of(int(result)) if integers else float(result)
