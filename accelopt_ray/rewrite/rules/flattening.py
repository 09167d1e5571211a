"""Tensors as flat runs of elements, where rows mean nothing to a kernel (docs/rewriter.md, D3)."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.nest import NotReorderable
from accelopt_ray.rewrite.normalise import names_directly, normalise, normalised, replace_ref
from accelopt_ray.rewrite.poly import ZERO, Poly
from accelopt_ray.rewrite.regions import Axis, Buffer, Dim, Loop, Number, Op, Ref, Space
from accelopt_ray.rewrite.retile import COLUMNWISE
from accelopt_ray.rewrite.rule import Resource, Rule, Site, remove, tidy
from accelopt_ray.rewrite.rules.tails import covers, division, upper_bound
from accelopt_ray.rewrite.syntax import expression, index_of, names_read, statement, walk

_PARTITIONS = 128
_POINTWISE = COLUMNWISE - {"broadcast"}


@dataclass(frozen=True)
class _Rows:
    """A loop over row tiles, the last of which a mask cuts off, around elementwise work.

    Attributes:
        loop: The loop over row tiles.
        inner: The loop over column tiles, or None when a tile has whole rows.
        shape: Extents of every tensor.
        tile: Extents of every tile.
        ops: The operations.
        tensors: The tensors in HBM.
        tiles: The tiles that are declared.
    """

    loop: Loop
    inner: Loop | None
    shape: tuple[Poly, Poly]
    tile: tuple[int, Poly]
    ops: tuple[Op, ...]
    tensors: tuple[Buffer, ...]
    tiles: tuple[Buffer, ...]


class FlattenRows(Rule):
    """Elementwise work on masked row tiles runs on views that divide all elements evenly among the partitions."""

    id = "flatten-rows"
    title = "View the tensors as 128 equal rows so that no tile is masked"
    problem = "the last row tile of an elementwise kernel is cut off by a mask, so some partitions and queues idle."
    evidence = "the busiest resource is at its limit although (hbm_read_bytes + hbm_write_bytes) are at their minimum."
    change = "reshape every tensor (R, C) to (128, T, W) and loop over T, without masks."
    expectation = "all partitions in every transfer and instruction; bytes unchanged."
    relieves = Resource.OVERHEAD
    typical_gain = 1.04
    keywords = ("flattened view", "flatten", "mask-free", "reshaped view", "without masks")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        sites: list[Site] = []
        for number, loop in enumerate(fresh.loops):
            try:
                rows = _read(fresh, loop)
                self._rewrite(normalised(kernel), number)
            except NotReorderable:
                continue
            detail = (f"Tensors are {rows.shape[0].text()} x {rows.shape[1].text()}.",)
            sites.append(Site(self.id, f"loop `{loop.index}`", len(sites), (), detail, number))
        return sites

    def apply(self, kernel: Kernel, site: Site) -> None:
        kernel.tree = self._rewrite(normalise(kernel), site.position).tree

    @staticmethod
    def _rewrite(kernel: Kernel, number: int) -> Kernel:
        found = _read(kernel, kernel.loops[number])
        nl = kernel.alias("nl")
        lanes, strip, step, size = (kernel.fresh(name) for name in ("lanes", "strip", "step", "size"))
        total = (found.shape[0] * found.shape[1]).text()
        count = f"({total}) // ({lanes} * {strip})"
        before = _sizes(found)
        before += [
            statement(f"{lanes} = max({size} for {size} in range(1, {_PARTITIONS + 1}) if ({total}) % {size} == 0)"),
            statement(
                f"{strip} = max({size} for {size} in range(1, {found.tile[1].text()} + 1)"
                f" if ({total}) // {lanes} % {size} == 0)"
            ),
        ]
        flat: dict[str, str] = {}
        for tensor in found.tensors:
            flat[tensor.name] = kernel.fresh(f"{tensor.name}_flat")
            before.append(statement(f"{flat[tensor.name]} = {tensor.name}.reshape(({lanes}, {count}, {strip}))"))
        for op in found.ops:
            for name, ref in _operands(op):
                if ref.buffer.space is Space.HBM:
                    replace_ref(op, name, f"{flat[ref.buffer.name]}[0:{lanes}, {step}, 0:{strip}]")
                elif isinstance(ref.node, ast.Subscript):
                    replace_ref(op, name, f"{ref.buffer.name}[0:{lanes}, 0:{strip}]")
            call = op.call
            if isinstance(call, ast.Call):
                call.keywords = [keyword for keyword in call.keywords if keyword.arg != "mask"]
        body: list[ast.stmt] = []
        for buffer in found.tiles:
            assert isinstance(buffer.declaration, ast.Assign) and isinstance(buffer.declaration.value, ast.Call)
            _reshape(buffer.declaration.value, f"({nl}.par_dim({lanes}), {strip})")
            body.append(buffer.declaration)
        body += [op.node for op in found.ops]
        gone = {found.loop.index, *([found.inner.index] if found.inner is not None else [])}
        if any(gone & names_read(item) for item in body):
            raise NotReorderable("a value depends on the row")
        block, old = found.loop.block, found.loop.node
        loop = ast.For(ast.Name(step, ast.Store()), expression(f"{nl}.affine_range({count})"), body, [])
        place = index_of(block, old)
        block[place:place] = [*before, ast.fix_missing_locations(loop)]
        remove(block, old)
        tidy(kernel)
        return kernel


def _reshape(call: ast.Call, shape: str) -> None:
    """Writes the shape of a declaration anew."""
    for keyword in call.keywords:
        if keyword.arg == "shape":
            keyword.value = expression(shape)
            return
    call.args[0] = expression(shape)


def _sizes(found: _Rows) -> list[ast.stmt]:
    """Statements inside the loop that compute the width of its tiles."""
    needed = {name for symbol in found.tile[1].symbols for name in names_read(expression(symbol))}
    return [
        item
        for item in found.loop.node.body
        if isinstance(item, ast.Assign) and any(isinstance(t, ast.Name) and t.id in needed for t in item.targets)
    ]


def _operands(op: Op) -> list[tuple[str, Ref]]:
    found = [(name, value) for name, value in op.args.items() if isinstance(value, Ref)]
    return [*found, *([("dest", op.dest)] if op.dest is not None else [])]


def _read(kernel: Kernel, loop: Loop) -> _Rows:
    """Recognises the loop over masked row tiles.

    Only the stored tensors' shapes are known, as a kernel declares them. The loaded ones cannot be smaller, or the
    original would read beyond them; were one larger, its reshape would fail when the kernel is traced.

    Raises:
        NotReorderable: It is something else.
    """
    if loop.block is not kernel.tree.entry.body or not loop.parallel or not isinstance(loop.node.iter, ast.Call):
        raise NotReorderable("no loop over rows")
    inner = _inner(kernel, loop)
    nest = (loop,) if inner is None else (loop, inner)
    ops = tuple(op for op in kernel.ops if loop in op.loops)
    stores = [op for op in ops if op.kind == "store" and op.dest is not None]
    first = stores[0].dest if stores else None
    if first is None or first.buffer.shape is None or len(first.buffer.shape) != 2 or first.shape is None:
        raise NotReorderable("nothing is stored in a matrix")
    rows, columns = first.buffer.shape
    height, width = first.shape[0].value, first.shape[1]
    if height is None or not covers(kernel, loop, rows, height) or not _covers_columns(kernel, inner, columns, width):
        raise NotReorderable("the loops do not run over all elements")
    region = (
        Dim(Poly.symbol(loop.index) * Poly.of(height), (Axis(0, 1, Poly.of(height)),)),
        Dim(Poly.symbol(inner.index) * width if inner is not None else ZERO, (Axis(1, 1, width),)),
    )
    tile = (Poly.of(height), width)
    tensors: dict[str, Buffer] = {}
    for op in ops:
        if op.kind not in _POINTWISE or op.attrs.get("reduce_op") or op.accumulate or op.loops != nest:
            raise NotReorderable(f"{op.kind} is not elementwise")
        if any(not isinstance(value, (Ref, Number)) for value in op.args.values()):
            raise NotReorderable("an operand is not understood")
        bound = (Poly.symbol(loop.index) * Poly.of(height), Poly.of(height), rows)
        if op.mask and upper_bound(kernel, op, 0) != bound:
            raise NotReorderable("a mask is not that of the rows")
        for _, ref in _operands(op):
            buffer = ref.buffer
            if not names_directly(ref.node, buffer.name):
                raise NotReorderable(f"{ref.text} is a view")
            if buffer.space is Space.HBM:
                _check_tensor(ref, region, (rows, columns))
                tensors[buffer.name] = buffer
            elif loop not in buffer.loops or buffer.space is not Space.SBUF or not _is_whole_tile(ref, tile):
                raise NotReorderable(f"{ref.text} is not a tile of the loop")
    if not any(op.mask for op in ops):
        raise NotReorderable("nothing is masked")
    if any(buffer.reads and buffer.writes for buffer in tensors.values()):
        raise NotReorderable("a tensor is written and read, under two views")
    tiles = tuple(buffer for buffer in kernel.buffers if loop in buffer.loops and buffer.origin == "declared")
    if any(buffer.fill is not None or buffer.shape != tile for buffer in tiles):
        raise NotReorderable("a tile has another shape or an initial value")
    return _Rows(loop, inner, (rows, columns), (height, width), ops, tuple(tensors.values()), tiles)


def _inner(kernel: Kernel, loop: Loop) -> Loop | None:
    """The only loop inside another one.

    Raises:
        NotReorderable: There are several, or conditions.
    """
    inside = [node for item in loop.node.body for node in walk(item) if isinstance(node, (ast.For, ast.If))]
    if not inside:
        return None
    found = next((each for each in kernel.loops if each.node is inside[0]), None)
    if len(inside) > 1 or found is None or not found.parallel or found.block is not loop.node.body:
        raise NotReorderable("the loops are not two that run over tiles")
    return found


def _covers_columns(kernel: Kernel, inner: Loop | None, columns: Poly, width: Poly) -> bool:
    """Whether the tiles of a row make up the row."""
    if inner is None:
        return width == columns
    if inner.trips is not None and inner.trips * width == columns:
        return True
    # Columns that a partial last tile would have are left out by the original, hence not defined.
    return division(kernel, inner) == (columns, width)


def _check_tensor(ref: Ref, region: tuple[Dim, Dim], shape: tuple[Poly, Poly]) -> None:
    """Raises :class:`NotReorderable` unless a tensor is accessed like all others."""
    buffer = ref.buffer
    if buffer.origin not in ("argument", "declared") or ref.dims != region:
        raise NotReorderable(f"{ref.text} is accessed in another way")
    if buffer.shape is not None and buffer.shape != shape:
        raise NotReorderable(f"{buffer.name} has another shape")


def _is_whole_tile(ref: Ref, shape: tuple[Poly, Poly]) -> bool:
    """Whether a region is a whole tile of the given shape, its axes in order."""
    return ref.dims == tuple(Dim(ZERO, (Axis(position, 1, extent),)) for position, extent in enumerate(shape))


RULES = (FlattenRows(),)
