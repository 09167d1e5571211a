"""Sweeps on a real local cluster, with a scripted model and a scripted device."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ray = pytest.importorskip("ray", reason="Ray is not installed")

from scripted_endpoint import scripted_endpoint  # noqa: E402

from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult  # noqa: E402
from accelopt_ray.outcome import EvaluationOutcome, UserError  # noqa: E402
from accelopt_ray.sweep.file import Sweep, load_sweep  # noqa: E402
from accelopt_ray.sweep.folder import RunStatus, SweepFolder  # noqa: E402
from accelopt_ray.sweep.summary import summary_lines  # noqa: E402
from accelopt_ray.trajectory import read_table  # noqa: E402
from actors.cluster import Cluster  # noqa: E402
from actors.profiler import Evaluator  # noqa: E402
from actors.sweep import SweepSession  # noqa: E402

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.ray


def scripted_device() -> Evaluator:
    """A kernel's latency stands in its text; the task lora is broken."""

    def evaluate(job: EvaluationJob) -> EvaluationResult:
        if "lora" in job.task.location:
            raise UserError("the reference of lora is broken: mend it")
        found = re.search(r"LATENCY = ([\d.]+)", job.source)
        latency_ms = float(found[1]) if found else 10.0
        return EvaluationResult(
            job.evaluation_id, EvaluationOutcome.CORRECT, device=job.device, simulated=True, check=job.check,
            latency_ms=latency_ms, percent_of_peak=50.0,
        )  # fmt: skip

    return evaluate


def model(system: str, user: str) -> str:
    return "Plan: fuse two passes.\n\n```python\nLATENCY = 5.0\n\ndef kernel(x):\n    return x\n```\n"


def sweep_of(tmp_path: Path, base_url: str, **content: Any) -> Sweep:
    sizes = {"iterations": 1, "beam_width": 1, "plans_per_candidate": 2, "attempts_per_plan": 1}
    models = {"default": {"base_url": base_url, "model": "scripted"}}
    base = {"task": "silu", "shape": {"M": 128, "N": 1024}, "search": sizes, "models": models}
    path = tmp_path / "sweep.yaml"
    path.write_text(
        yaml.safe_dump({"name": "x", "base": base, "concurrent_runs": 2, "slots": 1, **content}, sort_keys=False)
    )
    return load_sweep(path)


def session(sweep: Sweep, folder: SweepFolder, cluster: Cluster, said: list[str]) -> SweepSession:
    folder.claim(sweep)
    return SweepSession(sweep, sweep.runs, folder, cluster, said.append, make_evaluator=scripted_device)


def test_one_failing_run_ends_no_other_and_finished_runs_are_not_repeated(tmp_path: Path, cluster: Cluster) -> None:
    folder, said = SweepFolder(tmp_path / "out"), list[str]()
    with scripted_endpoint(model) as base_url:
        sweep = sweep_of(
            tmp_path,
            base_url,
            variants={"good": {"preset": "paper"}, "broken": {"task": "lora", "shape": {"M": 128, "N": 1024}}},
            grid={"device": ["sim-trn1", "sim-trn2"]},
        )
        # The shapes of lora are others; its own are kept, nothing of it is computed by the scripted device.
        runs = [
            dataclasses.replace(run, config=run.config.model_copy(update={"shape": {}}))
            if run.config.task == "lora"
            else run
            for run in sweep.runs
        ]
        sweep = dataclasses.replace(sweep, runs=tuple(runs))
        first = session(sweep, folder, cluster, said)
        first.run()
        again = session(sweep, folder, cluster, said)
        again.run()
    states = first.states
    assert {name: str(state.status) for name, state in states.items() if state} == {
        "good-sim-trn1": "finished", "good-sim-trn2": "finished",
        "broken-sim-trn1": "failed", "broken-sim-trn2": "failed",
    }  # fmt: skip
    lines = "\n".join(summary_lines([run.name for run in sweep.runs], states))
    assert "the reference of lora is broken: mend it" in lines
    assert "2.000x" in lines
    assert "2 runs are finished already" in said
    attempts = {name: state.attempts for name, state in again.states.items() if state}
    assert attempts == {"good-sim-trn1": 1, "good-sim-trn2": 1, "broken-sim-trn1": 2, "broken-sim-trn2": 2}
    for device in ("sim-trn1", "sim-trn2"):
        evaluations = read_table(folder.path / f"good-{device}", "evaluations").to_pylist()
        assert {row["device"] for row in evaluations} == {device}
        assert len(evaluations) == states[f"good-{device}"].outcomes[0].evaluations  # type: ignore[union-attr]


def test_a_stopped_sweep_is_taken_up_where_it_stood(tmp_path: Path, cluster: Cluster) -> None:
    folder = SweepFolder(tmp_path / "out")
    said: list[str] = []

    def say_until_one_is_finished(text: str) -> None:
        said.append(text)
        if ": finished" in text:
            raise KeyboardInterrupt

    with scripted_endpoint(model) as base_url:
        sweep = sweep_of(tmp_path, base_url, grid={"seed": [0, 1, 2]}, concurrent_runs=1)
        folder.claim(sweep)
        stopped = SweepSession(
            sweep, sweep.runs, folder, cluster, say_until_one_is_finished, make_evaluator=scripted_device
        )
        with pytest.raises(KeyboardInterrupt):
            stopped.run()
        assert [state.status if state else None for state in folder.states(sweep.runs)] == [
            RunStatus.FINISHED, None, None
        ]  # fmt: skip
        calls = {"seed0": len(read_table(folder.path / "seed0", "llm_calls"))}
        session(sweep, folder, cluster, said).run()
    states = folder.states(sweep.runs)
    assert [state.status for state in states if state] == [RunStatus.FINISHED] * 3
    assert [state.attempts for state in states if state] == [1, 1, 1]
    assert len(read_table(folder.path / "seed0", "llm_calls")) == calls["seed0"]


def test_a_run_that_a_killed_session_left_running_goes_on_under_its_id(tmp_path: Path, cluster: Cluster) -> None:
    folder, said = SweepFolder(tmp_path / "out"), list[str]()
    with scripted_endpoint(model) as base_url:
        sweep = sweep_of(tmp_path, base_url, grid={"seed": [0]})
        session(sweep, folder, cluster, said).run()
        [finished] = folder.states(sweep.runs)
        assert finished is not None
        # As if the process had been killed just before it wrote down the end.
        folder.write_state(dataclasses.replace(finished, status=RunStatus.RUNNING, outcomes=()))
        calls = len(read_table(folder.path / "seed0", "llm_calls"))
        session(sweep, folder, cluster, said).run()
    [state] = folder.states(sweep.runs)
    assert state is not None
    assert (state.status, state.run_id, state.attempts) == (RunStatus.FINISHED, finished.run_id, 2)
    assert len(read_table(folder.path / "seed0", "llm_calls")) == calls
    assert state.outcomes[0].speedup == pytest.approx(2.0)
