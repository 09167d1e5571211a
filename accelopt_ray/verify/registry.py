"""Correctness checks by the name given to ``--check``."""

from __future__ import annotations

import difflib

from accelopt_ray.outcome import UserError
from accelopt_ray.verify.checks import Check, PublishedCheck
from accelopt_ray.verify.precision import PrecisionTier
from accelopt_ray.verify.strict import StrictCheck

CHECKS = ("published", "strict")


def get_check(name: str, precision: str = PrecisionTier.FP32) -> Check:
    """Returns a check.

    Args:
        name: Its name.
        precision: Least precise tier that it accepts, if it looks at precision at all.

    Raises:
        UserError: There is no such check or tier.
    """
    tiers = [str(tier) for tier in PrecisionTier]
    if precision not in tiers:
        raise UserError(f"unknown precision tier '{precision}': choose from {', '.join(tiers)}")
    if name == "published":
        return PublishedCheck()
    if name == "strict":
        return StrictCheck(frozenset(tiers[: tiers.index(precision) + 1]))
    close = difflib.get_close_matches(name, CHECKS, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(CHECKS)}"
    raise UserError(f"unknown check '{name}': {hint}")
