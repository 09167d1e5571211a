"""Fusing neighbouring loops without reordering anything inside them (docs/rewriter.md, E3)."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.nest import NotReorderable
from accelopt_ray.rewrite.normalise import normalise, normalised
from accelopt_ray.rewrite.poly import Poly
from accelopt_ray.rewrite.regions import Dim, Loop, Op, Ref
from accelopt_ray.rewrite.rule import Resource, Rule, Site, tidy
from accelopt_ray.rewrite.syntax import index_of, names_read, substitute, walk

_Chain = Sequence[Loop]


class FuseLoops(Rule):
    """A loop that consumes, tile by tile, what an earlier loop over the same range makes runs inside that loop."""

    id = "fuse-loops"
    title = "Fuse the consuming loop into the loop that produces its tiles"
    problem = "a loop makes all tiles of a strip before the next loop over the same range begins to use them."
    evidence = "the busiest engine waits: no engine is active all the time although bytes are at their minimum."
    change = "run the consumer's body at the end of the producer's body, for the same tile."
    expectation = "engines work on different tiles at the same time; bytes and instructions unchanged."
    relieves = Resource.OVERHEAD
    typical_gain = 1.03
    exclusive = True
    keywords = ("fuse the consuming", "same range", "tile by tile")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        sites: list[Site] = []
        for number, (first, second) in enumerate(_neighbours(fresh)):
            try:
                _plan(fresh, first, second)
            except NotReorderable:
                continue
            sites.append(Site(self.id, f"loop `{second.index}` into loop `{first.index}`", 0, (), (), number))
        return sites

    def apply(self, kernel: Kernel, site: Site) -> None:
        fresh = normalise(kernel)
        first, second = _neighbours(fresh)[site.position]
        producers, consumers, moved = _plan(fresh, first, second)
        mapping: dict[str, ast.expr] = {
            inner.index: ast.Name(outer.index, ast.Load()) for outer, inner in zip(producers, consumers, strict=True)
        }
        body = [substitute(copy.deepcopy(item), mapping) for item in consumers[-1].node.body]
        producers[-1].node.body.extend(body)  # type: ignore[arg-type]
        block = first.block
        block[:] = [item for item in block if item is not second.node and item not in moved]
        place = index_of(block, first.node)
        block[place:place] = moved
        tidy(fresh)
        kernel.tree = fresh.tree


def _neighbours(kernel: Kernel) -> list[tuple[Loop, Loop]]:
    """Each loop with the next one in its block."""
    pairs: list[tuple[Loop, Loop]] = []
    for loop in kernel.loops:
        at = index_of(loop.block, loop.node)
        following = next((item for item in loop.block[at + 1 :] if isinstance(item, ast.For)), None)
        pairs += [(loop, other) for other in kernel.loops if other.node is following]
    return pairs


def _chain(kernel: Kernel, loop: Loop) -> list[Loop]:
    """A loop and the loops that make up its body, as long as there is nothing beside them."""
    chain = [loop]
    while True:
        real = [s for s in chain[-1].node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        inner = next((each for each in kernel.loops if len(real) == 1 and each.node is real[0]), None)
        if inner is None:
            return chain
        chain.append(inner)


def _plan(kernel: Kernel, first: Loop, second: Loop) -> tuple[_Chain, _Chain, list[ast.stmt]]:
    """Loops to run together, pair by pair from the outside, and the declarations to move in front.

    Raises:
        NotReorderable: They cannot run together.
    """
    producers: list[Loop] = []
    consumers: list[Loop] = []
    for outer, inner in zip(_chain(kernel, first), _chain(kernel, second), strict=False):
        if not (outer.parallel and inner.parallel) or outer.trips is None or outer.trips != inner.trips:
            break
        producers.append(outer)
        consumers.append(inner)
    if not producers:
        raise NotReorderable("the loops run over different ranges")
    made = [op for op in kernel.ops if first in op.loops]
    used = [op for op in kernel.ops if second in op.loops]
    if any(op.kind == "unknown" or any(loop.kind == "if" for loop in op.loops) for op in (*made, *used)):
        raise NotReorderable("a statement is not understood")
    moved = _movable(kernel, first, second, used)
    _check_flow(made, used, producers, consumers)
    return producers, consumers, moved


def _movable(kernel: Kernel, first: Loop, second: Loop, used: Sequence[Op]) -> list[ast.stmt]:
    """Declarations between the loops that the second one needs.

    Raises:
        NotReorderable: It needs something else from between, or disturbs what stands there.
    """
    block = first.block
    start = index_of(block, first.node)
    stop = index_of(block, second.node)
    between = block[start + 1 : stop]
    # A sum that is only added to is bound by no read.
    needed = {node.id for node in walk(second.node) if isinstance(node, ast.Name)}
    bound = {t.id for s in between if isinstance(s, ast.Assign) for t in s.targets if isinstance(t, ast.Name)}
    moved: list[ast.stmt] = []
    for statement in between:
        targets = (
            {t.id for t in statement.targets if isinstance(t, ast.Name)} if isinstance(statement, ast.Assign) else set()
        )
        if not targets & needed:
            continue
        declared = any(buffer.declaration is statement for buffer in kernel.buffers)
        if not declared or names_read(statement) & bound:
            raise NotReorderable("the second loop needs a value from between the loops")
        moved.append(statement)
    inside = {id(node) for statement in between for node in walk(statement)}
    middle = [op for op in kernel.ops if id(op.node) in inside]
    written = {op.dest.buffer.name for op in used if op.dest is not None}
    touched = written | {ref.buffer.name for op in used for ref in op.reads()}
    for op in middle:
        if op.kind == "unknown" or (op.dest is not None and op.dest.buffer.name in touched):
            raise NotReorderable("a statement between the loops writes what the second one uses")
        if any(ref.buffer.name in written for ref in op.reads()):
            raise NotReorderable("a statement between the loops reads what the second one writes")
    return moved


def _check_flow(made: Sequence[Op], used: Sequence[Op], producers: _Chain, consumers: _Chain) -> None:
    """Raises :class:`NotReorderable` unless each iteration uses only what the same iteration makes."""
    renamed = {inner.index: outer.index for outer, inner in zip(producers, consumers, strict=True)}
    flows = False
    for op in used:
        for ref in [*op.reads(), *([op.dest] if op.dest is not None else [])]:
            for other in made:
                is_dest = other.dest is not None and other.dest.buffer.name == ref.buffer.name
                reads = any(each.buffer.name == ref.buffer.name for each in other.reads())
                if (is_dest or reads) and ref is op.dest:
                    raise NotReorderable("the second loop writes what the first one uses")
                if other in ref.buffer.writes and not is_dest:
                    raise NotReorderable("an instruction's second result flows between the loops")
                if not is_dest:
                    continue
                assert other.dest is not None
                if other.accumulate or other.kind in ("loop_reduce", "update"):
                    raise NotReorderable("a sum is not complete before its loop ends")
                if not all(_same_tile(other.dest, ref, outer.index, renamed) for outer in producers):
                    raise NotReorderable("the second loop uses tiles of other iterations")
                flows = True
    if not flows:
        raise NotReorderable("nothing flows between the loops")


def _same_tile(written: Ref, read: Ref, index: str, renamed: dict[str, str]) -> bool:
    """Whether, for different values of a loop index, a read region provably meets only what was written for its own."""
    if written.dims is None or read.dims is None or len(written.dims) != len(read.dims):
        return False
    for have, other in zip(written.dims, read.dims, strict=True):
        want = other.rename(renamed)
        factor = have.start.coefficient(index)
        if factor is None or factor == Poly():
            continue
        if have == want and (have.is_point or _disjoint(have, factor)):
            return True
    return False


def _disjoint(dim: Dim, factor: Poly) -> bool:
    """Whether ranges that are ``factor`` apart do not overlap."""
    return len(dim.axes) == 1 and dim.axes[0].stride == 1 and dim.axes[0].length == factor


RULES = (FuseLoops(),)
