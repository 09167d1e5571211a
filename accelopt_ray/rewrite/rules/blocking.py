"""Row blocking of matrix products (docs/rewriter.md, E5, G2)."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.nest import Leaf, Nest, NotReorderable, build, emit, producers_of, read_nest
from accelopt_ray.rewrite.normalise import normalise, normalised
from accelopt_ray.rewrite.regions import Loop, Space
from accelopt_ray.rewrite.rule import Resource, Rule, Site, tidy
from accelopt_ray.rewrite.syntax import expression, index_of, statement, substitute

_BANKS = 4


@dataclass
class _Product:
    """A product inside column blocks whose left side is prepared anew for each of them.

    Attributes:
        nest: The nest of the column loop.
        matmul: The accumulating product.
        load: The load of the right side.
        rows: The loop over row tiles.
        renamed: Contraction loops of the product, each with the load's loop that runs alike.
    """

    nest: Nest
    matmul: Leaf
    load: Leaf
    rows: Loop
    renamed: dict[Loop, Loop]


class RowBlocking(Rule):
    """Several row tiles share one pass over the right side; the left side is transposed once."""

    id = "row-blocking"
    title = "Let a block of row tiles share every right-hand tile, and transpose the left side once"
    problem = (
        "every row tile takes a pass of its own over the right side, which is loaded again each time, or inside a "
        "loop over column blocks every row tile is loaded and transposed again."
    )
    evidence = "hbm_read_bytes far above the inputs' size, or transpose_flops above 6 percent of hardware_flops."
    change = (
        "make blocks of a few row tiles the outermost loop, transpose their left sides once, and for every right-hand "
        "tile loaded multiply it with all of them into separate PSUM accumulators."
    )
    expectation = (
        "transposes divided by the number of column blocks; traffic of the right side divided by the block size."
    )
    relieves = Resource.TENSOR
    typical_gain = 1.2
    keywords = ("row block", "block of rows", "block of row tiles")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        sites: list[Site] = []
        for number, root in enumerate(fresh.loops):
            try:
                found = _read(fresh, root)
                size = _size(found)
                self._rewrite(normalised(kernel), number)
            except NotReorderable:
                continue
            detail = (f"A block has up to {size} row tiles.",)
            sites.append(Site(self.id, f"loop `{found.rows.index}`", len(sites), (), detail, number))
        return sites

    def apply(self, kernel: Kernel, site: Site) -> None:
        kernel.tree = self._rewrite(normalise(kernel), site.position).tree

    def _rewrite(self, kernel: Kernel, number: int) -> Kernel:
        root = kernel.loops[number]
        found = _read(kernel, root)
        outermost = root.block
        place = index_of(outermost, root.node)
        member = _split_rows(kernel, found.rows, _size(found), outermost, place)
        again = Kernel(kernel.tree)
        root = next(loop for loop in again.loops if loop.node is root.node)
        split = _read(again, root, rows=next(loop for loop in again.loops if loop.index == member))
        group = next(loop for loop in split.nest.order if loop.node is _parent(split.nest, split.rows))
        leaves = _arrange(split, group)
        schedule = build(split.nest, (group,), leaves, _BANKS)
        # Only now: giving tiles block dimensions writes subscripts anew, in terms of the product's own loops.
        mapping: dict[str, ast.expr] = {
            one.index: ast.Name(other.index, ast.Load()) for one, other in split.renamed.items()
        }
        substitute(split.matmul.op.node, mapping)
        block = root.block
        place = index_of(block, root.node)
        block[place : place + 1] = [*emit(schedule.prologue), *emit(schedule.main)]
        tidy(again)
        return again


def _parent(nest: Nest, loop: Loop) -> ast.For:
    return next(
        other.node for other in nest.order if any(item is loop.node for item in other.node.body) and other is not loop
    )


def _read(kernel: Kernel, root: Loop, rows: Loop | None = None) -> _Product:
    """Recognises the product under a column loop.

    Raises:
        NotReorderable: There is none of the expected form.
    """
    nest = read_nest(kernel, root)
    for leaf in nest.leaves:
        op = leaf.op
        left, right = op.ref("stationary"), op.ref("moving")
        if (
            op.kind != "matmul"
            or not op.accumulate
            or op.mask
            or op.flag("is_transpose")
            or left is None
            or right is None
        ):
            continue
        prepared = [item for item in nest.leaves if item.op in left.buffer.writes]
        loads = [item for item in nest.leaves if item.op in right.buffer.writes]
        if not prepared or len(loads) != 1 or loads[0].op.kind != "load" or loads[0].op.dest is None:
            continue
        # Either the columns are outside and the left side is prepared again for each of them, or the rows are outside
        # and the right side is loaded again for each of those.
        by_columns = root in loads[0].needs and not any(root in item.needs for item in prepared)
        by_rows = root not in loads[0].needs and all(root in item.needs for item in prepared)
        if not (by_columns or (by_rows and rows in (None, *_below(nest, root)))):
            continue
        source = loads[0].op.ref("src")
        if source is None or source.buffer.origin != "argument" or left.buffer.space is not Space.SBUF:
            continue
        selecting = [
            loop
            for loop in leaf.needs
            if loop not in loads[0].needs and all(loop in item.needs for item in prepared) and loop in _stored(nest)
        ]
        if rows is not None:
            selecting = [rows] if rows in selecting else []
        elif by_rows:
            selecting = [root] if selecting == [root] else []
        if len(selecting) != 1:
            continue
        return _Product(nest, leaf, loads[0], selecting[0], _same_loops(leaf, loads[0]))
    raise NotReorderable("there is no product whose left side is prepared for every column block")


def _below(nest: Nest, root: Loop) -> list[Loop]:
    """The loop that a row loop was split into, if it was."""
    return [loop for loop in nest.order if any(item is loop.node for item in root.node.body) and loop is not root]


def _stored(nest: Nest) -> set[Loop]:
    """Loops that every store needs."""
    stores = [set(leaf.needs) for leaf in nest.leaves if leaf.op.kind == "store"]
    return set.intersection(*stores) if stores else set()


def _same_loops(matmul: Leaf, load: Leaf) -> dict[Loop, Loop]:
    """Contraction loops of the product, matched with the load's by the block dimensions of the right side."""
    right, dest = matmul.op.ref("moving"), load.op.dest
    if right is None or dest is None or right.dims is None or dest.dims is None:
        raise NotReorderable("a region of the right side is not understood")
    inside = {loop.index: loop for loop in matmul.loops}
    outside = {loop.index: loop for loop in load.loops}
    accumulated = set(matmul.loops) - set(matmul.op.dest.buffer.loops if matmul.op.dest is not None else ())
    # A contraction loop around both is its own counterpart.
    renamed: dict[Loop, Loop] = {loop: loop for loop in accumulated if loop in load.loops}
    for want, have in zip(right.dims, dest.dims, strict=False):
        if not want.is_point or want.start == have.start:
            continue
        one, other = inside.get(want.start.text()), outside.get(have.start.text())
        if one is None or other is None or one.trips != other.trips or one not in accumulated:
            raise NotReorderable("the product reads the right side in another order than it was loaded")
        renamed[one] = other
    if set(renamed) != accumulated:
        raise NotReorderable("the contraction does not run over the loaded tiles")
    return renamed


def _size(found: _Product) -> int:
    """Row tiles per block: as many as have room for their accumulators in half of PSUM."""
    pieces = 1
    for loop in found.matmul.needs:
        if loop in found.renamed or loop is found.rows or loop in found.load.needs:
            continue
        trips = loop.trips.value if loop.trips is not None else None
        if trips is None:
            raise NotReorderable("the number of accumulators is not known")
        pieces *= trips
    if pieces > _BANKS // 2:
        raise NotReorderable("two row tiles would need too many PSUM banks")
    return _BANKS // pieces


def _split_rows(kernel: Kernel, rows: Loop, size: int, block: list[ast.stmt], place: int) -> str:
    """Splits the row loop into blocks and members; returns the index of the member loop."""
    nl = kernel.alias("nl")
    assert rows.trips is not None and isinstance(rows.node.iter, ast.Call) and isinstance(rows.node.target, ast.Name)
    trips = ast.unparse(rows.node.iter.args[-1])
    number = rows.trips.value
    count, group, member = kernel.fresh("block_tiles"), kernel.fresh("row_block"), kernel.fresh("member")
    if number is not None:
        value = str(max(w for w in range(1, size + 1) if number % w == 0))
    else:
        width = kernel.fresh("size")
        value = f"max({width} for {width} in range(1, {size + 1}) if ({trips}) % {width} == 0)"
    block.insert(place, statement(f"{count} = {value}"))
    index = rows.node.target.id
    for item in rows.node.body:
        substitute(item, {index: expression(f"{group} * {count} + {member}")})
    inner = ast.For(
        ast.Name(member, ast.Store()), expression(f"{nl}.affine_range({count})"), rows.node.body, [], lineno=0
    )
    rows.node.target = ast.Name(group, ast.Store())
    rows.node.iter = expression(f"{nl}.affine_range(({trips}) // {count})")
    rows.node.body = [inner]
    ast.fix_missing_locations(rows.node)
    return member


def _arrange(found: _Product, group: Loop) -> list[Leaf]:
    """Gives every leaf its path; returns the leaves with those that do not need the columns first."""
    nest, member = found.nest, found.rows
    contraction = [loop for loop in found.load.loops if loop in found.renamed.values()]
    columns = [loop for loop in found.load.needs if loop not in contraction]
    ranking = [group, *columns, *contraction, member]
    ranking += [loop for loop in nest.order if loop not in ranking]
    for leaf in nest.leaves:
        needs = {found.renamed.get(loop, loop) if leaf is found.matmul else loop for loop in leaf.needs}
        if member in needs or leaf is found.load:
            needs.add(group)
        if set(leaf.needs) & set(found.renamed) and leaf not in (found.matmul, found.load):
            raise NotReorderable("another statement runs inside the contraction")
        leaf.path = tuple(sorted(needs, key=ranking.index))
    _follow(found.matmul, found.renamed)
    # What the product needs comes first; everything else stays behind, where it may follow from the product.
    needed = producers_of(found.matmul)
    for leaf in reversed(nest.leaves):
        if id(leaf.op) in needed:
            needed |= producers_of(leaf)
    early = [leaf for leaf in nest.leaves if id(leaf.op) in needed and not set(leaf.path) & set(columns)]
    return [*early, *(leaf for leaf in nest.leaves if leaf not in early)]


def _follow(matmul: Leaf, renamed: dict[Loop, Loop]) -> None:
    """Lets the product's leaf need the load's loops instead of its own."""
    matmul.needs = tuple(renamed.get(loop, loop) for loop in matmul.needs)
    matmul.loops = tuple(renamed.get(loop, loop) for loop in matmul.loops)


RULES = (RowBlocking(),)
