"""What is said of a machine with, without and with half of the Neuron toolchain."""

from __future__ import annotations

import pytest
from standin_toolchain import StandinToolchain, install

from accelopt_ray.devices.neuron import toolchain
from accelopt_ray.devices.neuron.toolchain import Generation, detect_toolchain, list_devices, visible_core
from accelopt_ray.devices.registry import get_device
from accelopt_ray.outcome import UserError


@pytest.fixture
def standin_a(tmp_path, monkeypatch) -> StandinToolchain:
    return install("a", tmp_path / "toolchain", monkeypatch)


@pytest.mark.parametrize("generation, runner", [("a", ""), ("b", "spike")])
def test_the_generation_and_its_parts_are_found(tmp_path, monkeypatch, generation, runner):
    standin = install(generation, tmp_path / "toolchain", monkeypatch)
    found = detect_toolchain()
    assert (found.generation, found.runner) == (Generation(generation.upper()), runner)
    assert found.profiler == standin.folder / "neuron-profile"
    assert found.hardware == "trn1"
    assert "stand-in" in found.versions["neuron-profile"]


def test_detection_imports_nothing_of_the_toolchain(standin_a, monkeypatch):
    (standin_a.folder / "neuronxcc" / "__init__.py").write_text("raise AssertionError('imported')")
    assert detect_toolchain().generation is Generation.A


def test_a_machine_without_compiler_is_told_what_to_install():
    with pytest.raises(UserError, match="install neuronx-cc"):
        get_device("neuron")


def test_a_missing_profiler_is_named(standin_a, monkeypatch):
    (standin_a.folder / "neuron-profile").unlink()
    with pytest.raises(UserError, match="aws-neuronx-tools"):
        detect_toolchain()


def test_generation_b_needs_something_that_runs_kernels(tmp_path, monkeypatch):
    standin = install("b", tmp_path / "toolchain", monkeypatch)
    (standin.folder / "spike").rename(standin.folder / "gone")
    with pytest.raises(UserError, match="spike"):
        detect_toolchain()


def test_the_hardware_is_read_from_the_instance_type(standin_a, tmp_path, monkeypatch):
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE")
    product = tmp_path / "product_name"
    monkeypatch.setattr(toolchain, "PRODUCT_NAME", product)
    product.write_text("trn2.48xlarge\n")
    assert detect_toolchain().hardware == "trn2"
    product.write_text("m5.large\n")
    with pytest.raises(UserError, match="NEURON_PLATFORM_TARGET_OVERRIDE"):
        detect_toolchain()


@pytest.mark.parametrize("cores", ["", "0,1", "0-3", "x"])
def test_exactly_one_core_must_have_been_assigned(standin_a, monkeypatch, cores):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", cores)
    with pytest.raises(UserError, match="NEURON_RT_VISIBLE_CORES"):
        get_device("neuron")


def test_any_core_will_do(standin_a, monkeypatch):
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "17")
    assert visible_core() == "17"


def test_devices_are_listed_or_the_driver_is_named(standin_a):
    assert list_devices() == toolchain.NeuronDevices(1, 2)
    standin_a.behave(neuron_ls="no_driver")
    with pytest.raises(UserError, match="driver"):
        list_devices()
