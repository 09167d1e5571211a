"""Selecting before everybody has arrived: stragglers count later, and a recorded order is the same run again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted_world import KilledError, ScriptedTask, World
from stored_world import RUN_ID, StoredWorld, search_in, taken_up
from test_restore import assert_nothing_is_doubled
from test_search_loop import PROMPTS, search, small

from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.outcome import UserError
from accelopt_ray.search.loop import run_search
from accelopt_ray.search.result import SearchStatus
from accelopt_ray.search.services import ModelCall, ModelReply
from accelopt_ray.trajectory import read_table, trajectory_digest
from experiments.virtual_time import run_in_virtual_time

SIZES: dict[str, Any] = {"iterations": 4, "plans_per_candidate": 4, "attempts_per_plan": 2}
SLOW: dict[str, Any] = {"longest_delay": 60}


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)


def counted(world: World) -> dict[int, list[str]]:
    return {row["iteration"]: row["counted_candidate_ids"] for row in world.rows["iterations"].values()}  # type: ignore[misc]


@pytest.mark.parametrize("preset", ["beyond", "published"])
@pytest.mark.parametrize("seed", range(4))
def test_every_attempt_counts_once_and_none_is_evaluated_twice(preset: str, seed: int):
    world = World(delays=random.Random(seed), **SLOW)
    result = search(world, small(preset, **SIZES, selection_share=0.5))
    assert result.status is SearchStatus.COMPLETED
    by_iteration = counted(world)
    assert by_iteration[0] is None
    chosen = [candidate_id for ids in by_iteration.values() for candidate_id in ids or []]
    assert max(Counter(chosen).values()) == 1
    attempts = {row["candidate_id"] for row in world.rows["evaluations"].values() if row["call_id"] is not None}
    assert set(chosen) == attempts
    assert len(attempts) == sum(call.role in ("executor", "fixer") for call in world.calls)
    late = [each for number, ids in by_iteration.items() for each in ids or [] if f".i{number}." not in each]
    assert late, "no straggler in this run"


def test_the_next_iteration_starts_beside_the_stragglers():
    class Watching(World):
        overlaps = 0

        async def complete(self, call: ModelCall) -> ModelReply:
            earlier = [each.call_id for each in self.calls if each.iteration < call.iteration]
            self.overlaps += call.role == "planner" and any(call_id not in self.replies for call_id in earlier)
            return await super().complete(call)

        async def record(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
            """Takes no time, as in a run, where it is a call to another process of the machine."""

    def overlaps(share: float) -> int:
        world = Watching(delays=random.Random(1), bad_kernels=0.0, **SLOW)
        search(world, small("published", **SIZES, selection_share=share, staged_check=False, use_memory=False))
        return world.overlaps

    assert overlaps(1.0) == 0
    assert overlaps(0.5) > 0


def test_a_share_of_one_waits_for_all():
    world = World(delays=random.Random(1), **SLOW)
    search(world, small(**SIZES))
    iterations = [call.iteration for call in world.calls if call.role != "summarizer"]
    assert iterations == sorted(iterations)
    assert set(counted(world).values()) == {None}


def test_ids_belong_to_the_iteration_that_asked():
    world = World(delays=random.Random(1), **SLOW)
    search(world, small(**SIZES, selection_share=0.5))
    for call in world.calls:
        assert f".i{call.iteration}." in call.call_id
    for row in world.rows["evaluations"].values():
        assert f".i{row['iteration']}." in str(row["candidate_id"])


@pytest.mark.parametrize("seed", range(3))
def test_a_finished_run_replays_to_itself_in_any_order(tmp_path: Path, seed: int):
    settings = small(**SIZES, selection_share=0.5)
    search_in(StoredWorld(folder=tmp_path, delays=random.Random(seed), **SLOW), settings)
    before = trajectory_digest(tmp_path, RUN_ID)
    again = taken_up(tmp_path, seed + 100, **SLOW)
    result = search_in(again, settings)
    assert (again.calls, again.jobs, again.rests) == ([], [], [])
    assert trajectory_digest(tmp_path, RUN_ID) == before
    beams = {row["iteration"]: row["beam_candidate_ids"] for row in read_table(tmp_path, "iterations").to_pylist()}
    assert [candidate.candidate_id for candidate in result.beam] == beams[4]


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_keeps_what_its_ended_iterations_chose(tmp_path: Path, seed: int):
    settings = small(**SIZES, selection_share=0.6)
    with pytest.raises(KilledError):
        search_in(StoredWorld(folder=tmp_path, delays=random.Random(seed), dies_after=330, **SLOW), settings)
    before = {row["iteration"]: row for row in read_table(tmp_path, "iterations").to_pylist()}
    assert len(before) > 1
    resumed = taken_up(tmp_path, seed + 50, **SLOW)
    known = set(resumed.past.history.replies) if resumed.past is not None else set()
    result = search_in(resumed, settings)
    assert result.iterations == 4
    assert not known & {call.call_id for call in resumed.calls}
    after = {row["iteration"]: row for row in read_table(tmp_path, "iterations").to_pylist()}
    assert {number: after[number] for number in before} == before
    assert_nothing_is_doubled(tmp_path)


def test_stragglers_of_a_stopped_search_still_count():
    world = World(delays=random.Random(2), bad_kernels=0.0, **SLOW)
    result = search(world, small(**SIZES, selection_share=0.4, max_evaluations=20))
    assert result.status is SearchStatus.STOPPED
    correct = [row for row in world.rows["evaluations"].values() if row["outcome"] == "correct"]
    assert result.best is not None
    assert result.best.latency_ms == min(float(str(row["latency_ms"])) for row in correct)


def test_a_share_out_of_range_is_refused():
    with pytest.raises(UserError, match="selection_share is 1.5"):
        small(selection_share=1.5)


class Timed(World):
    """Calls take virtual seconds: a summarizer's many, everybody else's one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.moments: dict[str, float] = {}

    async def complete(self, call: ModelCall) -> ModelReply:
        self.moments[call.call_id] = asyncio.get_running_loop().time()
        await asyncio.sleep(1000.0 if call.role == "summarizer" else 1.0)
        return await super().complete(call)

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        await asyncio.sleep(1.0)
        return await super().evaluate(job)

    def first_planner_s(self, iteration: int) -> float:
        return min(at for name, at in self.moments.items() if f".i{iteration}." in name and name.endswith("planner"))


@pytest.mark.parametrize(("share", "waits"), [(1.0, True), (0.9, False)])
def test_with_a_share_below_one_lessons_are_drawn_beside_the_next_iteration(share: float, waits: bool):
    world = Timed(bad_kernels=0.0)
    settings = small(iterations=3, selection_share=share, plan_resamples=0)
    run_in_virtual_time(run_search(settings, ScriptedTask(), world, prompts=PROMPTS))
    assert (world.first_planner_s(2) > 1000.0) == waits
    seen = {
        number: {item for row in world.rows["plans"].values() if row["iteration"] == number for item in items_of(row)}
        for number in (2, 3)
    }
    assert bool(seen[2]) == waits
    assert {item.split(".")[1] for item in seen[3]} <= ({"i1", "i2"} if waits else {"i1"})
    assert seen[3]


def items_of(row: Mapping[str, object]) -> Sequence[str]:
    return row["memory_item_ids"]  # type: ignore[return-value]
