"""Reordering a loop nest: which loops each statement needs, and a new nest that runs it under just those.

The unit is a leaf, a statement without loops of its own. A leaf needs the loops its subscripts depend on and those its
inputs needed. A new nest puts chosen loops outermost; leaves that do not need them move in front (computed once and
kept), all others run inside under the loops they need. A tile whose readers end up in another loop body than its writer
gets one block dimension per loop between them.

All loops must be ``affine_range``: their iterations are independent apart from reductions, so any order is legal.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.normalise import refs_of, render_ref, replace_ref
from accelopt_ray.rewrite.poly import ZERO, Poly
from accelopt_ray.rewrite.regions import Axis, Buffer, Dim, Loop, Op, Ref, Space
from accelopt_ray.rewrite.syntax import names_read, statement, walk


class NotReorderable(Exception):
    """The nest holds something whose reordering cannot be proved legal."""


@dataclass(eq=False)
class Leaf:
    """A statement of the nest.

    Attributes:
        op: Its operation.
        loops: Loops of the nest around it, outermost first.
        needs: The loops its effect depends on, in the nest's order.
        path: Loops it will run under.
    """

    op: Op
    loops: tuple[Loop, ...]
    needs: tuple[Loop, ...] = ()
    path: tuple[Loop, ...] = ()


@dataclass(eq=False)
class Nest:
    """A loop with everything inside it, as leaves.

    Attributes:
        root: The outermost loop.
        leaves: Operations in program order.
        locals: Buffers created inside.
        order: All loops of the nest in program order.
    """

    kernel: Kernel
    root: Loop
    leaves: list[Leaf] = field(default_factory=list)
    locals: list[Buffer] = field(default_factory=list)
    order: list[Loop] = field(default_factory=list)

    def needs_of(self, buffer: Buffer) -> tuple[Loop, ...]:
        """The loops on which the content of a buffer created inside depends."""
        depth = self.depth
        enclosing = set(buffer.loops[depth:])
        needed: set[Loop] = set()
        for leaf in self.leaves:
            if leaf.op in buffer.writes:
                needed |= set(leaf.needs)
        return self.sorted(needed & enclosing)

    @property
    def depth(self) -> int:
        """Number of loops around the nest."""
        first = self.leaves[0].op.loops
        return next(number for number, loop in enumerate(first) if loop is self.root)

    def sorted(self, loops: set[Loop]) -> tuple[Loop, ...]:
        """Loops in the nest's order."""
        return tuple(loop for loop in self.order if loop in loops)


def read_nest(kernel: Kernel, root: Loop) -> Nest:
    """Collects the leaves of a nest and the loops each needs.

    Raises:
        NotReorderable: A statement is not understood, or a loop is not ``affine_range``.
    """
    nest = Nest(kernel, root)
    _check_statements(root.node)
    for loop in kernel.loops:
        if _contains(root.node, loop.node):
            if not loop.parallel or loop.trips is None or loop.trips.depends_on(kernel.names.loop_symbols):
                raise NotReorderable(f"loop {loop.index} is not an independent counted loop")
            nest.order.append(loop)
    inside = set(nest.order)
    for op in kernel.ops:
        if root in op.loops:
            if op.kind == "unknown" or any(loop.kind == "if" for loop in op.loops):
                raise NotReorderable("a statement is not understood")
            nest.leaves.append(Leaf(op, tuple(loop for loop in op.loops if loop in inside)))
    if not nest.leaves:
        raise NotReorderable("the nest is empty")
    nest.locals = [buffer for buffer in kernel.buffers if root in buffer.loops]
    for leaf in nest.leaves:
        leaf.needs = _needs(nest, leaf)
    return nest


def _check_statements(root: ast.For) -> None:
    for node in walk(root):
        if isinstance(node, ast.stmt) and not isinstance(
            node, (ast.For, ast.Assign, ast.AugAssign, ast.Expr, ast.Pass)
        ):
            raise NotReorderable("the nest holds a statement other than loops and assignments")


def _contains(root: ast.AST, node: ast.AST) -> bool:
    return any(child is node for child in walk(root))


def _needs(nest: Nest, leaf: Leaf) -> tuple[Loop, ...]:
    by_index = {loop.index: loop for loop in leaf.loops}
    needed: set[Loop] = set()
    op = leaf.op
    refs = [*op.reads(), *([op.dest] if op.dest is not None else [])]
    for ref in refs:
        if ref.dims is None and (nest.root in ref.buffer.loops or ref is op.dest or ref.buffer.block_dims):
            raise NotReorderable(f"the region {ref.text} is not understood")
        needed |= {by_index[name] for name in ref.indices if name in by_index}
    for ref in op.reads():
        if nest.root in ref.buffer.loops:
            needed |= set(nest.needs_of(ref.buffer)) & set(leaf.loops)
    needed |= {loop for index, loop in by_index.items() if index in op.mask_symbols}
    if op.kind in ("loop_reduce", "update") or op.accumulate:
        _check_reduction(nest, leaf, needed)
    return nest.sorted(needed)


def _check_reduction(nest: Nest, leaf: Leaf, needed: set[Loop]) -> None:
    """A reduction must run exactly as often as before."""
    dest = leaf.op.dest
    assert dest is not None
    if leaf.op.kind == "loop_reduce":
        names = names_read(ast.parse(leaf.op.attrs.get("loop_indices", ""), mode="eval"))
        listed = {loop for loop in leaf.loops if loop.index in names}
        if not listed <= needed:
            raise NotReorderable("a reduction runs over a loop its operand does not depend on")
        return
    inside = set(leaf.loops) - set(dest.buffer.loops)
    if (leaf.op.kind == "update" and leaf.op.attrs.get("op") != "add") or not inside <= needed:
        raise NotReorderable("an accumulation runs over a loop its operands do not depend on")


@dataclass(eq=False)
class Body:
    """A loop of the new nest (or the level around it) under construction."""

    loop: Loop | None
    items: list[Leaf | Body] = field(default_factory=list)
    statements: list[ast.stmt] = field(default_factory=list)

    def holds(self, ops: set[int]) -> bool:
        """Whether one of the operations lies below."""
        return any(item.holds(ops) if isinstance(item, Body) else id(item.op) in ops for item in self.items)


@dataclass
class Schedule:
    """The new nest.

    Attributes:
        prologue: What does not need the outer loops.
        main: The reordered nest.
        anchor: The body directly under all outer loops, where a fused consumer goes.
    """

    prologue: Body
    main: Body
    anchor: Body


def reorder(nest: Nest, outer: tuple[Loop, ...], repeat: frozenset[int] = frozenset()) -> Schedule:
    """Plans the nest with ``outer`` outermost.

    Args:
        nest: The nest; its subscripts are edited where tiles get block dimensions.
        outer: Loops to put outermost, in this order.
        repeat: Ids of operations that do not need the outer loops but run inside them all the same.

    Raises:
        NotReorderable: A leaf needs an inner outer-loop without the ones around it.
    """
    chosen = set(outer)
    for leaf in nest.leaves:
        needed = set(leaf.needs)
        rest = nest.sorted(needed - chosen)
        if id(leaf.op) in repeat:
            prefix: tuple[Loop, ...] = outer[: 1 + max((outer.index(x) for x in needed & chosen), default=-1)]
            leaf.path = (*(prefix or outer[:1]), *rest)
            continue
        if not needed & chosen:
            leaf.path = rest
            continue
        depth = 1 + max(outer.index(loop) for loop in needed & chosen)
        if set(outer[:depth]) - needed and (leaf.op.accumulate or leaf.op.kind in ("loop_reduce", "update")):
            raise NotReorderable("an accumulation would be repeated")
        leaf.path = (*outer[:depth], *rest)
    return build(nest, outer, nest.leaves)


def build(nest: Nest, outer: tuple[Loop, ...], leaves: Sequence[Leaf], psum_tiles: int = 1) -> Schedule:
    """Builds the nest from leaves that know their paths.

    Args:
        nest: The nest; tiles get block dimensions where writer and reader end up in different bodies.
        outer: The loops around everything but the prologue.
        leaves: The nest's leaves in an order that respects their dependences.
        psum_tiles: How many blocks a PSUM tile may get.

    Raises:
        NotReorderable: A tile cannot be kept where it would have to be.
    """
    chosen = set(outer)
    prologue, main = Body(None), Body(None)
    for leaf in leaves:
        tree = main if leaf.path and leaf.path[0] in chosen else prologue
        _insert(tree, leaf)
    anchor = main
    for loop in outer:
        found = next((i for i in anchor.items if isinstance(i, Body) and i.loop is loop), None)
        if found is None:
            raise NotReorderable("no statement runs under all outer loops")
        anchor = found
    for buffer in nest.locals:
        _place_buffer(nest, buffer, prologue, main, outer, psum_tiles)
    return Schedule(prologue, main, anchor)


def producers_of(leaf: Leaf) -> set[int]:
    """Ids of the earlier operations that write what a leaf reads or adds to."""
    found: set[int] = set()
    for ref in [*leaf.op.reads(), *([leaf.op.dest] if leaf.op.dest is not None else [])]:
        found |= {id(op) for op in ref.buffer.writes if op is not leaf.op and op.position < leaf.op.position}
    return found


def _insert(tree: Body, leaf: Leaf) -> None:
    """Appends a leaf under its path, sharing open loops; an independent leaf goes in front of the open inner loop."""
    node = tree
    producers = producers_of(leaf)
    at: int | None = None
    for loop in leaf.path:
        # The last body of the loop: what an earlier one lacks may be in between.
        child = next(
            (
                number
                for number in range(len(node.items) - 1, -1, -1)
                if isinstance(item := node.items[number], Body) and item.loop is loop
            ),
            None,
        )
        if child is not None:
            blocked = any(
                (isinstance(item, Body) and item.holds(producers))
                or (isinstance(item, Leaf) and id(item.op) in producers)
                for item in node.items[child + 1 :]
            )
            if not blocked:
                body = node.items[child]
                assert isinstance(body, Body)
                node, at = body, None
                continue
        fresh = Body(loop)
        node.items.append(fresh)
        node = fresh
    while node.items:
        last = node.items[len(node.items) - 1 if at is None else at - 1] if at != 0 else None
        if isinstance(last, Body) and not last.holds(producers):
            at = (len(node.items) if at is None else at) - 1
            continue
        break
    node.items.insert(len(node.items) if at is None else at, leaf)


def _place_buffer(
    nest: Nest, buffer: Buffer, prologue: Body, main: Body, outer: tuple[Loop, ...], psum_tiles: int
) -> None:
    uses = [leaf for leaf in nest.leaves if any(ref.buffer is buffer for ref in _regions(leaf.op))]
    if not uses:
        return
    common = list(uses[0].path)
    for leaf in uses[1:]:
        shared = 0
        while shared < min(len(common), len(leaf.path)) and common[shared] is leaf.path[shared]:
            shared += 1
        common = common[:shared]
    trees = {id(prologue if _lies_in(prologue, leaf) else main) for leaf in uses}
    if len(trees) > 1:
        common = []
    common = _same_bodies(uses, common, prologue, main)
    needed = nest.needs_of(buffer)
    while common and common[-1] not in needed and common[-1] not in outer:
        common.pop()
    extra = tuple(loop for loop in needed if loop not in common)
    if buffer.fill is not None and set(common) - set(needed) - set(buffer.loops):
        raise NotReorderable(f"{buffer.name} would be cleared more often than before")
    if extra and buffer.space is Space.PSUM and not _few(nest.kernel, extra, psum_tiles):
        raise NotReorderable(f"{buffer.name} would occupy a PSUM bank for every iteration of {extra[0].index}")
    if buffer.origin == "value" and not extra:
        return
    if extra:
        _expand(nest, buffer, extra)
    target = main if _lies_in(main, uses[0]) and common else prologue
    for loop in common:
        target = next(
            item
            for item in target.items
            if isinstance(item, Body) and item.loop is loop and item.holds({id(uses[0].op)})
        )
    declaration = _declaration(nest.kernel, buffer, extra)
    target.statements.append(declaration)


def _few(kernel: Kernel, loops: tuple[Loop, ...], most: int) -> bool:
    """Whether loops together provably have at most ``most`` iterations."""
    total = 1
    for loop in loops:
        if loop.trips is None:
            return False
        limit = next((n for n in range(1, most + 1) if kernel.names.at_most(loop.trips, n)), None)
        if limit is None:
            return False
        total *= limit
    return total <= most


def _same_bodies(uses: list[Leaf], common: list[Loop], prologue: Body, main: Body) -> list[Loop]:
    """Shortens a common path to the bodies that really hold all uses (a loop may have been split)."""
    kept: list[Loop] = []
    node = main if common and _lies_in(main, uses[0]) else prologue
    for loop in common:
        bodies = [item for item in node.items if isinstance(item, Body) and item.loop is loop]
        holder = [body for body in bodies if all(body.holds({id(leaf.op)}) for leaf in uses)]
        if not holder:
            break
        kept.append(loop)
        node = holder[0]
    return kept


def _lies_in(tree: Body, leaf: Leaf) -> bool:
    return tree.holds({id(leaf.op)})


def _regions(op: Op) -> list[Ref]:
    return [*op.reads(), *([op.dest] if op.dest is not None else [])]


def _expand(nest: Nest, buffer: Buffer, extra: tuple[Loop, ...]) -> None:
    """Gives a buffer one block dimension per loop in front of its own dimensions."""
    nl = nest.kernel.alias("nl")
    leading = tuple(Dim(Poly.symbol(loop.index)) for loop in extra)
    for op, name, ref in refs_of(nest.kernel, buffer):
        if ref.dims is None:
            raise NotReorderable(f"{buffer.name} has a region that is not understood")
        rank = len(ref.shape) if ref.shape is not None else 2
        text = render_ref(buffer.name, (*leading, *_with_axes(ref)), nl, rank)
        replace_ref(op, name, text)


def _with_axes(ref: Ref) -> tuple[Dim, ...]:
    """The region's dimensions with single positions on chip written as ranges of one."""
    assert ref.dims is not None
    dims = list(ref.dims)
    positions = {axis.position for dim in dims for axis in dim.axes}
    on_chip = range(ref.buffer.block_dims, len(dims))
    for place, number in enumerate(on_chip):
        if dims[number].is_point and place not in positions:
            dims[number] = Dim(dims[number].start, (Axis(place, 1, Poly.of(1)),))
            positions.add(place)
    return tuple(dims)


def _declaration(kernel: Kernel, buffer: Buffer, extra: tuple[Loop, ...]) -> ast.stmt:
    nl = kernel.alias("nl")
    if buffer.declaration is not None and not extra:
        return buffer.declaration
    if buffer.shape is None:
        raise NotReorderable(f"the shape of {buffer.name} is not known")
    trips = [loop.trips.text() if loop.trips is not None else "" for loop in extra]
    own = [extent.text() for extent in buffer.shape]
    own[buffer.block_dims] = f"{nl}.par_dim({own[buffer.block_dims]})"
    function, fill = f"{nl}.ndarray", ""
    if buffer.fill == "0":
        function = f"{nl}.zeros"
    elif buffer.fill is not None:
        function, fill = f"{nl}.full", f", fill_value={buffer.fill}"
    shape = ", ".join([*trips, *own])
    where = "psum" if buffer.space is Space.PSUM else "sbuf"
    dtype = _dtype_text(kernel, buffer)
    return statement(f"{buffer.name} = {function}(({shape}){fill}, dtype={dtype}, buffer={nl}.{where})")


def _dtype_text(kernel: Kernel, buffer: Buffer) -> str:
    if isinstance(buffer.declaration, ast.Assign) and isinstance(buffer.declaration.value, ast.Call):
        for keyword in buffer.declaration.value.keywords:
            if keyword.arg == "dtype":
                return ast.unparse(keyword.value)
        if len(buffer.declaration.value.args) > 1:
            return ast.unparse(buffer.declaration.value.args[-1])
    for op in buffer.writes:
        if op.attrs.get("dtype"):
            return op.attrs["dtype"]
        for ref in op.reads():
            if ref.buffer.space is Space.HBM and ref.buffer.origin == "argument":
                return f"{ref.buffer.name}.dtype"
    return f"{kernel.alias('nl')}.float32"


def emit(body: Body, moved: set[int] | None = None) -> list[ast.stmt]:
    """The statements of a planned body."""
    statements = list(body.statements)
    for item in body.items:
        if isinstance(item, Leaf):
            statements.append(item.op.node)
        else:
            assert item.loop is not None
            source = item.loop.node
            loop = ast.For(copy.deepcopy(source.target), copy.deepcopy(source.iter), emit(item), [])
            ast.fix_missing_locations(ast.copy_location(loop, source))
            origin = getattr(source, "origin", None)
            if origin is not None and (moved is None or id(source) not in moved):
                loop.origin = origin  # type: ignore[attr-defined]
                if moved is not None:
                    moved.add(id(source))
            statements.append(loop)
    return statements


def bytes_per_partition(buffer: Buffer, extra: tuple[Loop, ...]) -> int | None:
    """SBUF a buffer takes with one block per iteration of ``extra``, or None when sizes are symbolic."""
    total = buffer.tile_bytes
    for loop in extra:
        trips = loop.trips.value if loop.trips is not None else None
        if total is None or trips is None:
            return None
        total *= trips
    return total


__all__ = [
    "ZERO",
    "Leaf",
    "Nest",
    "NotReorderable",
    "Schedule",
    "bytes_per_partition",
    "emit",
    "producers_of",
    "read_nest",
    "reorder",
]
