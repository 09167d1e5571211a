"""Budgets warn before they end a search; pinned candidates stay beside the beam."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scripted_world import World
from stored_world import RUN_ID, StoredWorld, search_in, taken_up
from test_search_loop import search, small

from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.outcome import UserError
from accelopt_ray.search.result import SearchStatus
from accelopt_ray.trajectory import read_table, trajectory_digest


def warnings(world: World) -> list[str]:
    return [str(values["message"]) for values in world.named("warning")]


def test_a_budget_warns_once_at_four_fifths():
    world = World(bad_kernels=0.0)
    result = search(world, small("published", max_evaluations=20))
    assert result.status is SearchStatus.STOPPED
    told = [message for message in warnings(world) if "budget" in message]
    assert len(told) == 1
    assert told[0].endswith("of the budget is used (20 evaluations)")
    assert int(told[0].partition("%")[0]) >= 80


def test_each_budget_warns_for_itself_and_an_ample_one_does_not():
    world = World(bad_kernels=0.0)
    search(world, small("published", max_cost_usd=0.3, max_evaluations=10_000, max_wall_s=1e6))
    told = [message for message in warnings(world) if "budget" in message]
    assert len(told) == 1
    assert "(0.3 USD)" in told[0]


class TimedWorld(World):
    """Every evaluation runs for two seconds on its device."""

    def measure(self, job: EvaluationJob) -> EvaluationResult:
        return replace(super().measure(job), run_s=2.0)


def test_tokens_and_device_time_are_budgets():
    world = World(bad_kernels=0.0)
    whole = search(world, small("published"))
    assert whole.status is SearchStatus.COMPLETED
    world = World(bad_kernels=0.0)
    result = search(world, small("published", max_total_tokens=200))
    assert (result.status, result.reason) == (SearchStatus.STOPPED, "budget of 200 tokens used")
    assert 0 < len(world.calls) < whole.model_calls
    world = TimedWorld(bad_kernels=0.0)
    result = search(world, small("published", max_device_s=20.0))
    assert (result.status, result.reason) == (SearchStatus.STOPPED, "budget of 20 s of device time used")
    assert 0 < len(world.calls) < whole.model_calls


def test_a_pinned_candidate_is_carried_beside_the_beam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    search_in(StoredWorld(folder=tmp_path), small(iterations=2))
    resumed = taken_up(tmp_path)
    result = search_in(resumed, small(iterations=3, pins={"toy.i0.c0": 3}))
    planners = [call for call in resumed.calls if call.role == "planner" and ".r" not in call.call_id]
    assert {call.call_id.split(".")[2] for call in planners} == {"c0", "c1", "c2"}
    rows = read_table(tmp_path, "selections", RUN_ID).to_pylist()
    pinned = [(row["iteration"], row["rank"], row["candidate_id"]) for row in rows if row["rule"] == "pinned"]
    assert pinned == [(2, 2, "toy.i0.c0"), (3, 2, "toy.i0.c0")]
    assert "toy.i0.c0" in {candidate.candidate_id for candidate in result.beam}


def test_a_pin_needs_an_iteration():
    with pytest.raises(UserError, match=r"pins.toy.i0.c0 is 0"):
        small(pins={"toy.i0.c0": 0})


def left_open(folder: Path) -> list[str]:
    """Candidates that were correct as far as they were tried."""
    rows = read_table(folder, "evaluations", RUN_ID).to_pylist()
    return [row["candidate_id"] for row in rows if (row["outcome"], row["check_stage"]) == ("correct", "first")]


@pytest.mark.parametrize("hidden_faults", [0.0, 1.0])
def test_a_pinned_candidate_is_checked_whole_before_it_is_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden_faults: float
):
    monkeypatch.setattr("os.fsync", lambda _: None)
    sizes = {"plans_per_candidate": 6, "experiences_per_iteration": 0}
    search_in(StoredWorld(folder=tmp_path, bad_kernels=0.0, factors=(0.7, 0.8, 0.9)), small(iterations=2, **sizes))
    pinned = left_open(tmp_path)[0]
    settings = small(iterations=3, pins={pinned: 3}, **sizes)
    resumed = taken_up(tmp_path, bad_kernels=0.0, hidden_faults=hidden_faults, factors=(0.7, 0.8, 0.9))
    result = search_in(resumed, settings)
    carried = pinned in {candidate.candidate_id for candidate in result.beam}
    assert carried == (hidden_faults == 0.0)
    told = [message for message in warnings(resumed) if "pinned" in message]
    assert told == (
        [] if carried else [f"{pinned} is pinned and failed the rest of its check (incorrect): it is not carried"]
    )
    rows = [row for row in read_table(tmp_path, "evaluations").to_pylist() if row["candidate_id"] == pinned]
    assert [(row["check_stage"], row["outcome"]) for row in rows] == [
        ("first", "correct"),
        ("whole", "correct" if carried else "incorrect"),
    ]
    planned_from = {row["parent_candidate_id"] for row in read_table(tmp_path, "plans").to_pylist()}
    assert (pinned in planned_from) == carried
    before = trajectory_digest(tmp_path, RUN_ID)
    again = taken_up(tmp_path, bad_kernels=0.0)
    search_in(again, settings)
    assert (again.calls, again.jobs, again.rests) == ([], [], [])
    assert trajectory_digest(tmp_path, RUN_ID) == before
