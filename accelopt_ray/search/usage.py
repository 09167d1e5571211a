"""Whether a plan has used a lesson, and how such plans fared.

Every planner of an iteration is shown all lessons, so having seen one says nothing. A plan counts as using a lesson
when it names most of what the lesson's title names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_WORD = re.compile(r"[a-z0-9_]{3,}")
_COMMON = frozenset(("and", "are", "for", "from", "into", "its", "not", "one", "onto", "over", "per", "than", "that"))
_COMMON |= {"the", "then", "this", "use", "using", "with"}
_LEAST_SHARE = 0.6


@dataclass(frozen=True)
class Use:
    """How plans that used a lesson fared.

    Attributes:
        successes: Plans that made their kernel faster.
        plans: All of them.
    """

    successes: int = 0
    plans: int = 0

    @property
    def chance(self) -> float:
        """The estimated chance that the next one succeeds: one half while nothing is known."""
        return (self.successes + 1) / (self.plans + 2)


Uses = Mapping[str, Use]
"""By the lesson's item id."""


def added(one: Uses, other: Uses) -> dict[str, Use]:
    """Adds two records up."""
    total = dict(one)
    for item_id, use in other.items():
        known = total.get(item_id, Use())
        total[item_id] = Use(known.successes + use.successes, known.plans + use.plans)
    return total


def mentions(plan: str, title: str) -> bool:
    """Whether a plan names most of what a title names."""
    wanted = set(_WORD.findall(title.lower())) - _COMMON
    if not wanted:
        return False
    return len(wanted & set(_WORD.findall(plan.lower()))) / len(wanted) >= _LEAST_SHARE
