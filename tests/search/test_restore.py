"""A run killed anywhere, any number of times, goes on from its folder to the same end."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scripted_world import KilledError
from stored_world import RUN_ID, StoredWorld, search_in, taken_up

from accelopt_ray.outcome import CallOutcome, UserError
from accelopt_ray.search.presets import preset_settings
from accelopt_ray.search.restore import restore, stored_run_id
from accelopt_ray.search.services import ModelCall, ModelReply
from accelopt_ray.search.settings import SearchSettings
from accelopt_ray.trajectory import read_table, trajectory_digest
from accelopt_ray.trajectory.digest import DIGEST_COLUMNS, digest_lines

WORLD: dict[str, Any] = {"longest_delay": 20, "simulated": False, "noise": 0.05}


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power cut happens here, and waiting for the disk is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def small(preset: str = "beyond", **changes: Any) -> SearchSettings:
    sizes = {"iterations": 3, "beam_width": 2, "plans_per_candidate": 3, "attempts_per_plan": 2, "seed": 7}
    return preset_settings(preset, **{**sizes, **changes})


def rows_of(folder: Path, table: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(folder, table, RUN_ID).to_pylist()
    return rows


def assert_nothing_is_doubled(folder: Path) -> None:
    for table, key in (
        ("evaluations", ("evaluation_id",)),
        ("plans", ("plan_id",)),
        ("sources", ("source_sha256",)),
        ("results", ("evaluation_id",)),
        ("selections", ("task", "iteration", "rank")),
        ("iterations", ("task", "iteration")),
        ("memory_items", ("item_id", "evicted_iteration")),
        ("llm_calls", ("call_id", "asking")),
    ):
        counts = Counter(tuple(row[name] for name in key) for row in rows_of(folder, table))
        assert max(counts.values(), default=1) == 1, (table, counts.most_common(3))


def killed_and_resumed(
    folder: Path, settings: SearchSettings, kills: int, draw: random.Random, span: int, **options: Any
) -> int:
    """Kills a run at random moments; returns how many kills hit before it ended."""
    hits = 0
    chosen = options or WORLD
    for _ in range(kills):
        world = taken_up(folder, draw.randrange(2**32), dies_after=draw.randrange(span), **chosen)
        try:
            search_in(world, settings)
        except KilledError:
            hits += 1
        else:
            break
    search_in(taken_up(folder, draw.randrange(2**32), **chosen), settings)
    return hits


@pytest.mark.parametrize("preset", ["beyond", "published"])
@pytest.mark.parametrize("seed", range(3))
def test_the_result_is_that_of_an_undisturbed_run(tmp_path: Path, preset: str, seed: int):
    settings = small(preset, fix_attempts=seed % 2)
    search_in(StoredWorld(folder=tmp_path / "whole", **WORLD), settings)
    draw = random.Random(seed)
    hits = killed_and_resumed(tmp_path / "killed", settings, 1 + seed, draw, 320)
    assert hits, "no kill came before the end"
    for table in DIGEST_COLUMNS:
        assert digest_lines(tmp_path / "killed", RUN_ID, table) == digest_lines(tmp_path / "whole", RUN_ID, table)
    assert trajectory_digest(tmp_path / "killed", RUN_ID) == trajectory_digest(tmp_path / "whole", RUN_ID)
    assert_nothing_is_doubled(tmp_path / "killed")


def test_what_is_journalled_is_not_asked_for_again(tmp_path: Path):
    settings = small()
    first = StoredWorld(folder=tmp_path, dies_after=150, **WORLD)
    with pytest.raises(KilledError):
        search_in(first, settings)
    known = {row["call_id"] for row in rows_of(tmp_path, "llm_calls")}
    evaluated = {row["evaluation_id"] for row in rows_of(tmp_path, "results")}
    second = taken_up(tmp_path, **WORLD)
    search_in(second, settings)
    assert known
    assert evaluated
    assert not known & {call.call_id for call in second.calls}
    assert not evaluated & {job.evaluation_id for job in second.jobs}


def test_calls_in_flight_are_priced_as_lost_once(tmp_path: Path):
    settings = small()
    with pytest.raises(KilledError):
        search_in(StoredWorld(folder=tmp_path, dies_after=150, **WORLD), settings)
    started = {row["call_id"] for row in rows_of(tmp_path, "call_starts")}
    answered = {row["call_id"] for row in rows_of(tmp_path, "llm_calls")}
    assert started > answered
    past = restore(tmp_path, RUN_ID)
    assert {row["call_id"] for row in past.lost_calls} == started - answered
    assert all(row["cost_usd"] == pytest.approx(0.01) for row in past.lost_calls)
    result = search_in(taken_up(tmp_path, **WORLD), settings)
    calls = rows_of(tmp_path, "llm_calls")
    lost = [row for row in calls if row["outcome"] == "lost"]
    assert {row["call_id"] for row in lost} == started - answered
    assert result.cost_usd == pytest.approx(sum(row["cost_usd"] for row in calls))
    assert {row["call_id"]: row["asking"] for row in calls if row["asking"]} == {row["call_id"]: 1 for row in lost}
    assert restore(tmp_path, RUN_ID).lost_calls == []
    assert restore(tmp_path, RUN_ID).history.lost_cost_usd["toy"] == pytest.approx(0.01 * len(lost))


class Flaky(StoredWorld):
    """An endpoint that is down for the executor's second sample in the second iteration."""

    def answer(self, call: ModelCall) -> ModelReply:
        if call.role == "executor" and call.sample_index == 1 and call.iteration == 2:
            return ModelReply(call.call_id, CallOutcome.ERROR, error_text="down", cost_usd=0.5)
        return super().answer(call)


def test_failed_replies_of_the_going_iteration_are_asked_again(tmp_path: Path):
    settings = small(max_evaluations=None)
    search_in(StoredWorld(folder=tmp_path / "whole", **WORLD), settings)
    for dies_after in range(200, 400, 12):
        folder = tmp_path / str(dies_after)
        with pytest.raises(KilledError):
            search_in(Flaky(folder=folder, dies_after=dies_after, **WORLD), settings)
        failed = {row["call_id"] for row in rows_of(folder, "llm_calls") if row["outcome"] == "error"}
        derived = [row for row in rows_of(folder, "evaluations") if row["reason"] == "call_error"]
        if failed and derived:
            break
    assert max(row["iteration"] for row in rows_of(folder, "iterations")) == 1
    resumed = taken_up(folder, **WORLD)
    result = search_in(resumed, settings)
    assert failed <= {call.call_id for call in resumed.calls}
    assert trajectory_digest(folder, RUN_ID) == trajectory_digest(tmp_path / "whole", RUN_ID)
    assert_nothing_is_doubled(folder)
    assert result.cost_usd == pytest.approx(sum(row["cost_usd"] for row in rows_of(folder, "llm_calls")))


def test_failed_replies_of_an_ended_iteration_stay(tmp_path: Path):
    settings = small(iterations=2)
    search_in(Flaky(folder=tmp_path, **WORLD), settings)
    before = trajectory_digest(tmp_path, RUN_ID)
    again = taken_up(tmp_path, **WORLD)
    search_in(again, settings)
    assert again.calls == []
    assert trajectory_digest(tmp_path, RUN_ID) == before


def test_more_iterations_go_on_from_the_end(tmp_path: Path):
    search_in(StoredWorld(folder=tmp_path / "whole", **WORLD), small(iterations=4))
    search_in(StoredWorld(folder=tmp_path / "short", **WORLD), small(iterations=2))
    result = search_in(taken_up(tmp_path / "short", **WORLD), small(iterations=4))
    assert result.iterations == 4
    assert trajectory_digest(tmp_path / "short", RUN_ID) == trajectory_digest(tmp_path / "whole", RUN_ID)


def test_a_raised_budget_goes_on_after_the_iteration_that_it_cut_short(tmp_path: Path):
    search_in(StoredWorld(folder=tmp_path, **WORLD), small(max_evaluations=12))
    cut = [row["iteration"] for row in rows_of(tmp_path, "iterations")]
    evaluated = len(rows_of(tmp_path, "results"))
    resumed = taken_up(tmp_path, **WORLD)
    result = search_in(resumed, small(max_evaluations=20))
    assert evaluated <= 12 < result.evaluations <= 20
    assert min(call.iteration for call in resumed.calls) == max(cut) + 1
    assert_nothing_is_doubled(tmp_path)


def test_leftovers_of_an_interrupted_write_are_ignored_and_removed(tmp_path: Path):
    settings = small(iterations=1)
    search_in(StoredWorld(folder=tmp_path, **WORLD), settings)
    before = trajectory_digest(tmp_path, RUN_ID)
    folder = tmp_path / "trajectory" / "results" / f"p_run={RUN_ID}"
    leftover = folder / ".part-000099-abc.parquet.tmp"
    leftover.write_bytes(b"PAR1 half a fi")
    again = taken_up(tmp_path, **WORLD)
    assert not leftover.exists()
    search_in(again, settings)
    assert again.jobs == []
    assert trajectory_digest(tmp_path, RUN_ID) == before


def test_the_time_of_earlier_sessions_counts(tmp_path: Path):
    search_in(StoredWorld(folder=tmp_path, **WORLD), small(iterations=1))
    assert restore(tmp_path, RUN_ID).history.elapsed_s == 0.0, "no session has a start yet"


def test_a_folder_names_its_run(tmp_path: Path):
    assert stored_run_id(tmp_path) is None
    search_in(StoredWorld(folder=tmp_path, **WORLD), small(iterations=1))
    assert stored_run_id(tmp_path) == RUN_ID
    (tmp_path / "trajectory" / "plans" / "p_run=other").mkdir()
    with pytest.raises(UserError, match="holds the runs other, run"):
        stored_run_id(tmp_path)
