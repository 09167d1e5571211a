"""Key and value tiles shared by the query heads of a group (docs/rewriter.md, H5)."""

from __future__ import annotations

import ast
import copy

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.nest import Leaf, Nest, NotReorderable, bytes_per_partition, emit, read_nest, reorder
from accelopt_ray.rewrite.normalise import normalise, normalised
from accelopt_ray.rewrite.poly import ONE, ZERO, Poly
from accelopt_ray.rewrite.regions import Loop, Space
from accelopt_ray.rewrite.rule import Resource, Rule, Site, tidy
from accelopt_ray.rewrite.rules.residency import MOST_BYTES
from accelopt_ray.rewrite.syntax import expression, index_of, names_read, walk


class ShareGroupTiles(Rule):
    """A loop whose index is divided by a group size becomes two loops, and what the group shares is made once.

    Where the loops are nested like that already, :class:`~accelopt_ray.rewrite.rules.residency.ResidentOperand` does
    the second part.
    """

    id = "share-group-tiles"
    title = "Load and transpose the tiles of a key head once for all query heads of its group"
    problem = "every query head loads and transposes the keys and values of its group again."
    evidence = (
        "hbm_read_bytes exceed the inputs' size and transpose_flops repeat with the query heads; where the compiler "
        "hoists both, they do not."
    )
    change = (
        "split the loop over query heads into one over key heads and one over the members of a group, and put the "
        "loads and transposes that do not depend on the member between the two."
    )
    expectation = "reads and transposes of keys and values are divided by the size of the group."
    relieves = Resource.TRAFFIC
    typical_gain = 1.05
    keywords = ("share the keys", "grouped heads", "group of query heads", "key head")

    def _find(self, kernel: Kernel) -> list[Site]:
        sites: list[Site] = []
        for number in range(len(kernel.loops)):
            if not _divisions(kernel.loops[number]):
                continue
            try:
                _share(normalised(kernel), number)
            except NotReorderable:
                continue
            sites.append(Site(self.id, f"loop `{kernel.loops[number].index}`", len(sites), (), (), number))
        return sites

    def apply(self, kernel: Kernel, site: Site) -> None:
        kernel.tree = _share(normalise(kernel), site.position).tree


def _divisions(loop: Loop) -> list[ast.BinOp]:
    """Where the body of a loop divides its index without a remainder."""
    index = loop.index.split("@")[0]
    return [node for node in walk(loop.node) if isinstance(node, ast.BinOp) and _divides(node, index, ast.FloorDiv)]


def _divides(node: ast.BinOp, index: str, operator: type[ast.operator]) -> bool:
    return isinstance(node.op, operator) and isinstance(node.left, ast.Name) and node.left.id == index


def _share(kernel: Kernel, number: int) -> Kernel:
    """Splits a loop and moves what the members of a group share in front of the inner loop.

    Raises:
        NotReorderable: The groups are not provably of equal size, or nothing is shared that would fit.
    """
    loop = kernel.loops[number]
    size = _group_size(kernel, loop)
    if not loop.parallel or loop.trips is None or loop.start != ZERO or loop.step != ONE:
        raise NotReorderable("the loop is not an independent counted loop")
    for op in kernel.ops:
        if loop in op.loops and loop.index in names_read(ast.parse(op.attrs.get("loop_indices", "()"))):
            raise NotReorderable("a reduction runs over the loop")
    groups, assumed = _groups(kernel, loop.trips, size)
    outer, inner = kernel.fresh(f"{loop.index}_group"), kernel.fresh(f"{loop.index}_member")
    _split(kernel, loop, size, groups, (outer, inner))
    split = normalise(Kernel(kernel.tree))
    root = next(other for other in split.loops if other.index == inner)
    nest = read_nest(split, root)
    shared = [leaf for leaf in nest.leaves if root not in leaf.needs]
    if not any(_is_input_load(leaf) for leaf in shared) or not _fits(nest, shared):
        raise NotReorderable("nothing is shared that would fit")
    if assumed and not any(_is_bounded(split, leaf, outer, groups) for leaf in shared):
        raise NotReorderable("the last group may be smaller")
    schedule = reorder(nest, (root,))
    place = index_of(root.block, root.node)
    root.block[place : place + 1] = [*emit(schedule.prologue), *emit(schedule.main)]
    tidy(split)
    return split


def _group_size(kernel: Kernel, loop: Loop) -> Poly:
    """What the index of a loop is divided by, wherever it is."""
    sizes = {_steady(kernel, node.right) for node in _divisions(loop)}
    size = sizes.pop()
    if sizes or size is None or size == ONE:
        raise NotReorderable("the loop has no one group size")
    return size


def _steady(kernel: Kernel, node: ast.expr) -> Poly | None:
    """A size that is the same wherever its expression stands."""
    size = kernel.names.poly(node)
    if size is None or size.depends_on(kernel.names.loop_symbols):
        return None
    stored = [n.id for n in walk(kernel.tree.entry) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return size if all(stored.count(name) <= 1 for name in names_read(node)) else None


def _groups(kernel: Kernel, total: Poly, size: Poly) -> tuple[Poly, bool]:
    """How many groups of a size make up a total, and whether that they do remains to be shown."""
    if size.value is not None:
        exact = total.divided_by(size.value) if size.value > 0 else None
        if exact is not None:
            return exact, False
    elif len(size.symbols) == 1 and size == Poly.symbol(name := next(iter(size.symbols))):
        exact = total.coefficient(name)
        if exact is not None and exact != ZERO and total.without(name) == ZERO:
            return exact, False
        parts = _quotient(kernel, size)
        if parts is not None and parts[0] == total:
            return parts[1], True
    raise NotReorderable("the groups may differ in size")


def _quotient(kernel: Kernel, size: Poly) -> tuple[Poly, Poly] | None:
    """Both sides of ``a // b``, if that is what a size stands for."""
    if len(size.symbols) != 1 or size != Poly.symbol(name := next(iter(size.symbols))):
        return None
    node = ast.parse(name, mode="eval").body
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv):
        return None
    left, right = _steady(kernel, node.left), _steady(kernel, node.right)
    return None if left is None or right is None else (left, right)


def _split(kernel: Kernel, loop: Loop, size: Poly, groups: Poly, names: tuple[str, str]) -> None:
    """Writes the loop as two, in the tree."""
    outer, inner = names
    rewriter = _IndexRewriter(kernel, loop.index, size, names)
    body = [rewriter.visit(statement) for statement in loop.node.body]
    function = ast.unparse(loop.node.iter.func)  # type: ignore[attr-defined]
    member = ast.For(ast.Name(inner, ast.Store()), expression(f"{function}({size.text()})"), body, [])
    loop.node.target = ast.Name(outer, ast.Store())
    loop.node.iter = expression(f"{function}({groups.text()})")
    loop.node.body = [ast.fix_missing_locations(ast.copy_location(member, loop.node))]


class _IndexRewriter(ast.NodeTransformer):
    """Writes the index of a loop, its quotient and its remainder in terms of two new indices."""

    def __init__(self, kernel: Kernel, index: str, size: Poly, names: tuple[str, str]) -> None:
        self.kernel, self.index, self.size, self.names = kernel, index, size, names

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        for name, operator in zip(self.names, (ast.FloorDiv, ast.Mod), strict=True):
            if _divides(node, self.index, operator) and _steady(self.kernel, node.right) == self.size:
                return ast.Name(name, ast.Load())
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id != self.index:
            return node
        if not isinstance(node.ctx, ast.Load):
            raise NotReorderable("the index is assigned")
        outer, inner = self.names
        return copy.deepcopy(expression(f"{outer} * {self.size.text()} + {inner}"))


def _is_input_load(leaf: Leaf) -> bool:
    """Whether a leaf loads from an input."""
    source = leaf.op.ref("src")
    if leaf.op.kind != "load" or leaf.op.mask or source is None or leaf.op.dest is None:
        return False
    return source.buffer.origin == "argument" and not source.buffer.writes


def _fits(nest: Nest, shared: list[Leaf]) -> bool:
    """Whether the tiles that are made once and read by every member stay on chip, as far as sizes are known."""
    ops = {id(leaf.op) for leaf in shared}
    total = 0
    for buffer in nest.locals:
        kept = any(id(write) in ops for write in buffer.writes)
        if kept and buffer.space is Space.SBUF and any(id(reader) not in ops for reader, _ in buffer.reads):
            total += bytes_per_partition(buffer, nest.needs_of(buffer)) or 0
    return total <= MOST_BYTES


def _is_bounded(kernel: Kernel, leaf: Leaf, outer: str, groups: Poly) -> bool:
    """Whether a leaf reads a dimension that holds exactly ``groups`` groups.

    If the index of the last group is to lie inside it, there are no more groups than that. As a group holds ``total //
    groups`` members, there are no fewer either.
    """
    source = leaf.op.ref("src")
    if leaf.op.kind != "load" or source is None or source.dims is None or source.buffer.shape is None:
        return False
    for dim, extent in zip(source.dims, source.buffer.shape, strict=True):
        coefficient = dim.start.coefficient(outer)
        if coefficient is None or coefficient == ZERO:
            continue
        if dim.is_point and dim.start == Poly.symbol(outer) and extent == groups:
            return True
        whole = len(dim.axes) == 1 and dim.axes[0].stride == 1 and dim.axes[0].length == coefficient
        exact = extent == groups * coefficient or _quotient(kernel, groups) == (extent, coefficient)
        if whole and exact and dim.start == Poly.symbol(outer) * coefficient:
            return True
    return False


RULES = (ShareGroupTiles(),)
