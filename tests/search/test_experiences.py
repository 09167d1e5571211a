"""Which rewrites become lessons, and which lessons are forgotten, by both readings, computed by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_beam_selection import P, Q, group

from accelopt_ray.search.candidates import PlanGroup
from accelopt_ray.search.memory import (
    ExperienceItem,
    ExperienceKind,
    RewritePair,
    select_experiences,
    update_memory,
)


def select(
    groups: list[PlanGroup], limit: int, seed: int = 0, negative_threshold: float = 1.15
) -> list[tuple[str, str, str, float]]:
    pairs = select_experiences(
        groups,
        positive_threshold=1.04,
        negative_threshold=negative_threshold,
        limit=limit,
        ties=random.Random(seed),
    )
    return [(str(p.kind), p.slow_candidate_id, p.fast_candidate_id, round(p.speedup, 4)) for p in pairs]


# P takes 10 ms, Q 12 ms.
GROUPS = [
    group(P, "a", 8.0, 20.0),  # best 1.25: positive, though the other attempt is twice as slow
    group(P, "b", 9.8),  # 1.0204: counts as faster, but not by enough
    group(P, "c", 11.0, 16.0),  # no better one; the slowest is 0.625: negative
    group(P, "d", 11.0),  # 0.909: slower, but not below 1/1.15 = 0.8696
    group(P, "e", None, None),  # nothing measured
    group(Q, "f", 6.0),  # 2.0: positive
    group(Q, "g", 24.0),  # 0.5: negative
    group(Q, "h", 12.0),  # exactly as fast: neither
    group(P, "i", 9.0),  # 1.1111: positive
    group(Q, "j", None, 15.0),  # 0.8: negative
]
POSITIVES = [("positive", "Q", "f.a0", 2.0), ("positive", "P", "a.a0", 1.25), ("positive", "P", "i.a0", 1.1111)]
NEGATIVES = [("negative", "g.a0", "Q", 2.0), ("negative", "c.a1", "P", 1.6), ("negative", "j.a1", "Q", 1.25)]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (8, POSITIVES + NEGATIVES),
        (4, POSITIVES[:2] + NEGATIVES[:2]),
        (5, POSITIVES[:2] + NEGATIVES),  # 5 // 2 positives, the rest negatives
        (1, NEGATIVES[:1]),
        (0, []),
    ],
)
def test_selection(limit: int, expected: list[tuple[str, str, str, float]]) -> None:
    assert select(GROUPS, limit) == expected


def test_positives_never_take_the_places_that_negatives_leave() -> None:
    assert select([*GROUPS[:2], GROUPS[5], GROUPS[8]], 4) == POSITIVES[:2]


def test_negatives_fill_what_positives_leave() -> None:
    assert select([GROUPS[2], GROUPS[6], GROUPS[9]], 2) == NEGATIVES[:2]


def test_thresholds_are_exclusive() -> None:
    at_positive = group(P, "p", 10.0 / 1.04)
    assert at_positive.attempts[0].speedup == 1.04
    assert select([at_positive], 8) == []
    at_negative = group(P, "n", 12.5)
    assert at_negative.attempts[0].speedup == 1 / 1.25
    assert select([at_negative], 8, negative_threshold=1.25) == []
    assert len(select([at_negative], 8, negative_threshold=1.24)) == 1


def test_a_negative_pair_is_swapped() -> None:
    (pair,) = select_experiences(
        [group(P, "n", 20.0)], positive_threshold=1.04, negative_threshold=1.15, limit=8, ties=random.Random(0)
    )
    assert pair.kind is ExperienceKind.NEGATIVE
    assert (pair.slow_candidate_id, pair.fast_candidate_id, pair.speedup) == ("n.a0", "P", 2.0)
    assert "'n.a0'" in pair.slow_source
    assert "'P'" in pair.fast_source


def test_ties_are_decided_by_the_stream() -> None:
    groups = [group(P, f"p{index}", 5.0) for index in range(6)]
    chosen = {select(groups, 2, seed)[0][2] for seed in range(40)}
    assert len(chosen) == 6
    assert select(groups, 2, 3) == select(groups, 2, 3)


def items(*names: str) -> list[ExperienceItem]:
    pair = RewritePair(ExperienceKind.POSITIVE, "s", "", "f", "", 1.2, "")
    return [ExperienceItem(name, 1, pair, name, "" if name.startswith("none") else "text", "call") for name in names]


def update(rule: str, old: list[str], new: list[str], capacity: int, seed: int = 0) -> list[str]:
    kept = update_memory(rule, items(*old), items(*new), capacity, random.Random(seed))
    return [item.item_id for item in kept]


def test_paper_is_a_queue() -> None:
    assert update("paper", ["a", "b", "c"], ["d", "e"], 4) == ["b", "c", "d", "e"]
    assert update("paper", ["a"], ["b"], 4) == ["a", "b"]
    assert update("paper", ["a"], ["b", "c", "d"], 2) == ["c", "d"]
    assert update("paper", ["a"], [], 0) == []


def test_published_keeps_all_new_items_and_a_sample_of_the_old() -> None:
    assert update("published", ["a", "b"], ["d", "e"], 4)[:2] == ["d", "e"]
    assert sorted(update("published", ["a", "b"], ["d", "e"], 4)) == ["a", "b", "d", "e"]
    assert update("published", ["a", "b"], ["c", "d", "e"], 2) == ["c", "d", "e"]
    kept = update("published", ["a", "b", "c"], ["d"], 3, seed=1)
    assert kept[0] == "d"
    assert len(set(kept)) == 3


def test_published_samples_uniformly_and_repeatably() -> None:
    old = ["a", "b", "c", "d"]
    drawn = [update("published", old, ["new"], 2, seed)[1] for seed in range(800)]
    assert drawn == [update("published", old, ["new"], 2, seed)[1] for seed in range(800)]
    assert all(150 < drawn.count(name) < 250 for name in old)


def test_an_item_without_a_lesson_takes_a_place_but_is_not_shown() -> None:
    kept = update_memory("paper", items("a", "b"), items("none"), 2, random.Random(0))
    assert [item.item_id for item in kept] == ["b", "none"]
    assert [item.shown for item in kept] == [True, False]


@given(old=st.integers(0, 20), new=st.integers(0, 8), capacity=st.integers(0, 16), seed=st.integers(0, 9))
def test_laws(old: int, new: int, capacity: int, seed: int) -> None:
    old_names, new_names = [f"o{index}" for index in range(old)], [f"n{index}" for index in range(new)]
    paper = update("paper", old_names, new_names, capacity, seed)
    assert paper == (old_names + new_names)[-capacity:] if capacity else paper == []
    published = update("published", old_names, new_names, capacity, seed)
    assert set(new_names) <= set(published)
    assert len(published) == max(new, min(capacity, old + new))
    assert len(set(published)) == len(published)
