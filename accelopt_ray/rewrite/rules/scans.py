"""Scans over rows longer than SBUF likes (docs/rewriter.md, E10, I1)."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.nest import NotReorderable
from accelopt_ray.rewrite.normalise import normalise, normalised, refs_of
from accelopt_ray.rewrite.poly import ZERO, Poly
from accelopt_ray.rewrite.regions import Loop, Op, Space
from accelopt_ray.rewrite.retile import (
    COLUMNWISE,
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

_KINDS = COLUMNWISE | {"scan"}
_SHORTEST_ROW = 2048


@dataclass
class _Plan:
    """Scans to tile, the operations that go with them, and the statements that hold these."""

    scans: list[Op]
    region: Region
    block: list[ast.stmt]
    first: int
    last: int


class TileScan(Rule):
    """A scan over whole rows runs chunk by chunk with a carried state."""

    id = "tile-scan"
    title = "Tile the scan along the row and carry its state from chunk to chunk"
    problem = (
        "every temporary of the recurrence is a whole row long, so that few tiles fill SBUF and inputs are reloaded."
    )
    evidence = "spill bytes or hbm_read_bytes above the inputs' size while no engine is busy all the time."
    change = (
        "put a sequential loop over chunks of the row outermost, keep the last column of each scan as the next chunk's "
        "initial value, and shrink all temporaries to the chunk."
    )
    expectation = "temporaries and loads stay resident and engines overlap; HBM reads fall to the inputs."
    relieves = Resource.SPILL
    typical_gain = 1.5
    keywords = ("tile the scan", "carried state", "carry its state", "chunks of the sequence")
    widths: tuple[int, ...] = (512, 1024, 256)

    def _find(self, kernel: Kernel) -> list[Site]:
        if not any(op.kind == "scan" for op in kernel.ops):
            return []
        fresh = normalised(kernel)
        roots: list[int] = []
        for op in fresh.ops:
            if op.kind == "scan" and op.loops and fresh.loops.index(op.loops[0]) not in roots:
                roots.append(fresh.loops.index(op.loops[0]))
        sites: list[Site] = []
        for root in roots:
            try:
                _plan(fresh, fresh.loops[root])
            except NotReorderable:
                continue
            for width in self.widths:
                detail = (f"The chunk is the largest divisor of the row up to {width} columns.",)
                sites.append(Site(self.id, f"loop `{fresh.loops[root].index}`", 0, (("chunk", width),), detail, root))
        return sites

    def apply(self, kernel: Kernel, site: Site) -> None:
        fresh = normalise(kernel)
        plan = _plan(fresh, fresh.loops[site.position])
        width = dict(site.parameters)["chunk"]
        nl = fresh.alias("nl")
        row = plan.region.width.text()
        chunk, piece = fresh.fresh("chunk"), fresh.fresh("piece")
        grouped = row if row.isidentifier() or row.isdigit() else f"({row})"
        size = Poly.symbol(chunk)
        _retile(fresh, plan.region, size, piece)
        each = fresh.fresh("size")
        before = [f"{chunk} = max({each} for {each} in range(1, {width + 1}) if {grouped} % {each} == 0)"]
        for scan in plan.scans:
            before.append(self._carry(fresh, scan, chunk))
        loop = statement(f"for {piece} in {nl}.sequential_range({grouped} // {chunk}):\n    pass")
        assert isinstance(loop, ast.For)
        loop.body = plan.block[plan.first : plan.last + 1]
        plan.block[plan.first : plan.last + 1] = [*(statement(text) for text in before), loop]
        tidy(fresh)
        kernel.tree = fresh.tree

    @staticmethod
    def _carry(kernel: Kernel, scan: Op, chunk: str) -> str:
        """Makes a scan start from a carried state; returns the statement that allocates the state."""
        nl = kernel.alias("nl")
        assert scan.dest is not None and scan.dest.shape is not None and isinstance(scan.call, ast.Call)
        state = kernel.fresh(f"{scan.dest.buffer.name}_carry")
        rows = scan.dest.shape[0].text()
        trips = [loop.trips.text() for loop in scan.loops if loop.trips is not None]
        index = ", ".join([*(loop.index for loop in scan.loops), f"0:{rows}", "0:1"])
        initial = scan.number("initial") or 0.0
        shape = ", ".join([*trips, f"{nl}.par_dim({rows})", "1"])
        create = f"{nl}.zeros(({shape}), " if initial == 0 else f"{nl}.full(({shape}), {initial!r}, "
        for keyword in scan.call.keywords:
            if keyword.arg == "initial":
                keyword.value = expression(f"{state}[{index}]")
                break
        else:
            scan.call.args[2] = expression(f"{state}[{index}]")
        last = f"{scan.dest.buffer.name}[0:{rows}, {chunk} - 1:{chunk}]"
        place = index_of(scan.block, scan.node)
        scan.block.insert(place + 1, statement(f"{state}[{index}] = {nl}.copy({last})"))
        return f"{state} = {create}dtype={nl}.float32, buffer={nl}.sbuf)"


def _retile(kernel: Kernel, region: Region, size: Poly, piece: str) -> None:
    for op, name, ref, number in region.wide:
        if ref.buffer.space is Space.HBM:
            start = Poly.symbol(piece) * size
            rewrite_dims(kernel, op, name, ref, {number: moved(start, size)}, frozenset())
        elif isinstance(ref.node, ast.Subscript):
            rewrite_dims(kernel, op, name, ref, {number: moved(ZERO, size)}, frozenset())
    for buffer in region.inner:
        resize(kernel, buffer, size)
    widen_op_shapes(region, size)


def _plan(kernel: Kernel, root: Loop) -> _Plan:
    """Raises :class:`NotReorderable` when the scans under ``root`` cannot be tiled."""
    block = root.block
    inside = [op for op in kernel.ops if root in op.loops]
    scans = [op for op in inside if op.kind == "scan"]
    if not all(_tileable(scan) for scan in scans):
        raise NotReorderable("a scan has a form that cannot be carried on")
    wide = scans[0].ref("data0")
    width = wide.shape[1] if wide is not None and wide.shape is not None else None
    if width is None or (width.value is not None and width.value < _SHORTEST_ROW):
        raise NotReorderable("the rows are short")
    place = {id(node): number for number, item in enumerate(block) for node in walk(item)}
    numbers = {place[id(root.node)]}
    for op in inside:
        for ref in [*op.reads(), *([op.dest] if op.dest is not None else [])]:
            buffer = ref.buffer
            if buffer.space is Space.HBM or root in buffer.loops or ref.shape is None or ref.shape[1] != width:
                continue
            if buffer.declaration is None or id(buffer.declaration) not in place:
                raise NotReorderable(f"{buffer.name} is created elsewhere")
            numbers.add(place[id(buffer.declaration)])
            for user, _, _ in refs_of(kernel, buffer):
                if id(user.node) not in place:
                    raise NotReorderable(f"{buffer.name} is used elsewhere")
                numbers.add(place[id(user.node)])
    first, last = min(numbers), max(numbers)
    enclosed = {id(node) for item in block[first : last + 1] for node in walk(item)}
    ops = [op for op in kernel.ops if id(op.node) in enclosed]
    region = read_region(kernel, ops, None, _KINDS)
    if region.width != width:
        raise NotReorderable("other tiles have another width")
    for op, _, ref, number in region.wide:
        if not full_extent(ref, number) and not (ref.buffer.space is Space.HBM and _from_zero(ref.dims, number, width)):
            raise NotReorderable(f"{ref.text} is not a whole row ({op.kind})")
    names = {loop.index for op in ops for loop in op.loops}
    if any(loop.kind not in ("affine_range", "sequential_range") for op in ops for loop in op.loops):
        raise NotReorderable("a loop is unrolled")
    if any(
        ref.buffer.space is Space.HBM and ref.buffer.origin != "argument" and op.kind == "load"
        for op in ops
        for ref in op.reads()
    ):
        raise NotReorderable("a scratch tensor is read back")
    if width.depends_on(names):
        raise NotReorderable("the row length changes with a loop")
    return _Plan(scans, region, block, first, last)


def _from_zero(dims: object, number: int, width: Poly) -> bool:
    assert isinstance(dims, tuple)
    return bool(dims[number].covers(width))


def _tileable(scan: Op) -> bool:
    """Whether a scan starts from a number and has a destination whose last column can be read."""
    call = scan.call
    if scan.number("initial") is None or scan.mask or scan.dest is None or not isinstance(call, ast.Call):
        return False
    by_keyword = any(keyword.arg == "initial" for keyword in call.keywords)
    if not by_keyword and len(call.args) < 3:
        return False
    counted = all(loop.trips is not None and loop.parallel for loop in scan.loops)
    return counted and scan.dest.buffer.origin == "value" and not scan.flag("reverse0")


RULES = (TileScan(),)
