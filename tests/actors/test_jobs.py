"""Sweeps as jobs of a cluster that ``ray start`` has started, through the command line as a user has it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.folder import RunStatus, SweepFolder
from actors.jobs import Jobs

ROOT = Path(__file__).parents[2]
SWEEP = Path("experiments", "beam-only.yaml")
RUNS = ("beam-only", "beam-only-published-rule")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A head with its dashboard, on ports of its own; not ended by `ray stop`, which would end every Ray here."""
    port = free_port()
    options = {
        "port": free_port(),
        "dashboard-port": port,
        "dashboard-agent-listen-port": free_port(),
        "metrics-export-port": free_port(),
        "ray-client-server-port": free_port(),
        "num-cpus": 2,
        "object-store-memory": 200 << 20,
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in options.items()]
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_memory_monitor_refresh_ms": "0",
    }
    log = tmp_path_factory.mktemp("head") / "log"
    with log.open("wb") as stream:
        head = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/api/version", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline and head.poll() is None, log.read_text()
                time.sleep(1)
        yield address
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(60)
        finally:
            if head.poll() is None:
                os.killpg(head.pid, signal.SIGKILL)


def accelopt(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelopt_ray", "sweep", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)


def job_id(output: str) -> str:
    return output.split()[1]


@pytest.mark.ray
def test_a_cluster_that_does_not_answer_is_one_line() -> None:
    with pytest.raises(UserError, match="no Ray cluster can be used at http://127.0.0.1:9"):
        Jobs("http://127.0.0.1:9")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sweep_is_submitted_once_and_resumed_after_a_stop(address: str, tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    submit = ("submit", str(SWEEP), "--output", output, "--address", address)
    first = accelopt(*submit, "--no-wait")
    assert first.returncode == 0, first.stderr
    twice = accelopt(*submit, "--no-wait")
    told = [accelopt(name, job_id(first.stdout), "--address", address).stdout for name in ("status", "logs")]
    assert job_id(first.stdout) == job_id(twice.stdout), told
    assert "is there already" in twice.stdout

    # Stopped in the middle of it, its runs are left to be taken up.
    folder = SweepFolder(Path(output))
    deadline = time.monotonic() + 300
    while not any(folder.state(name) for name in RUNS):
        assert time.monotonic() < deadline, accelopt("logs", job_id(first.stdout), "--address", address).stdout
        time.sleep(0.5)
    stopped = accelopt("stop", job_id(first.stdout), "--address", address)
    assert "is stopping" in stopped.stdout
    while "STOPPED" not in accelopt("status", job_id(first.stdout), "--address", address).stdout:
        assert time.monotonic() < deadline
        time.sleep(1)

    again = accelopt(*submit)
    assert again.returncode == 0, again.stdout + again.stderr
    assert job_id(again.stdout) == f"{job_id(first.stdout)}-2"
    assert "SUCCEEDED" in again.stdout
    states = [folder.state(name) for name in RUNS]
    assert [state.status for state in states if state] == [RunStatus.FINISHED, RunStatus.FINISHED]

    done = accelopt(*submit)
    assert f"job {job_id(again.stdout)} is there already (SUCCEEDED)" in done.stdout
    assert "2 finished" in accelopt("logs", job_id(again.stdout), "--address", address).stdout
    assert "2 runs: 2 finished" in accelopt("status", output).stdout
    missing = accelopt("logs", "nobody", "--address", address)
    assert (missing.returncode, missing.stderr.count("\n")) == (2, 1)
