"""Checking whole only what is built on changes no beam, no lesson and no best kernel."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from scripted_world import World
from stored_world import RUN_ID, StoredWorld, search_in, taken_up
from test_restore import assert_nothing_is_doubled, killed_and_resumed
from test_search_loop import search, small

from accelopt_ray.evaluation.records import CheckStage, EvaluationResult
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.trajectory import trajectory_digest

FAULTY = {"bad_kernels": 0.1, "hidden_faults": 0.4}


@pytest.mark.parametrize("preset", ["beyond", "published", "paper", "repeated-sampling"])
@pytest.mark.parametrize("seed", range(3))
def test_beam_memory_and_best_are_those_of_checking_everything(preset: str, seed: int):
    sizes = {"iterations": 4, "plans_per_candidate": 5, "seed": seed, "plan_resamples": 0, "show_tried_plans": 0}
    staged, whole = World(**FAULTY), World(**FAULTY)
    first = search(staged, small(preset, **sizes))
    second = search(whole, small(preset, **sizes, staged_check=False))
    for table in ("iterations", "selections", "memory_items", "plans", "sources"):
        assert staged.trajectory().get(table) == whole.trajectory().get(table)
    assert first.best is not None
    assert second.best is not None
    assert first.best.candidate_id == second.best.candidate_id
    assert first.evaluations == second.evaluations
    assert {job.stage for job in staged.jobs[1:]} == {CheckStage.FIRST}
    assert 0 < len(staged.rests) < len(staged.jobs) - 1
    assert not whole.rests
    assert {job.stage for job in whole.jobs} == {CheckStage.WHOLE}


def test_what_is_chosen_has_passed_the_whole_check():
    world = World(**FAULTY)
    result = search(world, small(iterations=4, plans_per_candidate=5))
    rows = world.trajectory()["evaluations"].values()
    stages = {row["candidate_id"]: row["check_stage"] for row in rows if row["outcome"] == "correct"}
    chosen = {candidate.candidate_id for candidate in result.beam}
    for item in result.memory:
        chosen |= {item.pair.slow_candidate_id, item.pair.fast_candidate_id}
    assert result.best is not None
    assert {stages[candidate_id] for candidate_id in chosen | {result.best.candidate_id}} == {"whole"}
    correct = [row for row in rows if row["outcome"] == "correct"]
    fastest = min(correct, key=lambda row: float(str(row["latency_ms"])))
    assert fastest["check_stage"] == "whole"
    assert any(row["outcome"] == "incorrect" and row["check_stage"] == "whole" for row in rows)
    assert any(row["check_stage"] == "first" for row in correct)


@pytest.mark.parametrize("order", range(4))
def test_the_order_of_arrival_does_not_matter(order: int):
    settings = small(iterations=3, plans_per_candidate=4)
    straight = World(**FAULTY)
    shuffled = World(**FAULTY, delays=random.Random(order), longest_delay=40)
    search(straight, settings)
    search(shuffled, settings)
    assert straight.trajectory() == shuffled.trajectory()


def test_a_killed_run_does_not_repeat_either_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    settings = small()
    world = {"longest_delay": 20, **FAULTY}
    search_in(StoredWorld(folder=tmp_path / "whole", **world), settings)  # type: ignore[arg-type]
    assert killed_and_resumed(tmp_path / "killed", settings, 3, random.Random(5), 250, **world)
    search_in(taken_up(tmp_path / "killed", **world), settings)
    assert trajectory_digest(tmp_path / "killed", RUN_ID) == trajectory_digest(tmp_path / "whole", RUN_ID)
    assert_nothing_is_doubled(tmp_path / "killed")


def test_a_completed_result_keeps_the_measurement_and_takes_the_verdict():
    first = EvaluationResult(
        "k", EvaluationOutcome.CORRECT, check_stage=CheckStage.FIRST, latency_ms=2.0, run_s=1.0, compile_s=0.5,
        check_details={"trials": [{"seed": 0}], "stage_s": {}}, explanation={"bound": "dma"},
    )  # fmt: skip
    rest = EvaluationResult(
        "k.rest", EvaluationOutcome.INCORRECT, reason="row", run_s=3.0, check_details={"trials": [{"seed": 1}]}
    )
    assert first.provisional
    result = first.completed(rest)
    assert not result.provisional
    assert (result.outcome, result.reason, result.latency_ms, result.run_s) == ("incorrect", "row", 2.0, 4.0)
    assert result.check_details["trials"] == [{"seed": 0}, {"seed": 1}]
    assert result.evaluation_id == "k"
    assert EvaluationResult.from_json(result.to_json()) == result
    assert EvaluationResult.from_json(first.to_json()) == first


@pytest.mark.parametrize("other, outcome", [("a", "correct"), ("b", "rejected"), ("", "correct")])
def test_a_text_that_becomes_another_program_in_the_second_stage_is_rejected(other: str, outcome: str):
    first = EvaluationResult(
        "k", EvaluationOutcome.CORRECT, check_stage=CheckStage.FIRST, check_details={"program_sha256": "a"}
    )
    rest = EvaluationResult("k.rest", EvaluationOutcome.CORRECT, check_details={"program_sha256": other})
    assert first.completed(rest).outcome == outcome
