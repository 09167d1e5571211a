"""The next beam, by both readings of the method, computed by hand."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelopt_ray.evaluation.records import EvaluationResult
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.search.beam import select_beam
from accelopt_ray.search.candidates import Attempt, Candidate, Plan, PlanGroup
from accelopt_ray.search.canonical import KernelSource


def candidate(name: str, latency_ms: float) -> Candidate:
    result = EvaluationResult(name, EvaluationOutcome.CORRECT, latency_ms=latency_ms)
    return Candidate(name, KernelSource.of(f"def kernel(a):\n    return '{name}'\n"), result)


def group(parent: Candidate, name: str, *latencies_ms: float | None) -> PlanGroup:
    """Attempts at one plan; None is an incorrect one, which may well have been measured."""
    plan = Plan(name, 0, 0, parent, "plan")
    attempts = []
    for index, latency_ms in enumerate(latencies_ms):
        outcome = EvaluationOutcome.CORRECT if latency_ms is not None else EvaluationOutcome.INCORRECT
        result = EvaluationResult(f"{name}.a{index}", outcome, latency_ms=0.001 if latency_ms is None else latency_ms)
        source = KernelSource.of(f"def kernel(a):\n    return '{name}.a{index}'\n")
        attempts.append(Attempt(f"{name}.a{index}", plan, index, 0, "call", source, result, f"{name}.a{index}"))
    return PlanGroup(plan, tuple(attempts))


def names(beam: list[Candidate]) -> list[str]:
    return [each.candidate_id for each in beam]


def select(rule: str, beam: list[Candidate], groups: list[PlanGroup], width: int, seed: int = 0) -> list[str]:
    return names(select_beam(rule, beam, groups, width, random.Random(seed)))


P, Q = candidate("P", 10.0), candidate("Q", 12.0)
# Plan by plan: the best child of P; two failures; a slower child of P; a child of Q faster than Q; another failure.
GROUPS = [
    group(P, "p0", 9.0, 8.0),
    group(P, "p1", None, None),
    group(P, "p2", 11.0, None),
    group(Q, "q0", 11.5, 13.0),
    group(Q, "q1", None, None),
]


@pytest.mark.parametrize(
    ("width", "expected"),
    [(1, ["p0.a1"]), (2, ["p0.a1", "p2.a0"]), (3, ["p0.a1", "p2.a0", "q0.a0"])],
)
def test_published_takes_children_first_even_slower_ones(width: int, expected: list[str]) -> None:
    assert select("published", [P, Q], GROUPS, width) == expected


def test_published_lets_parents_in_behind_every_correct_child() -> None:
    assert sorted(select("published", [P, Q], GROUPS, 5)[3:]) == ["P", "Q"]
    assert select("published", [P, Q], GROUPS, 9)[:3] == ["p0.a1", "p2.a0", "q0.a0"]
    assert len(select("published", [P, Q], GROUPS, 9)) == 5


def test_published_lets_one_parent_fill_several_places() -> None:
    groups = [group(P, "p0", None), group(P, "p1", None, None), group(P, "p2", 30.0)]
    assert select("published", [P], groups, 3) == ["p2.a0", "P", "P"]


def test_published_can_get_slower() -> None:
    assert select("published", [P], [group(P, "p0", 30.0)], 1) == ["p0.a0"]


def test_paper_lets_parents_compete() -> None:
    assert select("paper", [P, Q], GROUPS, 2) == ["p0.a1", "P"]
    assert select("paper", [P, Q], GROUPS, 9) == ["p0.a1", "P", "p2.a0", "q0.a0", "Q"]


def test_paper_never_takes_a_failure_nor_a_candidate_twice() -> None:
    assert select("paper", [P, P], [group(P, "p0", None)], 4) == ["P"]


def test_only_the_fastest_of_a_plan_represents_it() -> None:
    assert select("paper", [P], [group(P, "p0", 5.0, 6.0), group(P, "p1", 7.0)], 2) == ["p0.a0", "p1.a0"]


def test_a_wrong_kernel_never_competes_however_fast() -> None:
    assert select("paper", [P], [group(P, "p0", None, 9.0)], 1) == ["p0.a1"]


@pytest.mark.parametrize("rule", ["published", "paper", "baseline"])
def test_without_attempts_the_beam_stays(rule: str) -> None:
    assert select(rule, [P], [], 3) == ["P"]


def test_baseline_never_moves() -> None:
    assert select("baseline", [P], GROUPS, 3) == ["P"]


def test_ties_are_decided_by_the_stream() -> None:
    groups = [group(P, f"p{index}", 9.0) for index in range(6)]
    chosen = {tuple(select("paper", [P], groups, 1, seed)) for seed in range(40)}
    assert len(chosen) == 6
    assert select("paper", [P], groups, 3, 5) == select("paper", [P], groups, 3, 5)


LATENCIES = st.lists(st.lists(st.none() | st.floats(1.0, 100.0), min_size=1, max_size=3), max_size=6)


@given(children=LATENCIES, width=st.integers(1, 8), seed=st.integers(0, 99))
def test_laws(children: list[list[float | None]], width: int, seed: int) -> None:
    groups = [group(P, f"p{index}", *latencies) for index, latencies in enumerate(children)]
    paper = select_beam("paper", [P], groups, width, random.Random(seed))
    assert paper[0].latency_ms <= P.latency_ms, "the paper's beam never gets slower"
    assert len(set(names(paper))) == len(paper) <= width
    latencies = [each.latency_ms for each in paper]
    assert latencies == sorted(latencies)
    published = select_beam("published", [P], groups, width, random.Random(seed))
    assert len(published) == (min(width, len(groups)) if groups else 1)
    is_parent = [name == "P" for name in names(published)]
    assert is_parent == sorted(is_parent), "parents stand behind all children"
