"""Fewer, longer transfers: chunks of a row that are stored or loaded one by one (docs/rewriter.md, D4)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.nest import NotReorderable
from accelopt_ray.rewrite.normalise import (
    names_directly,
    normalise,
    normalised,
    refs_of,
    render_ref,
    replace_operand,
    replace_ref,
)
from accelopt_ray.rewrite.poly import ONE, ZERO, Poly
from accelopt_ray.rewrite.regions import Axis, Buffer, Dim, Loop, Op, Ref, Space
from accelopt_ray.rewrite.retile import rewrite_dims
from accelopt_ray.rewrite.rule import Resource, Rule, Site, anchor_of, rebound_between, remove, tidy
from accelopt_ray.rewrite.syntax import expression, index_of, names_read, statement, substitute

#: Columns of a collected row: 16 KiB of each partition, four times what a transfer needs to reach full bandwidth.
_MOST_COLUMNS = 4096
_LOOPS = frozenset({"affine_range", "sequential_range", "range"})


@dataclass(frozen=True)
class _Chunk:
    """A store of one chunk of a row in every iteration of a loop.

    Attributes:
        store: The store.
        loop: The loop over the chunks.
        dest, value: The regions in HBM and on chip, with the numbers of their free dimensions.
        width: Columns of a chunk.
        group: Chunks to collect; None where the kernel must find out, 0 where the row is on chip already.
    """

    store: Op
    loop: Loop
    dest: tuple[Ref, int]
    value: tuple[Ref, int]
    width: int
    group: int | None


class CoalesceStores(Rule):
    """The chunks of a row that a loop stores one by one are stored together after it."""

    id = "coalesce-stores"
    title = "Store a row at once instead of chunk by chunk"
    problem = "a loop stores neighbouring chunks of the same rows, each with a transfer of its own."
    evidence = "the DMA queues are busy although (hbm_read_bytes + hbm_write_bytes) / latency is below the bandwidth."
    change = "collect the chunks in one SBUF row, of up to 4096 columns, and store it after the loop."
    expectation = "fewer and longer transfers; bytes and instructions unchanged."
    relieves = Resource.OVERHEAD
    typical_gain = 1.04
    exclusive = True
    keywords = ("coalesce stores", "store once", "one store", "store the whole row", "wider stores")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        sites: list[Site] = []
        for op in fresh.ops:
            try:
                chunk = _chunk(fresh, op)
                self._rewrite(normalised(kernel), op.position)
            except NotReorderable:
                continue
            detail = (f"A chunk has {chunk.width} columns.",)
            sites.append(Site(self.id, f"loop `{chunk.loop.index}`", len(sites), (), detail, op.position))
        return sites

    def apply(self, kernel: Kernel, site: Site) -> None:
        kernel.tree = self._rewrite(normalise(kernel), site.position).tree

    @staticmethod
    def _rewrite(kernel: Kernel, position: int) -> Kernel:
        chunk = _chunk(kernel, kernel.ops[position])
        if chunk.group == 0:
            assert chunk.loop.trips is not None
            _take_all(kernel, chunk, chunk.loop.trips)
        else:
            _collect(kernel, chunk)
        if chunk.loop.index in names_read(chunk.store.node):
            raise NotReorderable("the rows depend on the chunk")
        tidy(kernel)
        return kernel


def _chunk(kernel: Kernel, op: Op) -> _Chunk:
    """Reads a store as one of a chunk.

    Raises:
        NotReorderable: It is something else, or may not wait until its loop ends.
    """
    dest, value = op.dest, op.ref("value")
    if op.kind != "store" or op.mask or not op.loops or dest is None or value is None:
        raise NotReorderable("no store in a loop")
    loop = op.loops[-1]
    if op.block is not loop.node.body or loop.kind not in _LOOPS or loop.start != ZERO or loop.step != ONE:
        raise NotReorderable("the loop does not count chunks")
    if loop.trips is None or loop.trips == ONE:
        raise NotReorderable("there is one chunk")
    out, held = _last_dim(dest), _last_dim(value)
    width = dest.shape[1].value if dest.shape is not None else None
    if width is None or dest.shape != value.shape or value.buffer.space is not Space.SBUF or dest.dims is None:
        raise NotReorderable("the chunk is not understood")
    if not _moves(dest, out, loop, width):
        raise NotReorderable("the chunks are no neighbours")
    inside = [each for each in kernel.ops if loop in each.loops]
    for each in inside:
        if each.kind == "unknown" or any(outer.kind == "if" for outer in each.loops):
            raise NotReorderable("a statement is not understood")
        touched = [*each.reads(), *([each.dest] if each.dest is not None else [])]
        if each is not op and any(ref.buffer.name == dest.buffer.name for ref in touched):
            raise NotReorderable("the tensor is used between the chunks")
    if any(write.position > op.position for write in value.buffer.writes if loop in write.loops):
        raise NotReorderable("the chunk is overwritten after it has been stored")
    found = _Chunk(op, loop, (dest, out), (value, held), width, 0)
    if loop not in value.buffer.loops:
        _check_row(found)
        return found
    _check_tile(kernel, found, inside)
    return _Chunk(op, loop, (dest, out), (value, held), width, _group(loop.trips, width))


def _last_dim(ref: Ref) -> int:
    """Number of the last dimension, along which alone the free axis of a two-dimensional tile must run.

    Raises:
        NotReorderable: The tile is another.
    """
    if ref.dims is None or ref.shape is None or len(ref.shape) != 2:
        raise NotReorderable(f"{ref.text} is not a two-dimensional tile")
    last = ref.dims[-1]
    if len(last.axes) != 1 or last.axes[0].position != 1 or last.axes[0].stride != 1:
        raise NotReorderable(f"the columns of {ref.text} are not contiguous")
    if any(axis.position == 1 for dim in ref.dims[:-1] for axis in dim.axes):
        raise NotReorderable(f"the columns of {ref.text} are not contiguous")
    return len(ref.dims) - 1


def _moves(ref: Ref, number: int, loop: Loop, width: int) -> bool:
    """Whether a region advances by its own width with each iteration, and in no other way."""
    assert ref.dims is not None
    others = [dim for place, dim in enumerate(ref.dims) if place != number]
    factor = ref.dims[number].start.coefficient(loop.index)
    return factor == Poly.of(width) and not any(dim.start.depends_on([loop.index]) for dim in others)


def _check_row(chunk: _Chunk) -> None:
    """Raises :class:`NotReorderable` unless the row keeps every chunk until the loop ends."""
    (value, number), loop = chunk.value, chunk.loop
    if not _moves(value, number, loop, chunk.width):
        raise NotReorderable("the chunks are no neighbours on chip")
    assert value.dims is not None
    for write in value.buffer.writes:
        if loop not in write.loops:
            continue
        dims = write.dest.dims if write.dest is not None and write.dest.buffer is value.buffer else None
        if dims is None or not _within(dims[number], value.dims[number], loop, write):
            raise NotReorderable("an iteration writes to other chunks")


def _within(written: Dim, chunk: Dim, loop: Loop, write: Op) -> bool:
    """Whether what an operation writes lies in the chunk of the same iteration."""
    if written == chunk:
        return True
    offset = written.start - chunk.start
    end = Poly() if written.is_point else written.axes[0].length - ONE
    if written.axes and (len(written.axes) != 1 or written.axes[0].stride != 1):
        return False
    for inner in write.loops[write.loops.index(loop) + 1 :]:
        factor = offset.coefficient(inner.index)
        if factor is None or factor.value is None or factor.value < 0:
            return False
        if factor != ZERO:
            if inner.trips is None or inner.start != ZERO or inner.step != ONE:
                return False
            end += factor * (inner.trips - ONE)
            offset = offset.without(inner.index)
    first, last, width = offset.value, (offset + end).value, chunk.axes[0].length.value
    return first is not None and last is not None and width is not None and first >= 0 and last < width


def _check_tile(kernel: Kernel, chunk: _Chunk, inside: list[Op]) -> None:
    """Raises :class:`NotReorderable` unless the chunk's tile can become part of a row and the loop be split."""
    (value, _), loop = chunk.value, chunk.loop
    tile = value.buffer
    assert value.dims is not None
    if tile.loops[-1] is not loop or tile.block_dims or tile.fill is not None or tile.shape != value.shape:
        raise NotReorderable("the tile is not one of the chunk alone")
    if not value.is_whole:
        raise NotReorderable("the tile is not stored as a whole")
    if tile.origin == "value" and (len(tile.reads) != 1 or len(tile.writes) != 1):
        raise NotReorderable("the tile is used elsewhere, in a type that is not known")
    for _, _, ref in refs_of(kernel, tile):
        if not names_directly(ref.node, tile.name) or ref.dims is None or len(ref.dims) != 2:
            raise NotReorderable(f"{ref.text} is not understood")
    for op in inside:
        carried = op.dest is not None and loop not in op.dest.buffer.loops and op is not chunk.store
        if carried and (op.accumulate or op.kind == "update"):
            raise NotReorderable("the loop carries a sum")
        if op.kind == "loop_reduce" and loop.index in op.attrs.get("loop_indices", ""):
            raise NotReorderable("the loop carries a sum")


def _group(trips: Poly | None, width: int) -> int | None:
    """How many chunks to collect; None where the kernel must find out.

    Raises:
        NotReorderable: No two of them fit, or their number has no divisor that does.
    """
    most = _MOST_COLUMNS // width
    number = trips.value if trips is not None else None
    if number is None and most > 1:
        return None
    best = max((size for size in range(2, most + 1) if number is not None and number % size == 0), default=1)
    if best == 1:
        raise NotReorderable("a row of several chunks would not fit")
    return best


def _take_all(kernel: Kernel, chunk: _Chunk, trips: Poly) -> None:
    """Moves the store behind the loop and lets it take all chunks of a row that is on chip."""
    store, loop = chunk.store, chunk.loop
    length = trips * Poly.of(chunk.width)
    for name, (ref, number) in (("dest", chunk.dest), ("value", chunk.value)):
        assert ref.dims is not None
        whole = Dim(ref.dims[number].start.without(loop.index), (Axis(1, 1, length),))
        rewrite_dims(kernel, store, name, ref, {number: whole}, frozenset())
    remove(store.block, store.node)
    loop.block.insert(index_of(loop.block, loop.node) + 1, store.node)


def _collect(kernel: Kernel, chunk: _Chunk) -> None:
    """Splits the loop into groups and lets each group make a row, which is stored behind it."""
    store, loop, width = chunk.store, chunk.loop, Poly.of(chunk.width)
    (dest, number), tile = chunk.dest, chunk.value[0].buffer
    nl, row = kernel.alias("nl"), kernel.fresh("row_tile")
    iteration = loop.node.iter
    assert isinstance(iteration, ast.Call) and dest.dims is not None and dest.shape is not None
    whole = loop.trips is not None and chunk.group is not None and loop.trips.value == chunk.group
    member = loop.index if whole else kernel.fresh("member")
    group = "" if whole else kernel.fresh("group")
    count = Poly.of(chunk.group) if chunk.group is not None else Poly.symbol(kernel.fresh("chunks"))
    rows, start = dest.shape[0].text(), dest.dims[number].start.without(loop.index)
    if group:
        start += Poly.symbol(group) * count * width
    for op, name, ref in refs_of(kernel, tile):
        if op is not store:
            assert ref.dims is not None
            replace_ref(op, name, render_ref(row, _shifted(ref, Poly.symbol(member) * width), nl))
    rewrite_dims(kernel, store, "dest", dest, {number: Dim(start, (Axis(1, 1, count * width),))}, frozenset())
    replace_operand(store, "value", f"{row}[0:{rows}, 0:{(count * width).text()}]")
    remove(store.block, store.node)
    shape = f"({nl}.par_dim({rows}), {(count * width).text()})"
    dtype = _dtype(tile) or (f"{dest.buffer.name}.dtype" if tile.origin == "value" else f"{nl}.float32")
    declaration = statement(f"{row} = {nl}.ndarray({shape}, dtype={dtype}, buffer={nl}.sbuf)")
    place = index_of(loop.block, loop.node)
    if whole:
        loop.block[place : place + 1] = [declaration, loop.node, store.node]
        return
    trips, function = ast.unparse(iteration.args[-1]), ast.unparse(iteration.func)
    for item in loop.node.body:
        substitute(item, {loop.index: expression(f"{group} * {count.text()} + {member}")})
    inner = ast.For(ast.Name(member, ast.Store()), expression(f"{function}({count.text()})"), loop.node.body, [])
    loop.node.target = ast.Name(group, ast.Store())
    loop.node.iter = expression(f"{function}(({trips}) // {count.text()})")
    loop.node.body = [declaration, ast.fix_missing_locations(inner), store.node]
    if chunk.group is None:
        size = kernel.fresh("size")
        sizes = f"range(1, {_MOST_COLUMNS // chunk.width + 1})"
        search = f"max({size} for {size} in {sizes} if ({trips}) % {size} == 0)"
        loop.block.insert(place, statement(f"{count.text()} = {search}"))


def _dtype(buffer: Buffer) -> str:
    """Source of a buffer's element type, or ``""`` where none is given."""
    if buffer.origin == "value":
        return buffer.writes[0].attrs.get("dtype", "")
    call = buffer.declaration.value if isinstance(buffer.declaration, ast.Assign) else None
    if not isinstance(call, ast.Call):
        return ""
    given = next((k.value for k in call.keywords if k.arg == "dtype"), call.args[1] if len(call.args) > 1 else None)
    return ast.unparse(given) if given is not None else ""


def _shifted(ref: Ref, offset: Poly) -> tuple[Dim, ...]:
    """The dimensions of a region, further along the last one."""
    assert ref.dims is not None
    return (*ref.dims[:-1], Dim(ref.dims[-1].start + offset, ref.dims[-1].axes))


class CoalesceLoads(Rule):
    """Neighbouring column tiles that one body loads one by one are loaded together."""

    id = "coalesce-loads"
    title = "Load neighbouring tiles at once and slice them on chip"
    problem = "a body loads several neighbouring column tiles of the same rows, each with a transfer of its own."
    evidence = "the DMA queues are busy although (hbm_read_bytes + hbm_write_bytes) / latency is below the bandwidth."
    change = "load one tile as wide as all of them, and use its columns where the separate tiles were used."
    expectation = "fewer and longer transfers; bytes and instructions unchanged."
    relieves = Resource.OVERHEAD
    typical_gain = 1.04
    keywords = ("coalesce loads", "neighbouring tiles", "one wider load", "adjacent loads")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        sites: list[Site] = []
        for run in _runs(fresh):
            first = min(run, key=lambda op: op.position)
            detail = (f"{len(run)} tiles are neighbours.",)
            sites.append(Site(self.id, anchor_of(first), len(sites), (), detail, first.position))
        return sites

    def apply(self, kernel: Kernel, site: Site) -> None:
        fresh = normalise(kernel)
        run = next((each for each in _runs(fresh) if min(op.position for op in each) == site.position), None)
        if run is None:
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        nl, wide = fresh.alias("nl"), fresh.fresh("wide_tile")
        first = min(run, key=lambda op: op.position)
        origin, columns = _start(run[0]), Poly()
        for op in run:
            assert op.dest is not None
            offset = _start(op) - origin
            columns = offset + _length(op)
            for reader, name, ref in refs_of(fresh, op.dest.buffer):
                if name != "dest":
                    replace_ref(reader, name, render_ref(wide, _shifted(ref, offset), nl))
        source = first.ref("src")
        assert source is not None and source.dims is not None and isinstance(first.node, ast.Assign)
        last = len(source.dims) - 1
        rewrite_dims(fresh, first, "src", source, {last: Dim(origin, (Axis(1, 1, columns),))}, frozenset())
        first.node.targets[0] = ast.Name(wide, ast.Store())
        for op in run:
            if op is not first:
                remove(op.block, op.node)
        tidy(fresh)
        kernel.tree = fresh.tree


def _start(op: Op) -> Poly:
    source = op.ref("src")
    assert source is not None and source.dims is not None
    return source.dims[-1].start


def _length(op: Op) -> Poly:
    source = op.ref("src")
    assert source is not None and source.dims is not None
    return source.dims[-1].axes[0].length


def _runs(kernel: Kernel) -> Iterator[list[Op]]:
    """Loads of neighbouring tiles in order of their columns, as long as they fit in a row of a bounded width."""
    groups: dict[object, list[Op]] = {}
    for op in kernel.ops:
        source = op.ref("src")
        if source is not None and _is_tile_load(kernel, op):
            assert source.dims is not None
            key = (id(op.block), id(source.buffer), source.dims[:-1], op.attrs.get("dtype"))
            groups.setdefault(key, []).append(op)
    for loads in groups.values():
        base = _start(loads[0])
        known = [op for op in loads if (_start(op) - base).value is not None]
        known.sort(key=lambda op: (_start(op) - base).value or 0)
        run: list[Op] = []
        for op in known:
            neighbour = bool(run) and _start(run[-1]) + _length(run[-1]) == _start(op)
            total = (_start(op) + _length(op) - _start(run[0])).value if run else None
            if neighbour and total is not None and total <= _MOST_COLUMNS and _together(kernel, [*run, op]):
                run.append(op)
                continue
            if len(run) > 1:
                yield run
            run = [op]
        if len(run) > 1:
            yield run


def _is_tile_load(kernel: Kernel, op: Op) -> bool:
    """Whether an operation loads a plain tile that is used under its own name."""
    source, dest = op.ref("src"), op.dest
    if op.kind != "load" or op.mask or source is None or dest is None or source.buffer.space is not Space.HBM:
        return False
    tile = dest.buffer
    if tile.origin != "value" or len(tile.writes) != 1 or tile.returned or source.buffer.origin == "constant":
        return False
    try:
        _last_dim(source)
    except NotReorderable:
        return False
    if _length(op).value is None or sum(1 for other in kernel.buffers if other.name == tile.name) > 1:
        return False
    mentions = [ref for _, name, ref in refs_of(kernel, tile) if name != "dest"]
    return all(names_directly(ref.node, tile.name) and ref.dims is not None and len(ref.dims) == 2 for ref in mentions)


def _together(kernel: Kernel, run: list[Op]) -> bool:
    """Whether nothing between the first and the last load changes what they load."""
    first, last = min(run, key=lambda op: op.position), max(run, key=lambda op: op.position)
    source = first.ref("src")
    assert source is not None
    for op in kernel.ops:
        if first.position < op.position < last.position:
            writes = op.dest is not None and op.dest.buffer.name == source.buffer.name
            if writes or op.kind == "unknown":
                return False
    return not any(rebound_between(kernel, first, last, op.node) for op in run)


RULES = (CoalesceStores(), CoalesceLoads())
