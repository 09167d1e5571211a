"""The pool's promises, with real Ray workers and scripted evaluations."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from accelopt_ray.devices.protocol import Limits  # noqa: E402
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult, TaskRef  # noqa: E402
from accelopt_ray.outcome import EvaluationOutcome  # noqa: E402
from actors.pool import ProfilerPool  # noqa: E402
from actors.profiler import Evaluator, Profiler, start_profiler  # noqa: E402

# Workers cannot import test modules; functions of this one travel whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def scripted(notes: str) -> Evaluator:
    """An evaluator that does what the job's source says, and notes each start in a file."""

    def evaluate(job: EvaluationJob) -> EvaluationResult:
        with Path(notes).open("a") as stream:
            stream.write(f"{job.evaluation_id} {os.getpid()}\n")
        starts = [line.split()[0] for line in Path(notes).read_text().splitlines()].count(job.evaluation_id)
        command, _, argument = job.source.partition(" ")
        if command == "die" and (not argument or starts <= int(argument)):
            os._exit(1)
        if command == "raise":
            raise OSError("the device is on fire")
        if command == "sleep":
            time.sleep(float(argument))
        return EvaluationResult(job.evaluation_id, EvaluationOutcome.CORRECT, latency_ms=1.0)

    return evaluate


def job(name: str, source: str, timeout_s: float = 60.0) -> EvaluationJob:
    return EvaluationJob(name, TaskRef("silu"), source, "sim-trn1", "published", limits=Limits(timeout_s=timeout_s))


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "notes"
    path.touch()
    yield str(path)


def evaluate_all(notes: str, jobs: list[EvaluationJob], slots: int = 2) -> tuple[list[EvaluationResult], ProfilerPool]:
    async def scenario() -> tuple[list[EvaluationResult], ProfilerPool]:
        start = partial(start_profiler, partial(scripted, notes), False)
        pool = ProfilerPool([start(slot) for slot in range(slots)], start)
        try:
            await pool.start()
            return list(await asyncio.gather(*(pool.evaluate(each) for each in jobs))), pool
        finally:
            await pool.close()

    return asyncio.run(scenario())


def test_every_job_ends_once_and_says_where(notes: str):
    results, pool = evaluate_all(notes, [job(f"e{index}", "pass") for index in range(20)])
    assert [result.evaluation_id for result in results] == [f"e{index}" for index in range(20)]
    assert {result.core for result in results} <= {"slot 0", "slot 1"}
    assert len(Path(notes).read_text().splitlines()) == 20
    assert pool.statistics.workers_lost == 0


def test_both_slots_work_at_the_same_time(notes: str):
    jobs = [job("a", "sleep 1"), job("b", "sleep 1")]
    results, _ = evaluate_all(notes, jobs)
    assert {result.core for result in results} == {"slot 0", "slot 1"}


def test_a_workers_death_costs_no_candidate_and_no_slot(notes: str):
    jobs = [job("victim", "die 1"), *(job(f"e{index}", "pass") for index in range(6))]
    results, pool = evaluate_all(notes, jobs)
    assert all(result.correct for result in results)
    assert pool.statistics.workers_lost == 1
    assert pool.statistics.retried == 1


def test_a_job_that_outlives_every_worker_ends_with_a_typed_outcome(notes: str):
    results, _ = evaluate_all(notes, [job("killer", "die"), job("bystander", "pass")], slots=1)
    assert (results[0].outcome, results[0].reason) == (EvaluationOutcome.CRASHED, "worker_lost")
    assert results[1].correct
    assert [line.split()[0] for line in Path(notes).read_text().splitlines()].count("killer") == 3


def test_a_fault_of_the_harness_is_reported_with_its_text_and_keeps_the_worker(notes: str):
    results, pool = evaluate_all(notes, [job("e", "raise")], slots=1)
    assert (results[0].outcome, results[0].reason) == (EvaluationOutcome.CRASHED, "worker_lost")
    assert "the device is on fire" in results[0].error_text
    assert pool.statistics.workers_lost == 0


def test_a_stuck_worker_is_replaced_and_the_next_job_runs(notes: str):
    # The pool allows a worker thirty stages' time; the job's stage limit is scaled so that this is under a second.
    results, pool = evaluate_all(notes, [job("stuck", "sleep 100", timeout_s=0.02), job("next", "pass")], slots=1)
    assert (results[0].outcome, results[0].reason) == (EvaluationOutcome.TIMEOUT, "worker_stuck")
    assert results[1].correct
    assert pool.statistics.workers_lost == 1


def test_a_profiler_without_a_core_refuses_to_start(monkeypatch: pytest.MonkeyPatch, notes: str):
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    with pytest.raises(RuntimeError, match="NEURON_RT_VISIBLE_CORES is not set"):
        Profiler(partial(scripted, notes), needs_core=True, slot=0)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3")
    assert Profiler(partial(scripted, notes), needs_core=True, slot=0).core() == "core 3"


def test_a_pool_whose_workers_cannot_start_says_why():
    def broken() -> Evaluator:
        raise RuntimeError("no such device")

    async def scenario() -> None:
        start = partial(start_profiler, broken, False)
        pool = ProfilerPool([start(0)], start)
        try:
            await pool.start()
        finally:
            await pool.close()

    with pytest.raises(RuntimeError, match="no such device"):
        asyncio.run(scenario())
