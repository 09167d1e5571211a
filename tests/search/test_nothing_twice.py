"""No kernel is evaluated twice or carried twice, except where an evaluation gave no verdict: that is made up for."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_world import World, kernel_source
from stored_world import RUN_ID, StoredWorld, search_in, taken_up
from test_search_loop import search, small

from accelopt_ray.evaluation.records import CheckStage, EvaluationJob, EvaluationResult
from accelopt_ray.outcome import CallOutcome, EvaluationOutcome
from accelopt_ray.search.canonical import canonical_sha256
from accelopt_ray.search.services import ModelCall, ModelReply
from accelopt_ray.trajectory import read_table, trajectory_digest


@given(
    share=st.sampled_from([1.0, 0.7, 0.3]),
    fixes=st.integers(0, 2),
    resamples=st.integers(0, 2),
    order=st.integers(0, 2**16),
    factors=st.sampled_from([(0.9, 1.0), (1.0,), (0.8, 0.9, 1.0, 1.1)]),
    staged=st.booleans(),
)
@settings(max_examples=25)
def test_laws(share: float, fixes: int, resamples: int, order: int, factors: tuple[float, ...], staged: bool):
    world = World(delays=random.Random(order), longest_delay=30, factors=factors, failures=0.1)
    search(
        world,
        small(selection_share=share, fix_attempts=fixes, kernel_resamples=resamples, staged_check=staged, seed=order),
    )
    counts = Counter(canonical_sha256(job.source) for job in world.jobs)
    assert set(counts.values()) == {1}, "a kernel was evaluated twice"
    assert len({job.evaluation_id for job in world.rests}) == len(world.rests)
    rows = world.rows["evaluations"].values()
    contents = {row["candidate_id"]: row["canonical_sha256"] for row in rows}
    for iteration in world.rows["iterations"].values():
        beam = [contents[candidate_id] for candidate_id in iteration["beam_candidate_ids"]]  # type: ignore[attr-defined]
        assert len(beam) == len(set(beam)), "a kernel fills two places of a beam"
    evaluated = [row for row in rows if row["outcome"] not in ("duplicate", "no_code")]
    assert len({row["canonical_sha256"] for row in evaluated}) == len(evaluated)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_copy_of_the_baseline_is_never_evaluated(share: float):
    world = World(factors=(1.0,), bad_kernels=0.0)
    result = search(world, small(selection_share=share, kernel_resamples=0))
    assert len(world.jobs) == 1
    assert [candidate.candidate_id for candidate in result.beam] == ["toy.i0.c0"]


class Repeating(World):
    """An executor that writes 90 in each iteration, until it is asked once more."""

    def answer(self, call: ModelCall) -> ModelReply:
        if call.role != "executor":
            return super().answer(call)
        cost = 70.0 if ".r1." in call.call_id else 90.0
        return ModelReply(call.call_id, CallOutcome.OK, reply_text=f"```\n{kernel_source(cost)}```")


def test_a_known_kernel_is_answered_by_one_more_sample():
    world = Repeating()
    sizes = {"iterations": 2, "plans_per_candidate": 1, "attempts_per_plan": 1, "beam_width": 1}
    result = search(world, small(**sizes, kernel_resamples=1))
    outcomes = {row["candidate_id"]: row["outcome"] for row in world.rows["evaluations"].values()}
    assert outcomes["toy.i1.c0.p0.a0"] == "correct"
    assert outcomes["toy.i2.c0.p0.a0"] == "duplicate"
    assert outcomes["toy.i2.c0.p0.a0.r1"] == "correct"
    assert result.best is not None
    assert result.best.latency_ms == 70.0
    [again] = [call for call in world.calls if ".r1." in call.call_id]
    [first] = [call for call in world.calls if call.call_id == "toy.i2.c0.p0.a0.executor"]
    assert again.user_prompt == first.user_prompt
    assert again.seed != first.seed
    never = Repeating()
    search(never, small(**sizes, kernel_resamples=0))
    assert not [call for call in never.calls if ".r1." in call.call_id]


class Losing(StoredWorld):
    """Loses the worker of the first evaluation of a kernel that costs 90, which comes in every iteration."""

    def answer(self, call: ModelCall) -> ModelReply:
        if call.role == "executor" and call.sample_index == 0:
            return ModelReply(call.call_id, CallOutcome.OK, reply_text=f"```\n{kernel_source(90.0)}```")
        return super().answer(call)

    def measure(self, job: EvaluationJob) -> EvaluationResult:
        lost = "cost = 90.0" in job.source and job.stage is not CheckStage.REST and ".v" not in job.evaluation_id
        if lost:
            return EvaluationResult(job.evaluation_id, EvaluationOutcome.CRASHED, reason="worker_lost")
        return super().measure(job)


SETTINGS: dict[str, Any] = {"iterations": 3, "kernel_resamples": 0}


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_a_kernel_whose_worker_was_lost_is_evaluated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
):
    monkeypatch.setattr("os.fsync", lambda _: None)
    settings = small(**SETTINGS, selection_share=share)
    world = Losing(folder=tmp_path, bad_kernels=0.0)
    search_in(world, settings)
    jobs = [job for job in world.jobs if "cost = 90.0" in job.source]
    assert [job.evaluation_id.count(".v1") for job in jobs] == [0, 1]
    rows = [row for row in read_table(tmp_path, "evaluations").to_pylist() if row["reason"] == "worker_lost"]
    assert len(rows) == 1
    outcomes = Counter(
        row["outcome"]
        for row in read_table(tmp_path, "evaluations").to_pylist()
        if row["canonical_sha256"] == canonical_sha256(kernel_source(90.0))
    )
    assert outcomes["correct"] == 1
    before = trajectory_digest(tmp_path, RUN_ID)
    again = taken_up(tmp_path)
    search_in(again, settings)
    assert (again.calls, again.jobs) == ([], [])
    assert trajectory_digest(tmp_path, RUN_ID) == before


def test_a_baseline_whose_worker_was_lost_is_evaluated_when_the_run_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.fsync", lambda _: None)

    class Dead(StoredWorld):
        def measure(self, job: EvaluationJob) -> EvaluationResult:
            return EvaluationResult(job.evaluation_id, EvaluationOutcome.CRASHED, reason="no_core")

    failed = search_in(Dead(folder=tmp_path / "run"), small())
    assert failed.best is None
    resumed = search_in(taken_up(tmp_path / "run"), small())
    assert resumed.best is not None
    search_in(StoredWorld(folder=tmp_path / "whole"), small())
    assert trajectory_digest(tmp_path / "run", RUN_ID) == trajectory_digest(tmp_path / "whole", RUN_ID)
    rows = read_table(tmp_path / "run", "results").to_pylist()
    assert len({row["evaluation_id"] for row in rows}) == len(rows)


def test_a_check_whose_worker_was_lost_leaves_the_kernel_to_later_copies():
    class LosingRests(World):
        def measure(self, job: EvaluationJob) -> EvaluationResult:
            result = super().measure(job)
            if job.stage is CheckStage.REST and ".v" not in job.evaluation_id:
                return dataclasses.replace(result, outcome=EvaluationOutcome.CRASHED, reason="worker_lost")
            return result

        def answer(self, call: ModelCall) -> ModelReply:
            if call.role == "executor":
                return ModelReply(call.call_id, CallOutcome.OK, reply_text=f"```\n{kernel_source(90.0)}```")
            return super().answer(call)

    world = LosingRests()
    result = search(world, small(iterations=2, kernel_resamples=0))
    assert [job.evaluation_id.count(".v1") for job in world.jobs if "90.0" in job.source] == [0, 1]
    assert result.best is not None
    assert result.best.latency_ms == 90.0
