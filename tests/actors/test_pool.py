"""The pool's promises, with real Ray workers and scripted evaluations."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from accelopt_ray.devices.faults import DeviceFault  # noqa: E402
from accelopt_ray.devices.protocol import Limits  # noqa: E402
from accelopt_ray.elasticity import SlotDemand  # noqa: E402
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult, TaskRef  # noqa: E402
from accelopt_ray.outcome import EvaluationOutcome, UserError  # noqa: E402
from actors.pool import ProfilerPool  # noqa: E402
from actors.pool_state import SlotState  # noqa: E402
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
        if command == "fault":
            raise DeviceFault("NeuronCore(s) not available")
        if command == "end":
            return EvaluationResult(job.evaluation_id, EvaluationOutcome(argument), answered_from="store:x")
        if command == "raise":
            raise OSError("the device is on fire")
        while command == "meet" and len({line.split()[1] for line in Path(notes).read_text().splitlines()}) < 2:
            time.sleep(0.05)
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


class Sickly:
    """A core whose health is the lines of a file: one is taken for each look at it; without any it is well."""

    def __init__(self, notes: str, health: str) -> None:
        self._evaluate = scripted(notes)
        self._health = Path(health)

    def __call__(self, job: EvaluationJob) -> EvaluationResult:
        return self._evaluate(job)

    def check_health(self) -> str:
        lines = self._health.read_text().splitlines()
        self._health.write_text("".join(f"{line}\n" for line in lines[1:]))
        return lines[0] if lines else ""


def evaluate_all(
    notes: str, jobs: list[EvaluationJob], slots: int = 2, health: Path | None = None
) -> tuple[list[EvaluationResult], ProfilerPool]:
    async def scenario() -> tuple[list[EvaluationResult], ProfilerPool]:
        evaluator = partial(scripted, notes) if health is None else partial(Sickly, notes, str(health))
        start = partial(start_profiler, evaluator, False)
        pool = ProfilerPool([start(slot) for slot in range(slots)], start, rest_s=0.01)
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
    results, _ = evaluate_all(notes, [job("a", "meet"), job("b", "meet")])
    assert {result.core for result in results} == {"slot 0", "slot 1"}


def test_a_workers_death_costs_no_candidate_and_no_slot(notes: str):
    jobs = [job("victim", "die 1"), *(job(f"e{index}", "pass") for index in range(6))]
    results, pool = evaluate_all(notes, jobs)
    assert all(result.correct for result in results)
    assert pool.statistics.workers_lost == 1
    assert pool.statistics.retried == 1


def test_a_job_that_kills_two_workers_is_marked_so_and_gets_no_third(notes: str):
    results, _ = evaluate_all(notes, [job("killer", "die"), job("bystander", "pass")], slots=1)
    assert (results[0].outcome, results[0].reason) == (EvaluationOutcome.CRASHED, "worker_lost")
    assert results[1].correct
    assert [line.split()[0] for line in Path(notes).read_text().splitlines()].count("killer") == 2


def test_a_job_is_not_to_blame_for_workers_that_died_before_it_came(notes: str):
    async def scenario() -> EvaluationResult:
        start = partial(start_profiler, partial(scripted, notes), False)
        workers = [start(slot) for slot in range(2)]
        pool = ProfilerPool(workers, start)
        try:
            await pool.start()
            await asyncio.gather(pool.evaluate(job("a", "meet")), pool.evaluate(job("b", "meet")))
            for worker in workers:
                ray.kill(worker)
            return await pool.evaluate(job("late", "pass"))
        finally:
            await pool.close()

    assert asyncio.run(scenario()).correct


def test_a_kernel_is_not_to_blame_for_the_loss_of_nodes(notes: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray, "nodes", list)  # not one is left
    results, pool = evaluate_all(notes, [job("victim", "die 3")], slots=1)
    assert results[0].correct
    assert pool.statistics.workers_lost == 3


class GoingDown(Profiler):
    """Ends after its first evaluation, whose failure it has put down to the user, having killed its child itself."""

    def evaluate(self, job: EvaluationJob, compiled: object = None) -> EvaluationResult:
        notes = Path(job.source)
        self._ending = not notes.read_text()
        notes.write_text("was here")
        if self._ending:
            raise UserError("the reference ended by SIGKILL")
        return EvaluationResult(job.evaluation_id, EvaluationOutcome.CORRECT)

    def core(self) -> str:
        if getattr(self, "_ending", False):
            os._exit(1)
        return super().core()


def test_the_last_words_of_a_worker_that_goes_down_are_no_verdict(notes: str):
    async def scenario() -> EvaluationResult:
        def start(slot: int) -> object:
            return ray.remote(GoingDown).options(num_cpus=0).remote(partial(scripted, notes), False, slot)

        pool = ProfilerPool([start(0)], start)
        try:
            await pool.start()
            return await pool.evaluate(job("e", notes))
        finally:
            await pool.close()

    assert asyncio.run(scenario()).correct


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
    node = ray.get_runtime_context().get_node_id()
    assert Profiler(partial(scripted, notes), needs_core=True, slot=0).core() == f"core 3 of {node[-8:]}"


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


def test_a_fault_of_the_device_is_tried_elsewhere_and_then_named(notes: str):
    results, pool = evaluate_all(notes, [job("e", "fault"), job("next", "pass")])
    assert (results[0].outcome, results[0].reason) == (EvaluationOutcome.CRASHED, "device_fault")
    assert "not available" in results[0].error_text
    assert results[1].correct and pool.statistics.retried == 2 and pool.statistics.workers_lost == 0


@pytest.mark.parametrize("outcome", ["timeout", "crashed", "memory_limit"])
def test_a_core_is_looked_at_after_a_kill_and_rests_until_it_is_well(notes: str, tmp_path: Path, outcome: str):
    health = tmp_path / "health"
    health.write_text("wrong result\nwrong result\n")
    results, pool = evaluate_all(notes, [job("e", f"end {outcome}"), job("next", "pass")], slots=1, health=health)
    assert results[0].outcome == outcome and results[1].correct
    assert health.read_text() == ""
    assert pool.statistics.workers_lost == 0


def test_a_core_that_stays_ill_is_retired_with_its_reason_and_the_rest_goes_on_or_ends(notes: str, tmp_path: Path):
    health = tmp_path / "health"
    health.write_text("a known kernel gave a wrong result\n" * 4)
    results, pool = evaluate_all(notes, [job("e", "end timeout"), job("next", "pass")], slots=1, health=health)
    (slot,) = pool.status().slots
    assert (slot.state, slot.detail) == (SlotState.RETIRED, "a known kernel gave a wrong result")
    assert (results[1].outcome, results[1].reason) == (EvaluationOutcome.CRASHED, "no_core")
    assert "wrong result" in results[1].error_text


def test_the_status_counts_what_happened(notes: str):
    jobs = [job("a", "pass"), job("b", "end incorrect"), job("c", "pass")]
    _, pool = evaluate_all(notes, jobs)
    status = pool.status()
    # The second worker may still be on its way.
    assert {slot.core for slot in status.slots} <= {"slot 0", "slot 1", ""}
    assert {slot.state for slot in status.slots} <= {SlotState.IDLE, SlotState.STARTING}
    assert (status.waiting, status.evaluated, status.per_minute) == (0, 3, 3)
    assert status.outcomes == {"correct": 2, "incorrect": 1} and status.answered_from_store == 1


def test_the_pool_grows_with_the_cluster_and_shrinks_when_workers_are_missed(
    notes: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.pool._FOLLOW_S", 0.05)
    now = 2

    async def scenario() -> tuple[list[EvaluationResult], list[str]]:
        nonlocal now
        start = partial(start_profiler, partial(scripted, notes), False)
        pool = ProfilerPool([start(0)], start, places=lambda: now)
        try:
            await pool.start()
            results = await asyncio.gather(pool.evaluate(job("a", "sleep 3")), pool.evaluate(job("b", "sleep 3")))
            grown = len(pool.status().slots)
            now = 1
            results.append(await pool.evaluate(job("victim", "die 1")))
            states = [slot.state for slot in pool.status().slots]
            return results, [str(grown), *map(str, states)]
        finally:
            await pool.close()

    results, found = asyncio.run(scenario())
    assert all(result.correct for result in results)
    assert found[0] == "2" and sorted(found[1:]) == ["gone", "idle"]


def test_a_pool_opens_slots_as_they_are_wanted_and_gives_them_back(notes: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("actors.pool._FOLLOW_S", 0.05)

    async def scenario() -> list[int]:
        start = partial(start_profiler, partial(scripted, notes), False)
        pool = ProfilerPool([start(0)], start, demand=SlotDemand(most=2, keep_s=1.0))

        def usable() -> int:
            return sum(slot.state in (SlotState.IDLE, SlotState.BUSY) for slot in pool.status().slots)

        async def until(count: int) -> int:
            while usable() != count:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            return usable()

        try:
            await pool.start()
            found = [await until(1)]
            working = [asyncio.ensure_future(pool.evaluate(job(f"e{each}", "sleep 3"))) for each in range(3)]
            found.append(await until(2))
            results = await asyncio.gather(*working)
            found.append(await until(0))
            results.append(await pool.evaluate(job("later", "pass")))
            assert all(result.correct for result in results)
            return found
        finally:
            await pool.close()

    assert asyncio.run(asyncio.wait_for(scenario(), 120)) == [1, 2, 0]


def test_prometheus_reads_what_the_pool_does(notes: str):
    jobs = [job("victim", "die 1"), job("known", "end duplicate"), *(job(f"e{index}", "pass") for index in range(3))]
    evaluate_all(notes, jobs)
    [node] = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = {
        "ray_accelopt_evaluations_total": {"outcome": "duplicate"},
        "ray_accelopt_evaluations_answered_from_store_total": {},
        "ray_accelopt_pool_workers_lost_total": {},
        "ray_accelopt_pool_slots": {"state": "retired"},
        "ray_accelopt_pool_waiting": {},
        "ray_accelopt_evaluation_seconds_count": {},
        "ray_accelopt_evaluation_queue_seconds_count": {},
    }
    deadline = time.monotonic() + 90  # Ray reports every ten seconds
    missing = set(wanted)
    while missing and time.monotonic() < deadline:
        time.sleep(0.5)
        with urllib.request.urlopen(address, timeout=30) as answer:
            samples = answer.read().decode().splitlines()
        missing = {
            name
            for name, tags in wanted.items()
            if not any(
                sample.startswith(f"{name}{{") and all(f'{tag}="{value}"' in sample for tag, value in tags.items())
                for sample in samples
            )
        }
    assert not missing
