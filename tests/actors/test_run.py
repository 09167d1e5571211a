"""A whole run through the actors, with a scripted model and a scripted device."""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from scripted_endpoint import scripted_endpoint  # noqa: E402

from accelopt_ray.config import RunConfig, load_config  # noqa: E402
from accelopt_ray.devices.protocol import Artifact  # noqa: E402
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult  # noqa: E402
from accelopt_ray.outcome import EvaluationOutcome, UserError  # noqa: E402
from accelopt_ray.trajectory import read_table, trajectory_digest  # noqa: E402
from actors.cluster import Cluster  # noqa: E402
from actors.profiler import Compiled, Evaluator  # noqa: E402
from actors.run import RunFailedError, start_run  # noqa: E402

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.ray


def scripted_device() -> Evaluator:
    """A kernel's latency stands in its text; without one it is the baseline and takes 10 ms."""

    def evaluate(job: EvaluationJob) -> EvaluationResult:
        if "BROKEN" in job.source:
            return EvaluationResult(job.evaluation_id, EvaluationOutcome.COMPILE_ERROR, error_text="no such engine")
        found = re.search(r"LATENCY = ([\d.]+)", job.source)
        return EvaluationResult(
            job.evaluation_id,
            EvaluationOutcome.CORRECT,
            device="sim-trn1",
            simulated=True,
            check=job.check,
            latency_ms=float(found[1]) if found else 10.0,
            percent_of_peak=float(50),
            counters={"hbm_read_bytes": 4096.0},
        )

    return evaluate


def failing_device() -> Evaluator:
    def evaluate(job: EvaluationJob) -> EvaluationResult:
        raise UserError("the reference of the task is broken: mend it")

    return evaluate


class CompiledAhead:
    """Evaluates only what a compile worker made; what it made it of is what the scripted device looks at."""

    def compile(self, job: EvaluationJob) -> Compiled:
        return Artifact("none", f"{os.getpid()} {job.source}".encode())

    def __call__(self, job: EvaluationJob, compiled: Compiled | None = None) -> EvaluationResult:
        assert isinstance(compiled, Artifact)
        compiler, _, source = compiled.payload.decode().partition(" ")
        assert int(compiler) != os.getpid()
        return scripted_device()(replace(job, source=source))


class Model:
    """Each kernel it writes is 1 ms faster than the one before; every third does not compile."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.kernels = itertools.count(1)
        self.lock = threading.Lock()
        self.delay_s = delay_s

    def __call__(self, system: str, user: str) -> str:
        time.sleep(self.delay_s)
        with self.lock:
            number = next(self.kernels)
        body = f"BROKEN = {number}" if number % 3 == 0 else f"LATENCY = {10 - number * 0.1:.1f}"
        return f"Plan {number}: fuse two passes.\n\n```python\n{body}\n\ndef kernel(x):\n    return x\n```\n"


def config(folder: Path, base_url: str, **search: int) -> RunConfig:
    sizes = {"iterations": 2, "beam_width": 2, "plans_per_candidate": 2, "attempts_per_plan": 1, **search}
    models = {"default": {"base_url": base_url, "model": "scripted"}}
    return load_config(
        None, {"task": "silu", "shape": {"M": 128, "N": 1024}, "output": str(folder), "search": sizes, "models": models}
    )


@pytest.fixture
def free_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """The session's cluster; each run's actors have ended when the next one starts."""
    yield cluster


def drain(run: Any) -> list[Any]:
    return [event for events in run.events() for event in events]


def test_a_run_leaves_a_whole_trajectory_and_its_best_kernel(tmp_path: Path, free_cluster: Cluster):
    with scripted_endpoint(Model()) as base_url:
        run = start_run(config(tmp_path, base_url), "run-1", free_cluster, scripted_device)
        events = drain(run)
        outcome = run.result()["silu"]
    tables = {
        name: read_table(tmp_path, name).to_pylist()
        for name in ("runs", "iterations", "llm_calls", "plans", "sources", "evaluations", "selections")
    }
    assert outcome.status == "completed"
    [row] = tables["runs"]
    assert (row["run_id"], row["device"], dict(row["models"])["planner"]) == ("run-1", "sim-trn1", "scripted")
    assert [row["iteration"] for row in tables["iterations"]] == [0, 1, 2]

    evaluations = tables["evaluations"]
    correct = [row["latency_ms"] for row in evaluations if row["outcome"] == "correct"]
    assert {row["outcome"] for row in evaluations} == {"correct", "compile_error"}
    assert outcome.tally.best is not None
    assert outcome.tally.best.latency_ms == min(correct) < 10.0
    assert outcome.tally.evaluations == len(evaluations) == sum(event.name == "evaluations" for event in events)

    calls = {row["call_id"] for row in tables["llm_calls"]}
    assert calls >= {row["call_id"] for row in [*tables["plans"], *evaluations] if row["call_id"]}
    assert all(row["task"] == "silu" and row["outcome"] == "ok" and row["reply_text"] for row in tables["llm_calls"])
    stored = {row["source_sha256"] for row in tables["sources"]}
    assert stored >= {row["source_sha256"] for row in evaluations if row["source_sha256"]}
    candidates = {row["candidate_id"] for row in evaluations}
    assert candidates >= {row["candidate_id"] for row in tables["selections"]}

    best = (tmp_path / "best" / "silu.py").read_text()
    assert f"LATENCY = {min(correct):.1f}" in best
    assert "simulated on sim-trn1" in best


def test_a_replayed_run_is_the_same_run_without_a_model(tmp_path: Path, free_cluster: Cluster):
    with scripted_endpoint(Model()) as base_url:
        first = config(tmp_path / "first", base_url, fix_attempts=1)
        run = start_run(first, "run-a", free_cluster, scripted_device)
        drain(run)
        cost = run.result()["silu"].tally
    again = first.model_copy(update={"output": tmp_path / "again", "replay": tmp_path / "first"})
    assert again.sha256() == first.sha256()
    run = start_run(again, "run-b", free_cluster, scripted_device)
    drain(run)
    tally = run.result()["silu"].tally
    assert tally.calls == cost.calls
    assert tally.calls["fixer"] > 0
    assert trajectory_digest(tmp_path / "again", "run-b") == trajectory_digest(tmp_path / "first", "run-a")
    [row] = read_table(tmp_path / "again", "runs").to_pylist()
    assert dict(row["models"])["planner"] == "scripted"


def test_a_replay_that_lacks_a_reply_names_it(tmp_path: Path, free_cluster: Cluster):
    with scripted_endpoint(Model()) as base_url:
        first = config(tmp_path / "first", base_url, iterations=1)
        run = start_run(first, "run-c", free_cluster, scripted_device)
        drain(run)
        run.result()
    more = config(tmp_path / "more", "http://127.0.0.1:9/v1", iterations=2)
    run = start_run(more.model_copy(update={"replay": tmp_path / "first"}), "run-d", free_cluster, scripted_device)
    drain(run)
    with pytest.raises(UserError, match=r"has no reply for silu\.i2\."):
        run.result()


def test_a_stopped_run_leaves_a_readable_trajectory_and_no_actor(tmp_path: Path, free_cluster: Cluster):
    with scripted_endpoint(Model(delay_s=0.2)) as base_url:
        run = start_run(config(tmp_path, base_url, iterations=100), "run-2", free_cluster, scripted_device)
        for events in run.events():
            if any(event.name == "iterations" and event.values["iteration"] == 1 for event in events):
                break
        tallies = run.stop()
    assert tallies is not None
    tally = tallies["silu"]
    assert len(read_table(tmp_path, "evaluations")) == tally.evaluations > 1
    assert len(read_table(tmp_path, "llm_calls")) == sum(tally.calls.values())
    with pytest.raises(RunFailedError):
        run.result()


def test_what_only_the_evaluation_finds_wrong_is_still_the_users_mistake(tmp_path: Path, free_cluster: Cluster):
    with scripted_endpoint(Model()) as base_url:
        run = start_run(config(tmp_path, base_url), "run-3", free_cluster, failing_device)
        drain(run)
        with pytest.raises(UserError, match="^the reference of the task is broken: mend it$"):
            run.result()


def test_slots_run_what_compile_slots_made(tmp_path: Path, free_cluster: Cluster):
    with scripted_endpoint(Model()) as base_url:
        wanted = config(tmp_path, base_url).model_copy(update={"slots": 1, "compile_slots": 1})
        run = start_run(wanted, "run-6", free_cluster, CompiledAhead)
        drain(run)
        tally = run.result()["silu"].tally
    assert tally.best is not None
    assert tally.best.latency_ms < 10.0
    assert set(tally.outcomes) == {"correct", "compile_error"}


def test_more_slots_than_the_cluster_has_are_refused(tmp_path: Path, free_cluster: Cluster):
    wanted = config(tmp_path, "http://127.0.0.1:9/v1").model_copy(update={"slots": 99})
    with pytest.raises(UserError, match="the cluster has 2 CPUs and the run wants 99 slots"):
        start_run(wanted, "run-4", free_cluster)
    with pytest.raises(UserError, match="the cluster has 0 NeuronCores"):
        start_run(wanted.model_copy(update={"device": "neuron"}), "run-5", free_cluster)
    with pytest.raises(UserError, match="wants 1 slots and 2 compile slots"):
        start_run(wanted.model_copy(update={"slots": 1, "compile_slots": 2}), "run-7", free_cluster)
    with pytest.raises(UserError, match="no documented way to compile without a core"):
        start_run(wanted.model_copy(update={"device": "neuron", "compile_slots": 1}), "run-8", free_cluster)
