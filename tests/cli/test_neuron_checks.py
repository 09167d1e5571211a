"""The doctor on machines with all, none and parts of the Neuron toolchain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "standin"))

from standin_toolchain import StandinToolchain, install, lay_out

import nkibench
from accelopt_ray.cli.finding import Finding
from accelopt_ray.cli.neuron_checks import neuron_findings


def findings() -> dict[str, Finding]:
    return {finding.subject: finding for finding in neuron_findings()}


@pytest.fixture(params=["a", "b"])
def standin(request, tmp_path, monkeypatch) -> StandinToolchain:
    return install(request.param, tmp_path / "toolchain", monkeypatch)


def test_a_machine_without_any_of_it_gets_one_line():
    found = findings()
    assert list(found) == ["neuron"] and found["neuron"].state == "absent"


def test_every_step_is_checked_up_to_a_kernel_that_runs(standin):
    found = findings()
    assert {finding.state for finding in found.values()} == {"ok"}
    assert found["neuron devices"].detail == "1 chips, 2 NeuronCores"
    assert found["neuron hardware"].detail == "trn1" and "right values" in found["neuron kernel"].detail


def test_a_kernel_is_measured_by_a_process_that_starts_elsewhere(tmp_path):
    """As after an editable installation: the checkout is then in no folder of ``sys.path``."""
    toolchain = lay_out("a", tmp_path / "toolchain")
    baseline = Path(nkibench.__file__).parent / "tasks" / "silu" / "baseline.py"
    shape = ["--shape", "M=128", "--shape", "N=1024"]
    command = [sys.executable, "-m", "accelopt_ray", "profile", str(baseline), "--task", "silu", "--device", "neuron"]
    done = subprocess.run(
        [*command, *shape],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(toolchain.folder),
            "PATH": f"{toolchain.folder}{os.pathsep}{os.environ['PATH']}",
            "NEURON_RT_VISIBLE_CORES": "0",
            "NEURON_PLATFORM_TARGET_OVERRIDE": "trn1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "correct" in done.stdout


@pytest.mark.parametrize(
    "behaviour, subject, words",
    [
        ({"neuron_ls": "no_driver"}, "neuron devices", "driver"),
        ({"toolchain": "core_busy"}, "neuron kernel", "fault"),
        ({"toolchain": "compile_error"}, "neuron kernel", "NCC_EVRF007"),
    ],
)
def test_the_step_that_fails_is_the_one_that_is_named(standin, behaviour, subject, words):
    standin.behave(**behaviour)
    found = findings()
    assert found[subject].state == "problem" and words in found[subject].detail
    assert all(finding.state == "ok" for name, finding in found.items() if name != subject)


def test_a_missing_profiler_is_a_problem_on_a_trainium_node(standin):
    (standin.folder / "neuron-profile").unlink()
    assert findings()["neuron toolchain"].state == "problem"


def test_without_a_core_of_ones_own_nothing_is_run(standin, monkeypatch):
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES")
    found = findings()
    assert found["neuron core"].state == "absent" and "neuron kernel" not in found
