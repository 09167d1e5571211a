"""Watching a run that goes on in a cluster by its name, as from a machine that does not have its folder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from scripted_endpoint import scripted_endpoint  # noqa: E402

from accelopt_ray.config import RunConfig, load_config  # noqa: E402
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult  # noqa: E402
from accelopt_ray.outcome import EvaluationOutcome, UserError  # noqa: E402
from actors.cluster import Cluster  # noqa: E402
from actors.profiler import Evaluator  # noqa: E402
from actors.run import start_run  # noqa: E402
from actors.watching import RunEndedError, held_run  # noqa: E402

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.ray
ROOT = Path(__file__).parents[2]


class Gate:
    """A model that answers its first calls, and the others once it is told to."""

    def __init__(self, free: int) -> None:
        self.opened = threading.Event()
        self._free = threading.Semaphore(free)

    def __call__(self, system: str, user: str) -> str:
        if not self._free.acquire(blocking=False):
            self.opened.wait(60)
        return "Plan: fuse.\n\n```python\nLATENCY = 4.0\n\ndef kernel(x):\n    return x\n```\n"


def device() -> Evaluator:
    def evaluate(job: EvaluationJob) -> EvaluationResult:
        latency_ms = 4.0 if "LATENCY" in job.source else 10.0
        known = {"device": "sim-trn1", "simulated": True, "check": job.check}
        return EvaluationResult(job.evaluation_id, EvaluationOutcome.CORRECT, latency_ms=latency_ms, **known)

    return evaluate


def config(folder: Path, base_url: str) -> RunConfig:
    sizes = {"iterations": 1, "beam_width": 1, "plans_per_candidate": 2, "attempts_per_plan": 1}
    models = {"default": {"base_url": base_url, "model": "scripted"}}
    return load_config(
        None, {"task": "silu", "shape": {"M": 128, "N": 1024}, "output": str(folder), "search": sizes, "models": models}
    )


def watching(name: str, address: str, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "accelopt_ray", "watch", name, *options],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_run_is_found_by_name_or_folder_while_it_goes_on(tmp_path: Path, cluster: Cluster):
    folder = tmp_path / "here" / "folder-of-run"
    gate = Gate(free=1)
    with scripted_endpoint(gate) as base_url:
        run = start_run(config(folder, base_url), "watched-1", cluster, device)
        try:
            held = held_run("watched-1")
            assert (held.folder, held_run("here/folder-of-run").run_id) == (str(folder), "watched-1")
            deadline = time.monotonic() + 60
            while (now := held.snapshot()) is None or now.baseline is None or not now.calls:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert (now.state, now.device, now.iterations_done) == ("running", "sim-trn1", 0)
            assert now.calls_under_way >= 1

            seen = watching("watched-1", cluster.address, "--once")
            out, error = seen.communicate(timeout=120)
            assert seen.returncode == 0, error
            assert "run watched-1" in out and "running" in out
            assert "best so far" in out and "(simulated)" in out

            other = watching("nobody", cluster.address, "--once")
            _, error = other.communicate(timeout=120)
            assert (other.returncode, error.count("\n")) == (2, 1)
            assert "neither a folder here nor a run of the cluster is nobody" in error
            assert "watched-1" in error

            following = watching("folder-of-run", cluster.address, "--interval", "0.3")
            assert following.stdout is not None
            assert "running" in following.stdout.readline()
        finally:
            gate.opened.set()
            for _ in run.events():
                pass
    out, error = following.communicate(timeout=120)
    assert following.returncode == 0, error
    assert "finished" in out.splitlines()[-1]
    assert run.result()["silu"].status == "completed"
    ray.kill(run.driver)
    with pytest.raises(RunEndedError):
        held.snapshot()
    with pytest.raises(UserError, match="neither a folder here nor a run"):
        held_run("watched-1")
