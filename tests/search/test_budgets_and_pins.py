"""Budgets warn before they end a search; pinned candidates stay beside the beam."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_world import World
from stored_world import RUN_ID, StoredWorld, search_in, taken_up
from test_search_loop import search, small

from accelopt_ray.outcome import UserError
from accelopt_ray.search.loop import SearchStatus
from accelopt_ray.trajectory import read_table


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
