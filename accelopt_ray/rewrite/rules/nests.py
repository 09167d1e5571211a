"""Rules that reorder and fuse loop nests (docs/rewriter.md, E1-E3, E8, G2, H1)."""

from __future__ import annotations

import ast
import copy

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.nest import Nest, NotReorderable, emit, read_nest, reorder
from accelopt_ray.rewrite.normalise import normalise, normalised, refs_of, render_ref, replace_ref
from accelopt_ray.rewrite.poly import Poly
from accelopt_ray.rewrite.regions import Buffer, Loop, Op, Ref, Space
from accelopt_ray.rewrite.rule import Resource, Rule, Site, tidy
from accelopt_ray.rewrite.syntax import expression, index_of, names_read, substitute, walk


class StripFusion(Rule):
    """A producer nest and the consumer of its rows become one loop over rows."""

    id = "strip-fusion"
    title = "Fuse the producing and the consuming loop over their common rows so that one row strip stays on chip"
    problem = (
        "a loop nest fills a tensor far larger than SBUF that a later loop reads row by row, so it is spilled to HBM "
        "and reloaded."
    )
    evidence = "spill_save_bytes and spill_reload_bytes are large and engines wait for them."
    change = (
        "make the row loops outermost in the producing nest (operands that do not depend on the row are prepared once, "
        "in front), run the consumer's body right after the strip is complete, and keep only one strip per row tile."
    )
    expectation = "spill bytes fall to about zero and HBM traffic to the inputs and outputs."
    relieves = Resource.SPILL
    typical_gain = 1.7
    keywords = ("strip", "fuse the producing", "fuse the loops", "row strip", "fuse passes")

    def _find(self, kernel: Kernel) -> list[Site]:
        copied = normalised(kernel)
        sites: list[Site] = []
        for number, (producer, consumer) in enumerate(_sibling_loops(copied)):
            try:
                plan = _plan_fusion(copied, producer, consumer)
            except NotReorderable:
                continue
            shared = ", ".join(sorted({f"`{buffer.name}`" for buffer in plan[3]}))
            anchor = f"loop `{consumer.index}` after loop `{producer.index}`"
            sites.append(
                Site(self.id, anchor, len(sites), (), (f"They share {shared}.",), number),
            )
        return sites

    def apply(self, kernel: Kernel, site: Site) -> None:
        fresh = normalise(kernel)
        producer, consumer = _sibling_loops(fresh)[site.position]
        nest, outer, substitution, _ = _plan_fusion(fresh, producer, consumer)
        block = producer.block
        schedule = reorder(nest, outer, _cheap_rows(nest))
        first = index_of(block, producer.node)
        last = index_of(block, consumer.node)
        body = consumer.node.body
        depth = 1
        inner = consumer
        while depth < len(substitution):
            inner = next(loop for loop in fresh.loops if loop.node is _only_loop(inner.node))
            body = inner.node.body
            depth += 1
        mapping: dict[str, ast.expr] = {index: expression(value.text()) for index, value in substitution.items()}
        tail = [substitute(copy.deepcopy(item), mapping) for item in body]
        between = block[first + 1 : last]
        main = emit(schedule.main)
        target = main
        for loop in outer:
            node = next(s for s in target if isinstance(s, ast.For) and _index(s) == loop.index)
            target = node.body
        target.extend(tail)  # type: ignore[arg-type]
        block[first : last + 1] = [*between, *emit(schedule.prologue), *main]
        tidy(fresh)
        kernel.tree = fresh.tree


def _index(node: ast.For) -> str:
    return node.target.id if isinstance(node.target, ast.Name) else ""


def _only_loop(node: ast.For) -> ast.For | None:
    """The single loop that makes up a loop's body, if it does (markers aside)."""
    real = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if len(real) == 1 and isinstance(real[0], ast.For):
        return real[0]
    return None


def _sibling_loops(kernel: Kernel) -> list[tuple[Loop, Loop]]:
    """Pairs of loops in one block, in program order."""
    pairs: list[tuple[Loop, Loop]] = []
    for number, first in enumerate(kernel.loops):
        for second in kernel.loops[number + 1 :]:
            if second.block is first.block:
                pairs.append((first, second))
    return pairs


_Plan = tuple[Nest, tuple[Loop, ...], dict[str, Poly], list[Buffer]]


def _plan_fusion(kernel: Kernel, producer: Loop, consumer: Loop) -> _Plan:
    """Row loops of the producer and what the consumer's loop indices become in their terms.

    Raises:
        NotReorderable: The two cannot be fused.
    """
    if not producer.parallel or not consumer.parallel:
        raise NotReorderable("a loop is not affine")
    writers = [op for op in kernel.ops if producer in op.loops]
    readers = [op for op in kernel.ops if consumer in op.loops]
    shared: list[Buffer] = []
    for op in writers:
        buffer = op.dest.buffer if op.dest is not None else None
        if buffer is None or buffer in shared or producer in buffer.loops:
            continue
        if any(ref.buffer is buffer for reader in readers for ref in reader.reads()):
            shared.append(buffer)
    if not any(_is_large(buffer) for buffer in shared):
        raise NotReorderable("nothing large flows between the loops")
    chain = [consumer]
    while (inner := _only_loop(chain[-1].node)) is not None:
        chain.append(next(loop for loop in kernel.loops if loop.node is inner))
    _check_independence(kernel, producer, consumer, shared, readers, writers)
    nest = read_nest(kernel, producer)
    # The more loops are shared, the shorter the strip; a reduction along the strip limits how many can be.
    refusal: NotReorderable | None = None
    for length in range(len(chain), 0, -1):
        try:
            substitution = _match_indices(shared, writers, readers, chain[:length])
            return nest, _row_loops(kernel, producer, nest, substitution, shared), substitution, shared
        except NotReorderable as error:
            refusal = refusal or error
    raise refusal or NotReorderable("the loops have no rows in common")


def _row_loops(
    kernel: Kernel, producer: Loop, nest: Nest, substitution: dict[str, Poly], shared: list[Buffer]
) -> tuple[Loop, ...]:
    """The producer's loops that select the consumer's rows, once reordering for them has been tried on a copy.

    Raises:
        NotReorderable: These loops cannot be put outermost.
    """
    rows = {name for value in substitution.values() for name in value.symbols}
    outer = tuple(loop for loop in nest.order if loop.index in rows)
    if not outer:
        raise NotReorderable("the consumer's rows do not correspond to loops of the producer")
    reads_rows = [leaf for leaf in nest.leaves if leaf.op.dest is not None and leaf.op.dest.buffer in shared]
    if not all(set(outer) <= set(leaf.needs) for leaf in reads_rows):
        raise NotReorderable("a shared tensor does not depend on all row loops")
    if len(outer) == len(nest.order):
        raise NotReorderable("the strip would be a single tile")
    trial = normalised(kernel)
    twin_loop = trial.loops[kernel.loops.index(producer)]
    twin = read_nest(trial, twin_loop)
    reorder(twin, tuple(twin.order[nest.order.index(loop)] for loop in outer), _cheap_rows(twin))
    return outer


def _cheap_rows(nest: Nest) -> frozenset[int]:
    """Loads of single rows and their broadcasts: repeated under the outer loops rather than kept for all iterations."""
    cheap: set[int] = set()
    for leaf in nest.leaves:
        op = leaf.op
        shape = op.dest.shape if op.dest is not None else None
        if op.kind == "load" and shape is not None and shape[0] == Poly.of(1):
            cheap.add(id(op))
        elif op.kind == "broadcast":
            source = op.ref("src")
            if source is not None and all(id(write) in cheap for write in source.buffer.writes):
                cheap.add(id(op))
    return frozenset(cheap)


def _is_large(buffer: Buffer) -> bool:
    size = buffer.tile_bytes
    return buffer.block_dims > 0 and buffer.space is Space.SBUF and (size is None or size >= 256)


def _match_indices(shared: list[Buffer], writers: list[Op], readers: list[Op], chain: list[Loop]) -> dict[str, Poly]:
    """For the longest prefix of the consumer's loops: each index as an expression of the producer's indices."""
    substitution: dict[str, Poly] = {}
    names = [loop.index for loop in chain]
    pairs = []
    for buffer in shared:
        for writer in writers:
            if writer.dest is None or writer.dest.buffer is not buffer:
                continue
            for reader in readers:
                pairs += [(writer.dest, ref) for ref in reader.reads() if ref.buffer is buffer]
    for written, read in pairs:
        if written.dims is None or read.dims is None or len(written.dims) != len(read.dims):
            raise NotReorderable("a region of a shared tensor is not understood")
        for have, want in zip(written.dims, read.dims, strict=False):
            for name in names:
                if want.start == Poly.symbol(name) and want.is_point and have.is_point and have.start.symbols:
                    known = substitution.setdefault(name, have.start)
                    if known != have.start:
                        raise NotReorderable("the consumer reads rows in two different ways")
    kept: dict[str, Poly] = {}
    for name in names:
        if name not in substitution:
            break
        kept[name] = substitution[name]
    if not kept:
        raise NotReorderable("the consumer's outer loop does not select rows of a shared tensor")
    for written, read in pairs:
        assert written.dims is not None and read.dims is not None
        for have, want in zip(written.dims, read.dims, strict=False):
            if want.start.depends_on(kept):
                if want.start.coefficient(next(iter(want.start.symbols))) is None or want.start.symbols - set(kept):
                    raise NotReorderable("rows and columns mix in one subscript")
                if want.start not in [Poly.symbol(name) for name in kept] or kept[want.start.text()] != have.start:
                    raise NotReorderable("the consumer reads other rows than the producer wrote")
            elif have.start.symbols & {s for value in kept.values() for s in value.symbols}:
                raise NotReorderable("the consumer reads rows that its loops do not select")
    return kept


def _check_independence(
    kernel: Kernel, producer: Loop, consumer: Loop, shared: list[Buffer], readers: list[Op], writers: list[Op]
) -> None:
    """Raises :class:`NotReorderable` when something between the loops depends on them, or the consumer on its order."""
    block = producer.block
    first = index_of(block, producer.node)
    last = index_of(block, consumer.node)
    between = {id(node) for item in block[first + 1 : last] for node in walk(item)}
    written = {op.dest.buffer.name for op in writers if op.dest is not None}
    touched = written | {ref.buffer.name for op in writers for ref in op.reads()}
    for op in kernel.ops:
        if id(op.node) in between:
            if op.kind == "unknown" or any(ref.buffer.name in written for ref in op.reads()):
                raise NotReorderable("a statement between the loops reads what the producer writes")
            if op.dest is not None and op.dest.buffer.name in touched:
                raise NotReorderable("a statement between the loops writes what the producer uses")
    for item in block[first + 1 : last]:
        if names_read(item) & {buffer.name for buffer in shared}:
            raise NotReorderable("a shared tensor is used between the loops")
    for op in readers:
        if op.dest is not None and consumer not in op.dest.buffer.loops and op.dest.buffer.name in touched:
            raise NotReorderable("the consumer writes a tensor that the producer uses")
    for buffer in shared:
        outside = [op for op, _, _ in refs_of(kernel, buffer) if op not in readers and op not in writers]
        if outside or buffer.returned:
            raise NotReorderable("a shared tensor is also used elsewhere")


class SinkBuffer(Rule):
    """A buffer declared with one block per iteration is declared inside the loops instead."""

    id = "sink-buffer"
    title = "Declare the buffer inside the loop that uses it, without the loop's block dimension"
    problem = (
        "a buffer with one block per loop iteration is declared outside the loop although each block is used in one "
        "iteration only."
    )
    evidence = "spill bytes, or allocation errors for giant tensors."
    change = "move the declaration into the loop and drop the block dimensions indexed by it."
    expectation = "shorter live ranges; spills fall."
    relieves = Resource.SPILL
    typical_gain = 1.03
    keywords = ("sink", "inside the loop", "declare the buffer")
    independent_sites = True

    def _find(self, kernel: Kernel) -> list[Site]:
        sites: list[Site] = []
        for number, buffer in enumerate(kernel.buffers):
            if self._plan(kernel, buffer) is not None:
                sites.append(Site(self.id, f"`{buffer.name}`", 0, (), (), number))
        return sites

    def apply(self, kernel: Kernel, site: Site) -> None:
        buffer = kernel.buffers[site.position]
        plan = self._plan(kernel, buffer)
        if plan is None:
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        loop, dropped = plan
        nl = kernel.alias("nl")
        assert buffer.shape is not None and isinstance(buffer.declaration, ast.Assign) and buffer.block is not None
        for op, name, ref in refs_of(kernel, buffer):
            assert ref.dims is not None
            dims = tuple(dim for number, dim in enumerate(ref.dims) if number not in dropped)
            rank = len(ref.shape) if ref.shape is not None else 2
            replace_ref(op, name, render_ref(buffer.name, dims, nl, rank))
        call = buffer.declaration.value
        assert isinstance(call, ast.Call)
        shape = next((k.value for k in call.keywords if k.arg == "shape"), None) or call.args[0]
        assert isinstance(shape, (ast.Tuple, ast.List))
        shape.elts = [element for number, element in enumerate(shape.elts) if number not in dropped]
        call.keywords = [keyword for keyword in call.keywords if keyword.arg != "name"]
        buffer.block[:] = [item for item in buffer.block if item is not buffer.declaration]
        position = 0
        loop.node.body.insert(position, buffer.declaration)

    @staticmethod
    def _plan(kernel: Kernel, buffer: Buffer) -> tuple[Loop, set[int]] | None:
        """The loop to declare the buffer in, and the block dimensions to drop."""
        if buffer.origin != "declared" or buffer.space is Space.HBM or not buffer.block_dims or buffer.returned:
            return None
        if buffer.shape is None or buffer.block is None:
            return None
        mentions = refs_of(kernel, buffer)
        if not mentions or any(ref.dims is None or op.kind == "unknown" for op, _, ref in mentions):
            return None
        common = list(mentions[0][0].loops)
        for op, _, _ in mentions[1:]:
            shared = 0
            while shared < min(len(common), len(op.loops)) and common[shared] is op.loops[shared]:
                shared += 1
            common = common[:shared]
        new = [loop for loop in common if loop not in buffer.loops]
        if not new or any(loop.kind == "if" for loop in new):
            return None
        dropped: set[int] = set()
        used: set[str] = set()
        inside = {loop.index for loop in new}
        for number in range(buffer.block_dims):
            starts = {ref.dims[number].start for _, _, ref in mentions if ref.dims is not None}
            if len(starts) == 1:
                start = next(iter(starts))
                if (
                    start.symbols
                    and start.depends_on(inside)
                    and all(s in inside or not _is_loop(kernel, s) for s in start.symbols)
                ):
                    dropped.add(number)
                    used |= start.symbols & inside
        # Reductions over a loop keep their destination outside that loop.
        target: Loop | None = None
        for loop in new:
            if loop.index not in used:
                break
            target = loop
        if target is None:
            return None
        reachable = {loop.index for loop in new[: new.index(target) + 1]}
        final = {
            number
            for number in dropped
            if mentions[0][2].dims is not None and mentions[0][2].dims[number].start.symbols & inside <= reachable
        }
        if not final or not _written_first(mentions):
            return None
        return target, final


def _is_loop(kernel: Kernel, symbol: str) -> bool:
    return symbol in kernel.names.loop_symbols


def _written_first(mentions: list[tuple[Op, str, Ref]]) -> bool:
    """Whether the first mention in program order writes (or the buffer only accumulates)."""
    first = min(op.position for op, _, _ in mentions)
    return any(op.position == first and name == "dest" for op, name, _ in mentions)


RULES = (StripFusion(),)
CLEANUP = (SinkBuffer(),)
