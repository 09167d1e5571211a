"""The known kernel finds devices that do not compute, and leaves those alone that do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from standin_toolchain import install

from accelopt_ray.devices.health import check_health
from accelopt_ray.devices.protocol import RunResult
from accelopt_ray.devices.registry import get_device
from accelopt_ray.devices.simulator import SimulatorDevice


def test_a_simulator_is_well():
    assert check_health(get_device("sim-trn1")) == ""


@pytest.mark.parametrize("generation", ["a", "b"])
def test_a_core_is_well_or_the_fault_is_named(generation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    standin = install(generation, tmp_path / "toolchain", monkeypatch)
    device = get_device("neuron")
    assert check_health(device) == ""
    standin.behave(toolchain="core_busy")
    assert check_health(device).startswith("fault: ")
    standin.behave(toolchain="compile_error")
    assert "NCC_EVRF007" in check_health(device)


@dataclass(frozen=True)
class Miscounting(SimulatorDevice):
    """Gets one value wrong."""

    def run(self, artifact, inputs, folder, limits):
        ran = super().run(artifact, inputs, folder, limits)
        assert isinstance(ran, RunResult)
        output = np.load(ran.outputs[0])
        output[3, 5] += 1
        np.save(ran.outputs[0], output)
        return ran


def test_one_wrong_value_is_enough():
    assert "wrong result" in check_health(Miscounting("sim-trn1", "trn1"))
