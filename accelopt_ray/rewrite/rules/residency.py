"""Operands that stay on chip for a whole loop (docs/rewriter.md, D8)."""

from __future__ import annotations

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.nest import Leaf, Nest, NotReorderable, bytes_per_partition, emit, read_nest, reorder
from accelopt_ray.rewrite.normalise import normalise, normalised
from accelopt_ray.rewrite.regions import Loop, Space
from accelopt_ray.rewrite.rule import Resource, Rule, Site, tidy
from accelopt_ray.rewrite.syntax import index_of

#: Of about 164 KiB that stay resident, what one operand may take beside the tiles of the loop.
MOST_BYTES = 100 * 1024


class ResidentOperand(Rule):
    """Tiles that are loaded anew in every iteration of an outer loop are loaded once, in front of it, and kept."""

    id = "resident-operand"
    title = "Keep the operand that every row tile needs on chip"
    problem = "all tiles of an operand are loaded again in every iteration of an outer loop that they do not depend on."
    evidence = "hbm_read_bytes far above the inputs' size without spills; where the compiler hoists loads they are not."
    change = "load all its tiles into one buffer in front of the outer loop, and read them from there."
    expectation = "hbm_read_bytes fall to about the inputs' size; SBUF must hold the operand beside the loop's tiles."
    relieves = Resource.TRAFFIC
    typical_gain = 1.03
    exclusive = True
    keywords = ("resident operand", "operand resident", "keep the operand", "keep the weights")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        sites: list[Site] = []
        for number, loop in enumerate(fresh.loops):
            try:
                _, kept = _plan(fresh, loop)
                self._rewrite(normalised(kernel), number)
            except NotReorderable:
                continue
            names = ", ".join(f"`{leaf.op.dest.buffer.name}`" for leaf in kept if leaf.op.dest is not None)
            sites.append(Site(self.id, f"loop `{loop.index}`", len(sites), (), (f"Kept: {names}.",), number))
        return sites

    def apply(self, kernel: Kernel, site: Site) -> None:
        kernel.tree = self._rewrite(normalise(kernel), site.position).tree

    @staticmethod
    def _rewrite(kernel: Kernel, number: int) -> Kernel:
        root = kernel.loops[number]
        nest, _ = _plan(kernel, root)
        schedule = reorder(nest, (root,))
        place = index_of(root.block, root.node)
        root.block[place : place + 1] = [*emit(schedule.prologue), *emit(schedule.main)]
        tidy(kernel)
        return kernel


def _plan(kernel: Kernel, root: Loop) -> tuple[Nest, list[Leaf]]:
    """The nest of a loop and the loads that it repeats.

    Raises:
        NotReorderable: It repeats none that would fit.
    """
    nest = read_nest(kernel, root)
    kept = [leaf for leaf in nest.leaves if root not in leaf.needs and _is_repeated_load(leaf)]
    if not kept:
        raise NotReorderable("no load is repeated")
    for leaf in kept:
        assert leaf.op.dest is not None
        size = bytes_per_partition(leaf.op.dest.buffer, leaf.needs)
        if size is not None and size > MOST_BYTES:
            raise NotReorderable("the operand does not fit")
    return nest, kept


def _is_repeated_load(leaf: Leaf) -> bool:
    """Whether a leaf loads different tiles of an input in inner loops; a single tile is a matter of hoisting."""
    op = leaf.op
    source = op.ref("src")
    if op.kind != "load" or op.mask or source is None or op.dest is None or not leaf.needs:
        return False
    return source.buffer.origin == "argument" and not source.buffer.writes and op.dest.buffer.space is Space.SBUF


RULES = (ResidentOperand(),)
