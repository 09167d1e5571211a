"""What the search has learnt: pairs of a slow and a fast kernel, and the lesson drawn from each.

Selection of pairs and the two ways of forgetting follow the paper and its code; how a lesson is written is the
summariser's matter (:mod:`accelopt_ray.search.lessons`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from accelopt_ray.outcome import StrEnum
from accelopt_ray.search.beam import fastest, slowest
from accelopt_ray.search.candidates import Attempt, PlanGroup
from accelopt_ray.search.plan_text import PlanText
from accelopt_ray.search.settings import MemoryRule
from accelopt_ray.search.usage import Use, Uses, added

_GREATEST_SPEEDUP = 2.0
_NEGATIVE_SHARE = 0.25
_SAME_LESSON = 0.7
"""Least Jaccard index of two lessons' three-word runs at which they are one lesson."""


class ExperienceKind(StrEnum):
    """Whether a rewrite made its kernel faster or slower."""

    POSITIVE = "positive"
    NEGATIVE = "negative"


@dataclass(frozen=True)
class RewritePair:
    """Two kernels one rewrite apart. The order is always slow, fast: for a negative the child is the slow one.

    Attributes:
        kind: Which way the rewrite went.
        slow_candidate_id: The slower kernel.
        slow_source: Its text.
        fast_candidate_id: The faster kernel.
        fast_source: Its text.
        speedup: Slow latency over fast latency, at least 1.
        plan_text: The plan that led from parent to child.
    """

    kind: ExperienceKind
    slow_candidate_id: str
    slow_source: str
    fast_candidate_id: str
    fast_source: str
    speedup: float
    plan_text: str


@dataclass(frozen=True)
class ExperienceItem:
    """A pair with its lesson.

    Attributes:
        item_id: Unique within the run.
        iteration: Iteration whose attempts it comes from.
        pair: The kernels.
        title: The lesson's name; empty if the summariser found no optimisation.
        text: The lesson; empty if there is none to show.
        call_id: The summariser's call.
        origin: Run and item that it was taken from, where another run's memory was given to this one.
    """

    item_id: str
    iteration: int
    pair: RewritePair
    title: str
    text: str
    call_id: str
    origin: str = ""

    @property
    def shown(self) -> bool:
        """Whether planners see it. An item without a lesson takes its place in the memory but is not shown."""
        return bool(self.text)


def select_experiences(
    groups: Sequence[PlanGroup],
    *,
    positive_threshold: float,
    negative_threshold: float,
    limit: int,
    ties: random.Random,
) -> list[RewritePair]:
    """Chooses the rewrites worth a lesson, over all candidates of the task together.

    For each (candidate, plan) the best attempt counts if it beat its parent; else the slowest, if it lost to its
    parent. Of these, speed-ups above ``positive_threshold`` are positives, largest first, at most ``limit // 2``;
    speed-ups below ``1 / negative_threshold`` are negatives, smallest first, and fill what remains of ``limit``.

    Args:
        groups: The iteration's attempts by plan, in the order of their positions.
        positive_threshold: t_pos.
        negative_threshold: t_neg.
        limit: TopK.
        ties: Stream that orders rewrites of equal speed-up.

    Returns:
        Positives, then negatives.
    """
    # One draw for each group, telling or not: what becomes of one has no say in a tie of others.
    draws = [(_telling_attempt(group), ties.random()) for group in groups]
    drawn = [(attempt, tie) for attempt, tie in draws if attempt is not None]
    positives = sorted(
        (entry for entry in drawn if entry[0].speedup > positive_threshold), key=lambda e: (-e[0].speedup, e[1])
    )[: limit // 2]
    negatives = sorted(
        (entry for entry in drawn if entry[0].speedup < 1 / negative_threshold), key=lambda e: (e[0].speedup, e[1])
    )[: limit - len(positives)]
    return [_positive(attempt) for attempt, _ in positives] + [_negative(attempt) for attempt, _ in negatives]


def update_memory(
    rule: MemoryRule | str,
    old: Sequence[ExperienceItem],
    new: Sequence[ExperienceItem],
    capacity: int,
    forgetting: random.Random,
) -> list[ExperienceItem]:
    """Returns the memory after an iteration.

    Args:
        rule: ``published``: all new items, then a uniform sample without replacement of the old ones up to the capacity
            (new items are never dropped, even beyond it). ``paper``: a first-in-first-out queue of that capacity.
        old: Items before the iteration, oldest first under ``paper``.
        new: The iteration's items, in their order of selection.
        capacity: ExpN.
        forgetting: Stream of the sample.

    Raises:
        ValueError: The rule is ``weighted``, which also depends on :class:`~accelopt_ray.search.usage.Uses`.
    """
    if MemoryRule(rule) is MemoryRule.WEIGHTED:
        raise ValueError("the weighted rule needs to know how often lessons were used: see update_weighted")
    if MemoryRule(rule) is MemoryRule.PAPER:
        queue = [*old, *new]
        return queue[max(0, len(queue) - capacity) :]
    room = max(0, capacity - len(new))
    return [*new, *forgetting.sample(list(old), min(room, len(old)))]


def update_weighted(
    old: Sequence[ExperienceItem], new: Sequence[ExperienceItem], capacity: int, record: Uses
) -> tuple[list[ExperienceItem], Uses]:
    """Returns the memory after an iteration under our own rule, best first, and the items' record with it.

    An item's worth is its chance of success, estimated from the plans that used it as (successes + 1) / (uses + 2),
    times the logarithm of its speed-up, which counts up to a factor of 2. Of lessons that say nearly the same the one
    of greater speed-up stays and takes over the other's record. Summaries without a lesson take no place. Up to a
    quarter of the places is kept for negative lessons, so that neither kind crowds out the other.

    Args:
        old: Items before the iteration.
        new: The iteration's items, in their order of selection.
        capacity: Places.
        record: Uses of all items so far.
    """
    distinct: list[ExperienceItem] = []
    known = dict(record)
    for item in sorted([*old, *new], key=lambda each: -each.pair.speedup):
        if not item.shown:
            continue
        twin = next((each for each in distinct if _same_lesson(each, item)), None)
        if twin is None:
            distinct.append(item)
        else:
            known = added(known, {twin.item_id: known.pop(item.item_id, Use())})

    def worth(item: ExperienceItem) -> float:
        return known.get(item.item_id, Use()).chance * math.log(min(item.pair.speedup, _GREATEST_SPEEDUP))

    ranked = sorted(distinct, key=worth, reverse=True)
    negatives = [item for item in ranked if item.pair.kind is ExperienceKind.NEGATIVE]
    positives = [item for item in ranked if item.pair.kind is ExperienceKind.POSITIVE]
    reserved = min(len(negatives), int(capacity * _NEGATIVE_SHARE))
    positives = positives[: capacity - reserved]
    kept = {item.item_id for item in [*positives, *negatives[: capacity - len(positives)]]}
    chosen = [item for item in ranked if item.item_id in kept]
    return chosen, {item_id: use for item_id, use in known.items() if item_id in kept}


def _same_lesson(one: ExperienceItem, other: ExperienceItem) -> bool:
    if one.pair.kind is not other.pair.kind:
        return False
    first, second = (PlanText.of(item.item_id, f"{item.title} {item.text}") for item in (one, other))
    return first.repeats(second, _SAME_LESSON)


class ExperienceStore(Protocol):
    """Who keeps one task's memory between iterations: the search's own process, or an actor beside it."""

    async def update(
        self, new: Sequence[ExperienceItem], forgetting: random.Random, uses: Uses | None = None
    ) -> list[ExperienceItem]:
        """Takes an iteration's items in and returns the memory after it.

        Args:
            new: As in :func:`update_memory`.
            forgetting: As in :func:`update_memory`.
            uses: How often the iteration's plans used each item, and succeeded; none by default.
        """


class LocalStore:
    """The memory in the search's own process."""

    def __init__(self, rule: MemoryRule | str, capacity: int) -> None:
        """Starts empty; arguments as in :func:`update_memory`."""
        self._rule = rule
        self._capacity = capacity
        self._items: list[ExperienceItem] = []
        self._record: Uses = {}

    async def update(
        self, new: Sequence[ExperienceItem], forgetting: random.Random, uses: Uses | None = None
    ) -> list[ExperienceItem]:
        """As :meth:`ExperienceStore.update`."""
        if MemoryRule(self._rule) is MemoryRule.WEIGHTED:
            self._record = added(self._record, uses or {})
            self._items, self._record = update_weighted(self._items, new, self._capacity, self._record)
        else:
            self._items = update_memory(self._rule, self._items, new, self._capacity, forgetting)
        return list(self._items)


def _telling_attempt(group: PlanGroup) -> Attempt | None:
    best, worst = fastest(group.valid_attempts), slowest(group.valid_attempts)
    if best is not None and best.speedup > 1:
        return best
    if worst is not None and worst.speedup < 1:
        return worst
    return None


def _positive(attempt: Attempt) -> RewritePair:
    parent, child = attempt.plan.parent, attempt.candidate()
    return RewritePair(
        ExperienceKind.POSITIVE,
        parent.candidate_id,
        parent.source.text,
        child.candidate_id,
        child.source.text,
        attempt.speedup,
        attempt.plan.text,
    )


def _negative(attempt: Attempt) -> RewritePair:
    parent, child = attempt.plan.parent, attempt.candidate()
    return RewritePair(
        ExperienceKind.NEGATIVE,
        child.candidate_id,
        child.source.text,
        parent.candidate_id,
        parent.source.text,
        1 / attempt.speedup,
        attempt.plan.text,
    )
