"""All rules by id, in the order in which they are best applied."""

from __future__ import annotations

from accelopt_ray.rewrite.rule import Rule
from accelopt_ray.rewrite.rules import (
    accumulation,
    algebra,
    blocking,
    coalescing,
    flattening,
    functions,
    fusion,
    gains,
    heads,
    hints,
    invariants,
    layout,
    loops,
    matmuls,
    nests,
    psum,
    residency,
    scans,
    softmax,
    tails,
    tiles,
    transposes,
)

#: Local rewrites; applied to exhaustion they cannot undo one another.
PEEPHOLES: tuple[Rule, ...] = (
    *functions.RULES,
    *softmax.RULES,
    *algebra.RULES,
    *fusion.RULES,
    *invariants.RULES,
    *hints.RULES,
)
#: Rewrites of loops and layouts, one site at a time.
STRUCTURAL: tuple[Rule, ...] = (
    *transposes.RULES,
    *heads.RULES,
    *nests.RULES,
    *gains.RULES,
    *matmuls.RULES,
    *blocking.RULES,
    *scans.RULES,
    *layout.RULES,
    *tails.RULES,
    *loops.RULES,
    *residency.RULES,
    *tiles.RULES,
    *flattening.RULES,
    *coalescing.RULES,
    *accumulation.RULES,
    *psum.RULES,
)
#: Rewrites that tidy up after a structural one.
CLEANUP: tuple[Rule, ...] = (*nests.CLEANUP,)

BY_ID: dict[str, Rule] = {rule.id: rule for rule in (*PEEPHOLES, *STRUCTURAL, *CLEANUP)}
