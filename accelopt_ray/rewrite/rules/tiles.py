"""Tile widths (docs/rewriter.md, D1, D2, F2) and the kind of a loop (E6)."""

from __future__ import annotations

import ast

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.nest import NotReorderable
from accelopt_ray.rewrite.normalise import normalise, normalised
from accelopt_ray.rewrite.poly import ZERO, Poly
from accelopt_ray.rewrite.regions import Dim, Loop, Op, Space
from accelopt_ray.rewrite.retile import (
    Region,
    full_extent,
    moved,
    read_region,
    resize,
    rewrite_dims,
    widen_op_shapes,
)
from accelopt_ray.rewrite.rule import Resource, Rule, Site, tidy
from accelopt_ray.rewrite.syntax import expression, index_of, statement, walk

_BUDGET_BYTES = 140 * 1024
_BYTES = 4
_WIDEST = 8192
_STEP = 256


def _innermost(kernel: Kernel, loop: Loop) -> list[Op]:
    """The operations of a loop without inner loops.

    Raises:
        NotReorderable: The loop has inner loops or statements that are not understood.
    """
    if any(isinstance(node, (ast.For, ast.If, ast.With)) for item in loop.node.body for node in walk(item)):
        raise NotReorderable("the loop is not innermost")
    ops = [op for op in kernel.ops if op.loops and op.loops[-1] is loop]
    if not ops or any(op.kind == "unknown" for op in ops):
        raise NotReorderable("a statement is not understood")
    return ops


def _columns_of(kernel: Kernel, loop: Loop) -> tuple[Region, set[int]]:
    """The region of a loop over column tiles, and per region mention the block dimension that counts the tiles.

    Raises:
        NotReorderable: The loop is not one over adjacent column tiles.
    """
    region = read_region(kernel, _innermost(kernel, loop), loop)
    stride = ONE_STEP if loop.kind == "range" else region.width
    counted: set[int] = set()
    for op, name, ref, number in region.wide:
        assert ref.dims is not None
        depends = {n for n, dim in enumerate(ref.dims) if dim.start.depends_on([loop.index])}
        if ref.buffer in region.inner:
            if depends or not full_extent(ref, number):
                raise NotReorderable("a tile inside the loop is used in parts")
            continue
        if depends == {number} and ref.dims[number].start.coefficient(loop.index) == stride:
            continue
        is_counter = len(depends) == 1 and next(iter(depends)) < ref.buffer.block_dims
        if is_counter and ref.dims[min(depends)] == Dim(Poly.symbol(loop.index)) and full_extent(ref, number):
            counted.add(id(ref.buffer))
            continue
        raise NotReorderable(f"{ref.text} is not a tile that moves with the loop ({op.kind}, {name})")
    for op in region.ops:
        for ref in op.reads():
            if ref.shape is not None and ref.shape[1] == Poly.of(1) and ref.indices & {loop.index}:
                raise NotReorderable("a column changes with the loop")
        if loop.index in op.mask_symbols:
            raise NotReorderable("a mask changes with the loop")
    for identity in counted:
        mentions = [ref for _, _, ref, _ in region.wide if id(ref.buffer) == identity]
        total = sum(1 for op in kernel.ops for ref in [*op.reads(), op.dest] if ref and id(ref.buffer) == identity)
        if total != len(mentions):
            raise NotReorderable("a counted tile is used outside the loop")
    return region, counted


ONE_STEP = Poly.of(1)


class MergePieces(Rule):
    """An inner loop over the pieces of a tile disappears: the instructions take the whole tile."""

    id = "merge-pieces"
    title = "Process the whole tile with one instruction instead of a loop over pieces"
    problem = "an inner loop cuts a tile into pieces and issues every instruction once per piece."
    evidence = "instruction counts are high; each instruction pays a fixed start of about 60 to 110 cycles."
    change = "delete the inner loop and let every instruction of its body take the full width of the tile."
    expectation = "a fraction of the instructions, hence less fixed overhead; bytes unchanged."
    relieves = Resource.OVERHEAD
    typical_gain = 1.08
    keywords = ("pieces", "larger free size", "wider instructions", "full width")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        sites: list[Site] = []
        for number, loop in enumerate(fresh.loops):
            try:
                width = self._plan(fresh, loop)[2]
            except NotReorderable:
                continue
            detail = (f"The new width is {width} columns.",)
            sites.append(Site(self.id, f"loop `{loop.index}`", 0, (), detail, number))
        return sites

    @staticmethod
    def _plan(kernel: Kernel, loop: Loop) -> tuple[Region, set[int], int]:
        region, counted = _columns_of(kernel, loop)
        trips = loop.trips.value if loop.trips is not None else None
        width = region.width.value
        if not loop.parallel or trips is None or width is None or not 1 < trips * width <= _WIDEST // 2:
            raise NotReorderable("the number of pieces is not known or too large")
        if region.tiles * trips * width * _BYTES > _BUDGET_BYTES:
            raise NotReorderable("the wide tiles would not fit")
        return region, counted, trips * width

    def apply(self, kernel: Kernel, site: Site) -> None:
        fresh = normalise(kernel)
        loop = fresh.loops[site.position]
        region, counted, total = self._plan(fresh, loop)
        width = Poly.of(total)
        done: set[int] = set()
        for op, name, ref, number in region.wide:
            assert ref.dims is not None
            buffer = ref.buffer
            if buffer in region.inner or id(buffer) in counted:
                drop = frozenset(n for n, dim in enumerate(ref.dims) if dim.start.depends_on([loop.index]))
                if id(buffer) not in done:
                    resize(fresh, buffer, width, drop)
                    done.add(id(buffer))
                if isinstance(ref.node, ast.Subscript):
                    rewrite_dims(fresh, op, name, ref, {number: moved(ZERO, width)}, drop)
                continue
            start = ref.dims[number].start.without(loop.index)
            rewrite_dims(fresh, op, name, ref, {number: moved(start, width)}, frozenset())
        widen_op_shapes(region, width)
        index = index_of(loop.block, loop.node)
        body = [s for s in loop.node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        loop.block[index : index + 1] = body
        tidy(fresh)
        kernel.tree = fresh.tree


class WidenTiles(Rule):
    """A streaming loop moves more columns per transfer and instruction."""

    id = "widen-tiles"
    title = "Stream wider tiles"
    problem = "every iteration moves and computes a narrow tile of contiguous data."
    evidence = "DMA transfers are small, or all engines are idle most of the time although bytes are at their minimum."
    change = "let each iteration load, compute and store more columns, with correspondingly fewer iterations."
    expectation = (
        "larger DMA transfers and fewer instructions; bytes unchanged. Only a measurement tells the best width."
    )
    relieves = Resource.OVERHEAD
    typical_gain = 1.06
    keywords = ("wider tiles", "tile width", "streaming width", "wider loads")
    widths: tuple[int, ...] = (2048, 4096, 1024, 8192)

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        sites: list[Site] = []
        for number, loop in enumerate(fresh.loops):
            for width in self.widths:
                try:
                    self._plan(fresh, loop, width)
                except NotReorderable:
                    continue
                detail = (f"The new width is up to {width} columns, the largest that divides the row.",)
                sites.append(Site(self.id, f"loop `{loop.index}`", 0, (("width", width),), detail, number))
        return sites

    @staticmethod
    def _plan(kernel: Kernel, loop: Loop, width: int) -> tuple[Region, ast.expr, int]:
        """Region, row length and old width.

        Raises:
            NotReorderable: The loop does not stream adjacent tiles over a row, or the width does not fit.
        """
        region, counted = _columns_of(kernel, loop)
        old = region.width.value
        if counted or old is None or width <= old or loop.kind not in ("affine_range", "range"):
            raise NotReorderable("the loop cannot be widened")
        if region.tiles * width * _BYTES > _BUDGET_BYTES:
            raise NotReorderable("the wide tiles would not fit")
        call = loop.node.iter
        assert isinstance(call, ast.Call)
        if loop.kind == "range":
            if len(call.args) != 3 or loop.start != ZERO or loop.step != region.width:
                raise NotReorderable("the range does not step by the width")
            row = call.args[1]
        else:
            division = call.args[0]
            if loop.trips is not None and loop.trips.value is not None:
                total = loop.trips.value * old
                if total % width and not any(total % w == 0 for w in range(old + _STEP, width, _STEP)):
                    raise NotReorderable("no larger width divides the row")
                row = ast.Constant(total)
            elif isinstance(division, ast.BinOp) and isinstance(division.op, ast.FloorDiv):
                if kernel.names.poly(division.right) != region.width:
                    raise NotReorderable("the trip count is not the row length over the width")
                row = division.left
            else:
                raise NotReorderable("the row length is not known")
        for _, _, ref, number in region.wide:
            if ref.buffer.space is not Space.HBM and ref.buffer not in region.inner:
                assert ref.dims is not None
                if not ref.dims[number].start.depends_on([loop.index]):
                    raise NotReorderable("a tile is kept from iteration to iteration")
        if loop.kind == "range" and any(op.kind == "update" for op in region.ops):
            raise NotReorderable("the loop carries a value")
        return region, row, old

    def apply(self, kernel: Kernel, site: Site) -> None:
        fresh = normalise(kernel)
        loop = fresh.loops[site.position]
        limit = dict(site.parameters)["width"]
        region, row, old = self._plan(fresh, loop, limit)
        nl = fresh.alias("nl")
        name = fresh.fresh("width")
        row_text = ast.unparse(row)
        grouped = row_text if isinstance(row, (ast.Name, ast.Constant)) else f"({row_text})"
        if isinstance(row, ast.Constant) and isinstance(row.value, int):
            best = max(w for w in range(old, limit + 1) if row.value % w == 0 and (w % _STEP == 0 or w == old))
            value = str(best)
        else:
            size = fresh.fresh("size")
            value = f"max({size} for {size} in range({old}, {limit + 1}, {_STEP}) if {grouped} % {size} == 0)"
        width = Poly.symbol(name)
        factor = width
        for op, operand, ref, number in region.wide:
            assert ref.dims is not None
            if ref.buffer in region.inner:
                if isinstance(ref.node, ast.Subscript):
                    rewrite_dims(fresh, op, operand, ref, {number: moved(ZERO, width)}, frozenset())
                continue
            rest = ref.dims[number].start.without(loop.index)
            start = Poly.symbol(loop.index) * factor + rest
            rewrite_dims(fresh, op, operand, ref, {number: moved(start, width)}, frozenset())
        for buffer in region.inner:
            resize(fresh, buffer, width)
        widen_op_shapes(region, width)
        loop.node.iter = expression(f"{nl}.affine_range({grouped} // {name})")
        index = index_of(loop.block, loop.node)
        loop.block.insert(index, statement(f"{name} = {value}"))
        tidy(fresh)
        kernel.tree = fresh.tree


class IndependentLoop(Rule):
    """A Python or sequential loop whose iterations are independent becomes ``affine_range``."""

    id = "affine-loop"
    title = "Declare independent iterations with affine_range"
    problem = "a Python range or sequential_range forces one iteration after the other although they are independent."
    evidence = "all engines are idle for a good part of the time."
    change = "iterate with nl.affine_range, so that loads, computation and stores of different iterations overlap."
    expectation = "engine activity rises; bytes and instructions unchanged."
    relieves = Resource.OVERHEAD
    typical_gain = 1.05
    keywords = ("affine_range", "independent iterations", "range kind")

    def _find(self, kernel: Kernel) -> list[Site]:
        sites: list[Site] = []
        for number, loop in enumerate(kernel.loops):
            if self._independent(kernel, loop):
                sites.append(Site(self.id, f"loop `{loop.index.split('@')[0]}`", len(sites), (), (), number))
        return sites

    @staticmethod
    def _independent(kernel: Kernel, loop: Loop) -> bool:
        if loop.kind not in ("range", "sequential_range") or loop.step.value is None:
            return False
        call = loop.node.iter
        if not isinstance(call, ast.Call) or not isinstance(loop.node.target, ast.Name):
            return False
        if len(call.args) == 3 and loop.start != ZERO:
            return False
        if len(call.args) == 2:
            return False
        step = loop.step
        for op in kernel.ops:
            if loop not in op.loops:
                continue
            if op.kind in ("unknown", "update", "loop_reduce") or any(inner.kind == "if" for inner in op.loops):
                return False
            for ref in op.reads():
                outside = loop not in ref.buffer.loops
                if outside and any(loop in write.loops for write in ref.buffer.writes):
                    return False
            dest = op.dest
            if dest is None or loop in dest.buffer.loops:
                continue
            if dest.dims is None or op.accumulate:
                return False
            if not any(_strides_apart(dim, loop, step) for dim in dest.dims):
                return False
        return True

    def apply(self, kernel: Kernel, site: Site) -> None:
        loop = kernel.loops[site.position]
        nl = kernel.alias("nl")
        call = loop.node.iter
        assert isinstance(call, ast.Call) and isinstance(loop.node.target, ast.Name)
        if len(call.args) == 3:
            stop, step = ast.unparse(call.args[1]), ast.unparse(call.args[2])
            name = loop.node.target.id
            counter = kernel.fresh("tile")
            loop.node.target = ast.Name(counter, ast.Store())
            masked = any(op.mask for op in kernel.ops if loop in op.loops)
            total = f"({stop} + {step} - 1)" if masked else stop if stop.isidentifier() else f"({stop})"
            # Without a mask every tile is full, so the step divides the range.
            loop.node.iter = expression(f"{nl}.affine_range({total} // {step})")
            loop.node.body.insert(0, statement(f"{name} = {counter} * {step}"))
        else:
            loop.node.iter = expression(f"{nl}.affine_range({ast.unparse(call.args[0])})")


def _strides_apart(dim: Dim, loop: Loop, step: Poly) -> bool:
    """Whether different iterations provably touch different positions of a dimension."""
    factor = dim.start.coefficient(loop.index)
    if factor is None or factor == ZERO:
        return False
    if dim.is_point:
        return True
    if len(dim.axes) != 1 or dim.axes[0].stride != 1:
        return False
    distance = factor * step
    length = dim.axes[0].length
    if distance == length:
        return True
    return distance.value is not None and length.value is not None and abs(distance.value) >= length.value


RULES = (IndependentLoop(), MergePieces(), WidenTiles())
