"""Tiles that divide their axis: no instruction works on columns that a mask throws away (docs/rewriter.md, G4)."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.nest import NotReorderable
from accelopt_ray.rewrite.normalise import normalise, normalised, refs_of
from accelopt_ray.rewrite.poly import ONE, ZERO, Poly
from accelopt_ray.rewrite.regions import Axis, Buffer, Dim, Loop, Op, Ref, Space
from accelopt_ray.rewrite.retile import COLUMNWISE, rewrite_dims
from accelopt_ray.rewrite.rule import Resource, Rule, Site, tidy
from accelopt_ray.rewrite.syntax import expression, statement, walk
from accelopt_ray.rewrite.values import Grid

_POINTWISE = COLUMNWISE - {"broadcast"}


@dataclass
class _Cut:
    """An axis that a loop takes in tiles, the last of which a mask cuts off.

    Attributes:
        loop: The loop over tiles.
        piece: The loop over the instructions of a tile, or None when one takes the whole tile.
        tile, width: Columns of a tile and of an instruction.
        extent: Length of the axis.
        mentions: Regions along the axis: operation, operand name, region, number of the dimension.
        buffers: Buffers along the axis with the number of the dimension.
        masked: Operations with the mask.
    """

    loop: Loop
    piece: Loop | None
    tile: int
    width: int
    extent: Poly
    mentions: list[tuple[Op, str, Ref, int]] = field(default_factory=list)
    buffers: list[tuple[Buffer, int]] = field(default_factory=list)
    masked: list[Op] = field(default_factory=list)

    def place(self, dim: Dim, outside: bool) -> bool:
        """Whether a dimension is a tile, or an instruction's part of one, at its proper place.

        Args:
            dim: The dimension.
            outside: Whether it is one of a tensor in HBM, which the loop over tiles runs along.
        """
        if len(dim.axes) != 1 or dim.axes[0].stride != 1:
            return False
        start = Poly.symbol(self.loop.index) * Poly.of(self.tile) if outside else ZERO
        if dim.axes[0].length == Poly.of(self.tile) and dim.start == start:
            return True
        if dim.axes[0].length != Poly.of(self.width):
            return False
        if self.piece is not None:
            return dim.start in (start, start + Poly.symbol(self.piece.index) * Poly.of(self.width))
        return dim.start == start

    def resized(self, dim: Dim, width: Poly) -> Dim:
        """The dimension with a new width of the instructions."""
        tile = width * Poly.of(self.tile // self.width)
        start = ZERO
        if dim.start.depends_on([self.loop.index]):
            start += Poly.symbol(self.loop.index) * tile
        if self.piece is not None and dim.start.depends_on([self.piece.index]):
            start += Poly.symbol(self.piece.index) * width
        axis = dim.axes[0]
        length = tile if axis.length == Poly.of(self.tile) else width
        return Dim(start, (Axis(axis.position, 1, length),))


class ExactTiles(Rule):
    """A masked column axis is cut into equal tiles that cover it exactly."""

    id = "exact-tiles"
    title = "Cut the masked axis into equal tiles without a partial last one"
    problem = "the last tile of an axis is cut off by a mask, but its instructions take as long as those of a full one."
    evidence = "hardware_flops exceed what the product and its transposes need."
    change = "take the largest width, of up to the present one, whose tiles divide the axis."
    expectation = "hardware_flops at their minimum; slightly more instructions."
    relieves = Resource.TENSOR
    typical_gain = 1.04
    keywords = ("exact tiles", "partial tile", "equal tiles", "masked tail", "divides the axis")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        sites: list[Site] = []
        for number, loop in enumerate(fresh.loops):
            try:
                cut = _read(fresh, loop)
            except NotReorderable:
                continue
            detail = (f"Instructions have up to {cut.width} of {cut.extent.text()} columns.",)
            sites.append(Site(self.id, f"loop `{loop.index}`", len(sites), (), detail, number))
        return sites

    def apply(self, kernel: Kernel, site: Site) -> None:
        fresh = normalise(kernel)
        cut = _read(fresh, fresh.loops[site.position])
        nl = fresh.alias("nl")
        name = fresh.fresh("exact_columns")
        width, extent = Poly.symbol(name), cut.extent.text()
        count = cut.tile // cut.width
        tile = width * Poly.of(count)
        for op, operand, ref, number in cut.mentions:
            if isinstance(ref.node, ast.Subscript) and ref.dims is not None:
                rewrite_dims(fresh, op, operand, ref, {number: cut.resized(ref.dims[number], width)}, frozenset())
        for buffer, number in cut.buffers:
            if buffer.origin == "declared":
                assert buffer.shape is not None
                old = buffer.shape[number]
                _declare(buffer, number, tile if old == Poly.of(cut.tile) else width)
        for op in cut.masked:
            start, length = upper_bound(fresh, op)[:2]
            dim = cut.resized(Dim(start, (Axis(1, 1, length),)), width)
            keyword = next(k for k in op.call.keywords if k.arg == "mask")  # type: ignore[attr-defined]
            columns = f"{nl}.arange({dim.axes[0].length.text()})[None, :]"
            keyword.value = expression(f"{dim.start.text()} + {columns} < {extent}")
        cut.loop.node.iter = expression(f"{nl}.affine_range(({extent} + {tile.text()} - 1) // ({tile.text()}))")
        body = fresh.tree.entry.body
        place = next(n for n, item in enumerate(body) if any(node is cut.loop.node for node in walk(item)))
        size = fresh.fresh("size")
        total = tile.text().replace(name, size)
        sizes = f"range({cut.width // 2}, {cut.width + 1})"
        choice = f"({size} for {size} in {sizes} if {_grouped(extent)} % ({total}) == 0)"
        body.insert(place, statement(f"{name} = max({choice}, default={cut.width})"))
        tidy(fresh)
        kernel.tree = fresh.tree


def _grouped(text: str) -> str:
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def _declare(buffer: Buffer, number: int, extent: Poly) -> None:
    """Writes one extent of a buffer's declaration anew."""
    assert isinstance(buffer.declaration, ast.Assign) and isinstance(buffer.declaration.value, ast.Call)
    call = buffer.declaration.value
    shape = next((k.value for k in call.keywords if k.arg == "shape"), None) or call.args[0]
    assert isinstance(shape, (ast.Tuple, ast.List))
    shape.elts[number] = expression(extent.text())


def upper_bound(kernel: Kernel, op: Op, position: int = 1) -> tuple[Poly, Poly, Poly]:
    """First column, number of columns and limit of a mask of the form ``start + columns < limit``; 0 is for rows.

    Raises:
        NotReorderable: The mask is something else.
    """
    node = expression(op.mask)
    if isinstance(node, ast.Name):
        found = [
            item.value
            for item in walk(kernel.tree.entry)
            if isinstance(item, ast.Assign) and any(isinstance(t, ast.Name) and t.id == node.id for t in item.targets)
        ]
        if len(found) != 1:
            raise NotReorderable("the mask has several definitions")
        node = found[0]
    if not (isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Lt)):
        raise NotReorderable("the mask is no upper bound")
    left, limit = kernel.names.evaluate(node.left), kernel.names.poly(node.comparators[0])
    if not isinstance(left, Grid) or limit is None or len(left.axes) != 1:
        raise NotReorderable("the mask is not understood")
    axis = left.axes[0]
    if axis.position != position or axis.stride != 1:
        raise NotReorderable("the mask counts something else")
    return left.start, axis.length, limit


def _read(kernel: Kernel, loop: Loop) -> _Cut:
    """Recognises the loop over the tiles of a masked axis.

    Raises:
        NotReorderable: It is something else.
    """
    masked = [op for op in kernel.ops if loop in op.loops and op.mask]
    if not masked or not loop.parallel or not loop.node.iter.args:  # type: ignore[attr-defined]
        raise NotReorderable("nothing is masked")
    cut = _cut(kernel, loop, masked)
    if not covers(kernel, cut.loop, cut.extent, cut.tile):
        raise NotReorderable("the loop does not run over all tiles")
    queue: list[tuple[Op, str, Ref, int]] = []
    inside = [op for op in kernel.ops if loop in op.loops]
    for op in inside:
        if op.kind == "unknown" or any(each.kind == "if" for each in op.loops):
            raise NotReorderable("a statement is not understood")
        for name, ref in _operands(op):
            if ref.dims is None:
                raise NotReorderable(f"{ref.text} is not understood")
            along = [number for number, dim in enumerate(ref.dims) if dim.start.depends_on([loop.index])]
            if along:
                if len(along) > 1 or ref.buffer.space is not Space.HBM:
                    raise NotReorderable(f"{ref.text} is not a tile of a tensor")
                queue.append((op, name, ref, along[0]))
    _follow(kernel, cut, queue)
    lengths = {id(op): ref.dims[number].axes[0].length for op, _, ref, number in cut.mentions if ref.dims is not None}
    for op in masked:
        if lengths.get(id(op)) != upper_bound(kernel, op)[1]:
            raise NotReorderable("a mask belongs to another axis")
    return cut


def _cut(kernel: Kernel, loop: Loop, masked: list[Op]) -> _Cut:
    """Widths and limit, as all masks agree on them."""
    limits: set[Poly] = set()
    tiles: set[int] = set()
    pieces: dict[Loop, int] = {}
    conditions = [(op, *upper_bound(kernel, op)) for op in masked]
    for op, start, length, limit in conditions:
        by_index = {each.index: each for each in op.loops}
        factor = start.coefficient(loop.index)
        rest = start.without(loop.index)
        if factor is None or factor.value is None or factor.value < 1 or limit.depends_on(kernel.names.loop_symbols):
            raise NotReorderable("the mask does not move with the loop")
        tiles.add(factor.value)
        limits.add(limit)
        if rest == ZERO:
            continue
        [name] = rest.symbols if len(rest.symbols) == 1 else [""]
        piece = by_index.get(name)
        if piece is None or rest != Poly.symbol(name) * length or length.value is None:
            raise NotReorderable("the mask does not move with the pieces")
        pieces[piece] = length.value
    if len(limits) != 1 or len(tiles) != 1 or len(pieces) > 1:
        raise NotReorderable("the masks differ")
    [tile], [limit] = tiles, limits
    piece, width = next(iter(pieces.items())) if pieces else (None, tile)
    if piece is not None and (tile % width or piece.trips != Poly.of(tile // width) or not piece.parallel):
        raise NotReorderable("the pieces do not make up the tile")
    return _Cut(loop, piece, tile, width, limit, masked=masked)


def covers(kernel: Kernel, loop: Loop, extent: Poly, tile: int) -> bool:
    """Whether a loop has as many iterations as an axis has tiles, the last of which may be partial."""
    if extent.value is not None:
        return loop.trips == Poly.of(-(-extent.value // tile))
    parts = division(kernel, loop)
    return parts is not None and parts == (extent + Poly.of(tile - 1), Poly.of(tile))


def division(kernel: Kernel, loop: Loop) -> tuple[Poly, Poly] | None:
    """Dividend and divisor of a trip count of the form ``x // y``, under whatever name, or None."""
    assert isinstance(loop.node.iter, ast.Call)
    node = loop.node.iter.args[-1]
    if isinstance(node, ast.Name) and loop.trips is not None and len(loop.trips.symbols) == 1:
        [symbol] = loop.trips.symbols
        node = expression(symbol) if loop.trips == Poly.symbol(symbol) else node
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.FloorDiv):
        return None
    top, bottom = kernel.names.poly(node.left), kernel.names.poly(node.right)
    return None if top is None or bottom is None else (top, bottom)


def _operands(op: Op) -> list[tuple[str, Ref]]:
    found = [(name, value) for name, value in op.args.items() if isinstance(value, Ref)]
    return [*found, *([("dest", op.dest)] if op.dest is not None else [])]


def _follow(kernel: Kernel, cut: _Cut, queue: list[tuple[Op, str, Ref, int]]) -> None:
    """Collects everything along the axis, from operand to operand and from mention to mention of a buffer.

    Raises:
        NotReorderable: Something along it cannot change its width.
    """
    seen: set[tuple[int, str]] = set()
    while queue:
        op, name, ref, number = queue.pop()
        if (id(op), name) in seen:
            continue
        seen.add((id(op), name))
        assert ref.dims is not None
        dim, outside = ref.dims[number], ref.buffer.space is Space.HBM
        if not cut.place(dim, outside) or cut.loop not in op.loops:
            raise NotReorderable(f"{ref.text} is no part of a tile")
        cut.mentions.append((op, name, ref, number))
        if not outside and all(known is not ref.buffer for known, _ in cut.buffers):
            shape = ref.buffer.shape
            if cut.loop not in ref.buffer.loops or shape is None or shape[number] not in _sizes(cut):
                raise NotReorderable(f"{ref.buffer.name} is no tile of the loop")
            cut.buffers.append((ref.buffer, number))
            for user, operand, region in refs_of(kernel, ref.buffer):
                if region.dims is None:
                    raise NotReorderable(f"{region.text} is not understood")
                queue.append((user, operand, region, number))
        for operand, other in _beside(op, name, dim.axes[0].position):
            assert other.dims is not None
            place = next(
                (n for n, each in enumerate(other.dims) if any(a.position == dim.axes[0].position for a in each.axes)),
                None,
            )
            if place is None or len(other.dims[place].axes) != 1:
                raise NotReorderable(f"{other.text} has no such axis")
            queue.append((op, operand, other, place))


def _sizes(cut: _Cut) -> tuple[Poly, Poly]:
    return Poly.of(cut.tile), Poly.of(cut.width)


def _beside(op: Op, name: str, position: int) -> list[tuple[str, Ref]]:
    """The other operands that run along the axis of one of them.

    Raises:
        NotReorderable: The operation does not treat the positions of the axis independently.
    """
    if position == 0:
        raise NotReorderable("the axis lies on the partitions")
    operands = [(other, ref) for other, ref in _operands(op) if other != name]
    if op.kind == "matmul" and not op.flag("is_transpose") and name in ("moving", "dest"):
        return [(other, ref) for other, ref in operands if other in ("moving", "dest")]
    if op.kind not in _POINTWISE or op.attrs.get("reduce_op"):
        raise NotReorderable(f"{op.kind} does not treat columns independently")
    return [(other, ref) for other, ref in operands if ref.shape is not None and ref.shape[position] != ONE]


RULES = (ExactTiles(),)
