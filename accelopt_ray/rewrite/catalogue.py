"""All rules by id."""

from __future__ import annotations

from accelopt_ray.rewrite.rule import Rule
from accelopt_ray.rewrite.rules import algebra, fusion

RULES: tuple[Rule, ...] = (*algebra.RULES, *fusion.RULES)
BY_ID: dict[str, Rule] = {rule.id: rule for rule in RULES}
