"""A node that dies under load, in a cluster of several local nodes of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_evaluation_ends_exactly_once_and_no_kernel_is_blamed():
    command = [sys.executable, "-m", "experiments.benchmark_service", "node-death"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  met: node-death: every evaluation ended exactly once" in done.stdout
    assert "  met: node-death: workers were lost indeed" in done.stdout
