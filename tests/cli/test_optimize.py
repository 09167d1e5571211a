"""The whole command in a process of its own: local cluster, offline rewriter, simulator, a task at a reduced shape."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from accelopt_ray.config import load_config
from accelopt_ray.trajectory import read_table

pytest.importorskip("ray", reason="Ray is not installed")
pytestmark = pytest.mark.ray

REDUCED = ("--shape", "M=256", "--shape", "N=2048")


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "HOME": str(home), "ACCELOPT_RAY_CACHE": str(home / "cache")}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "accelopt_ray", "optimize", "silu", *REDUCED, *arguments]
    # A shell that runs the tests in the background has them, and whatever they start, ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**environment(folder), "PYTHONPATH": str(Path(__file__).parents[2])},
        )
    finally:
        signal.signal(signal.SIGINT, before)


def test_optimize_finds_a_faster_correct_kernel_with_nothing_configured(tmp_path: Path):
    process = start(tmp_path, "--output", "run", "--diff")
    text, _ = process.communicate()
    assert process.returncode == 0, text
    evaluations = read_table(tmp_path / "run", "evaluations").to_pylist()
    correct = [row for row in evaluations if row["outcome"] == "correct"]
    baseline = correct[0]["latency_ms"]
    best = min(row["latency_ms"] for row in correct)
    assert best < baseline
    assert all(row["simulated"] for row in correct)
    assert f"speed-up    {baseline / best:.2f}x (simulated)" in text
    assert f"{best:.4f} ms" in text
    assert "+++ best" in text
    kernel = tmp_path / "run" / "best" / "silu.py"
    assert f"best kernel {kernel}" in text
    assert "simulated on sim-trn1" in kernel.read_text()
    config = load_config(tmp_path / "run" / "config.yaml", {})
    assert (config.task, config.shape, config.output) == ("silu", {"M": 256, "N": 2048}, tmp_path / "run")
    assert not (tmp_path / ".ray").exists(), "a token file would change later job submissions"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_process_and_a_readable_trajectory(tmp_path: Path, number: signal.Signals):
    process = start(tmp_path, "--output", "run", "-T", "200", "-N", "6", "--preset", "published")
    assert process.stdout is not None
    family: list[psutil.Process] = []
    for line in process.stdout:
        if "baseline:" in line:
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            break
    text = process.communicate()[0]
    assert process.returncode == 130, text
    assert len(family) > 3
    deadline = time.monotonic() + 30
    left = family
    while left and time.monotonic() < deadline:
        left = [each for each in left if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.1)
    assert [each.name() for each in left] == []
    assert read_table(tmp_path / "run", "evaluations").num_rows >= 1
    assert read_table(tmp_path / "run", "runs").num_rows == 1
