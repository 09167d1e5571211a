"""Work that is done more than once: equal loads and loop-invariant statements (docs/rewriter.md, D6, E1)."""

from __future__ import annotations

import ast

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.normalise import normalise, normalised, refs_of
from accelopt_ray.rewrite.regions import Buffer, Loop, Op, Space
from accelopt_ray.rewrite.rule import Resource, Rule, Site, anchor_of, remove, tidy
from accelopt_ray.rewrite.syntax import index_of, names_read, walk

_MOST_BYTES = 64 * 1024
_MOVABLE = frozenset({"load", "memset", "activation", "tensor_scalar", "tensor_tensor", "reciprocal", "copy"})


def _is_value(buffer: Buffer) -> bool:
    """Whether a buffer is the result of one operation bound to a name."""
    return buffer.origin == "value" and len(buffer.writes) == 1 and not buffer.returned


class ShareLoad(Rule):
    """A tile that has been loaded already is not loaded again."""

    id = "share-load"
    title = "Load a tile once and use it twice"
    problem = "the same region of an input is loaded a second time although the first tile still exists."
    evidence = "hbm_read_bytes exceed the inputs' size."
    change = "delete the second load and read the first tile instead."
    expectation = "hbm_read_bytes fall by the size of the second load."
    relieves = Resource.TRAFFIC
    typical_gain = 1.05
    keywords = ("duplicate load", "loaded twice", "load once", "second load")

    def _find(self, kernel: Kernel) -> list[Site]:
        sites: list[Site] = []
        for op in kernel.ops:
            if self._earlier(kernel, op) is not None:
                sites.append(Site(self.id, anchor_of(op), len(sites), (), (), op.position))
        return sites

    @staticmethod
    def _earlier(kernel: Kernel, op: Op) -> Op | None:
        """A load that makes ``op`` superfluous."""
        source = op.ref("src")
        if op.kind != "load" or source is None or op.dest is None or not _is_value(op.dest.buffer):
            return None
        if source.buffer.origin != "argument" or source.buffer.writes or op.attrs.get("dtype", "").endswith("16"):
            return None
        mentions = refs_of(kernel, op.dest.buffer)
        if any(op.dest.buffer.name not in _names(ref.node) for _, _, ref in mentions):
            return None  # A view stands for it under another name.
        for other in kernel.ops[: op.position]:
            first = other.ref("src")
            if other.kind != "load" or first is None or other.dest is None or not _is_value(other.dest.buffer):
                continue
            visible = op.path[: len(other.path)] == other.path
            same = first.same_region(source) and other.mask == op.mask
            same = same and other.attrs.get("dtype") == op.attrs.get("dtype")
            if visible and same and not _rebound(kernel, other.dest.buffer):
                return other
        return None

    def apply(self, kernel: Kernel, site: Site) -> None:
        op = kernel.ops[site.position]
        earlier = self._earlier(kernel, op)
        if earlier is None or earlier.dest is None or op.dest is None:
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        old, new = op.dest.buffer.name, earlier.dest.buffer.name
        for _, name, ref in refs_of(kernel, op.dest.buffer):
            if name != "dest":
                for node in walk(ref.node):
                    if isinstance(node, ast.Name) and node.id == old:
                        node.id = new
        remove(op.block, op.node)
        tidy(kernel)


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in walk(node) if isinstance(child, ast.Name)}


def _rebound(kernel: Kernel, buffer: Buffer) -> bool:
    """Whether the name of a buffer stands for something else elsewhere."""
    return sum(1 for other in kernel.buffers if other.name == buffer.name) > 1


class HoistInvariant(Rule):
    """A statement that does the same in every iteration moves in front of the loop."""

    id = "hoist-invariant"
    title = "Move a loop-invariant load or computation in front of the loop"
    problem = "a tile is loaded or computed anew in every iteration although nothing in it depends on the loop."
    evidence = "hbm_read_bytes exceed the inputs' size, or an engine repeats the same instruction."
    change = "put the statement directly in front of the loop."
    expectation = "its loads and instructions are divided by the number of iterations."
    relieves = Resource.TRAFFIC
    typical_gain = 1.04
    keywords = ("loop-invariant", "invariant load", "hoist", "out of the loop")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        sites: list[Site] = []
        for op in fresh.ops:
            if self._loop(fresh, op) is not None:
                sites.append(Site(self.id, anchor_of(op), len(sites), (), (), op.position))
        return sites

    @staticmethod
    def _loop(kernel: Kernel, op: Op) -> Loop | None:
        """The innermost loop around an operation if it may move in front of it."""
        if op.kind not in _MOVABLE or op.accumulate or not op.loops or op.dest is None or not _is_value(op.dest.buffer):
            return None
        loop, buffer = op.loops[-1], op.dest.buffer
        if loop.kind not in ("affine_range", "sequential_range") or op.block is not loop.node.body:
            return None
        if buffer.space is not Space.SBUF or (buffer.tile_bytes or 0) > _MOST_BYTES or _rebound(kernel, buffer):
            return None
        if not isinstance(op.node, ast.Assign) or names_read(op.node) & _assigned(loop.node):
            return None
        for ref in op.reads():
            written = [write for write in ref.buffer.writes if loop in write.loops]
            if written or loop in ref.buffer.loops or ref.buffer.space is Space.PSUM:
                return None
            if ref.buffer.space is Space.HBM and (ref.buffer.writes or ref.buffer.origin == "declared"):
                return None
        return loop

    def apply(self, kernel: Kernel, site: Site) -> None:
        fresh = normalise(kernel)
        op = fresh.ops[site.position]
        loop = self._loop(fresh, op)
        if loop is None:
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        remove(op.block, op.node)
        place = index_of(loop.block, loop.node)
        loop.block.insert(place, op.node)
        tidy(fresh)
        kernel.tree = fresh.tree


def _assigned(loop: ast.For) -> set[str]:
    """Names that a loop binds."""
    bound: set[str] = set()
    for node in walk(loop):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.For)):
            targets = [node.target]
        for target in targets:
            base = target.value if isinstance(target, ast.Subscript) else target
            bound |= {child.id for child in walk(base) if isinstance(child, ast.Name)}
    return bound


RULES = (ShareLoad(), HoistInvariant())
