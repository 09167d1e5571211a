"""All rules by id."""

from __future__ import annotations

from accelopt_ray.rewrite.rule import Rule
from accelopt_ray.rewrite.rules import algebra, fusion, nests

RULES: tuple[Rule, ...] = (*algebra.RULES, *fusion.RULES, *nests.RULES)
BY_ID: dict[str, Rule] = {rule.id: rule for rule in RULES}
