"""Sweeps as jobs of a cluster that ``ray start`` has started, through the command line as a user has it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("ray", reason="Ray is not installed")

from heads import Head, accelopt, copied_checkout, job_id, started_head

from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.file import load_sweep
from accelopt_ray.sweep.folder import RunStatus, SweepFolder
from accelopt_ray.trajectory import read_table
from actors.jobs import Jobs

SWEEP = Path("experiments", "beam-only.yaml")
RUNS = ("beam-only", "beam-only-published-rule")
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with started_head(tmp_path_factory.mktemp("head"), cpus=2) as started:
        yield started


def wait_for(condition: Callable[[], object], told: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.2)


@pytest.mark.ray
def test_a_cluster_that_does_not_answer_is_one_line() -> None:
    with pytest.raises(UserError, match="no Ray cluster can be used at http://127.0.0.1:9"):
        Jobs("http://127.0.0.1:9")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_is_submitted_once_and_resumed_after_a_stop(head: Head, tmp_path: Path) -> None:
    output, address = str(tmp_path / "out"), ("--address", head.dashboard)
    submit = ("submit", str(SWEEP), "--output", output, *address)
    first = accelopt(*submit, "--no-wait")
    assert first.returncode == 0, first.stderr
    job = job_id(first.stdout)

    def told() -> str:
        return accelopt("logs", job, *address).stdout

    twice = accelopt(*submit, "--no-wait")
    assert job == job_id(twice.stdout), told()
    assert "is there already" in twice.stdout

    # Stopped in the middle of it, its runs are left to be taken up.
    folder = SweepFolder(Path(output))
    wait_for(lambda: any(folder.state(name) for name in RUNS), told)
    assert "is stopping" in accelopt("stop", job, *address).stdout
    wait_for(lambda: "STOPPED" in accelopt("status", job, *address).stdout, told)

    again = accelopt(*submit)
    assert again.returncode == 0, again.stdout + again.stderr
    assert job_id(again.stdout) == f"{job}-2"
    assert "SUCCEEDED" in again.stdout
    states = [folder.state(name) for name in RUNS]
    assert [state.status for state in states if state] == [RunStatus.FINISHED, RunStatus.FINISHED]

    done = accelopt(*submit)
    assert f"job {job_id(again.stdout)} is there already (SUCCEEDED)" in done.stdout
    assert "2 finished" in accelopt("logs", job_id(again.stdout), *address).stdout
    assert "2 runs: 2 finished" in accelopt("status", output).stdout
    missing = accelopt("logs", "nobody", *address)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_whose_head_is_lost_is_taken_up_by_another(tmp_path: Path) -> None:
    checkout, output = copied_checkout(tmp_path / "checkout"), tmp_path / "out"
    file = checkout / "sweep.yaml"
    search = {"iterations": 2, "beam_width": 1, "plans_per_candidate": 2, "attempts_per_plan": 1}
    base = {"task": "silu", "shape": {"M": 128, "N": 1024}, "search": search}
    content = {"name": "headless", "base": base, "grid": {"seed": [0, 1, 2]}, "concurrent_runs": 1}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    folder, runs = SweepFolder(output), load_sweep(file).runs
    submit = ("submit", str(file), "--working-dir", str(checkout), "--output", str(output), "--address")

    def calls(name: str) -> list[str]:
        if not any((output / name / "trajectory").glob("llm_calls/*/part-*")):
            return []
        return read_table(output / name, "llm_calls", columns=["call_id"])["call_id"].to_pylist()

    with started_head(tmp_path, cpus=2) as head:
        submitted = accelopt(*submit, head.dashboard, "--no-wait")
        assert submitted.returncode == 0, submitted.stderr
        # The first run has finished and the second has begun to pay.
        wait_for(
            lambda: calls("seed1"),
            lambda: accelopt("logs", job_id(submitted.stdout), "--address", head.dashboard).stdout,
        )
        head.kill()
    before = folder.states(runs)
    assert [state.status if state else None for state in before] == [RunStatus.FINISHED, RunStatus.RUNNING, None]
    paid = {name: calls(name) for name in ("seed0", "seed1")}

    # Nothing of the first head is left but the folder.
    with started_head(tmp_path, cpus=2) as head:
        again = accelopt(*submit, head.dashboard)
        assert "SUCCEEDED" in again.stdout, again.stdout + again.stderr
    states = folder.states(runs)
    assert [(state.status, state.attempts) for state in states if state] == [
        (RunStatus.FINISHED, 1), (RunStatus.FINISHED, 2), (RunStatus.FINISHED, 1)
    ]  # fmt: skip
    assert states[0] == before[0]
    assert calls("seed0") == paid["seed0"]
    assert set(paid["seed1"]) <= set(calls("seed1"))
    assert len(set(calls("seed1"))) == len(calls("seed1"))
