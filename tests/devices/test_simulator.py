"""The simulator as a device: what it does with good, bad and hostile kernels."""

from __future__ import annotations

import os
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from left_processes import children, left_since

from accelopt_ray.devices import confinement
from accelopt_ray.devices.protocol import Artifact, Device, Failure, KernelRequest, Limits, Measurement, TensorSpec
from accelopt_ray.devices.registry import get_device, latency_kind
from accelopt_ray.nki_sim.cost.constants import DEVICES, save_device_profile
from accelopt_ray.outcome import EvaluationOutcome, UserError

HEADER = """
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
"""

DOUBLE = (
    HEADER
    + """
@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(2):
        tile = nl.load(x[nl.ds(i * 128, 128), 0:512])
        nl.store(out[nl.ds(i * 128, 128), 0:512], value=nl.multiply(tile, 2.0))
    return out
"""
)

SPEC = TensorSpec((256, 512))
LIMITS = Limits(timeout_s=20.0)


@pytest.fixture
def device() -> Device:
    return get_device("sim-trn1")


def compile_text(device: Device, source: str, limits: Limits = LIMITS) -> Artifact | Failure:
    return device.compile(KernelRequest(source, (SPEC,)), limits)


def with_attack(attack: str) -> str:
    """The good kernel with something added at the start of its body."""
    body = textwrap.indent(textwrap.dedent(attack).strip(), "    ")
    return DOUBLE.replace("def kernel(x):\n", f"def kernel(x):\n{body}\n")


def test_a_kernel_is_compiled_run_and_priced(device, tmp_path):
    artifact = compile_text(device, DOUBLE)
    assert isinstance(artifact, Artifact)
    assert artifact.outputs == (SPEC,) and artifact.precision_tier == "fp32"
    x = np.random.default_rng(0).standard_normal((256, 512), dtype=np.float32)
    np.save(tmp_path / "x.npy", x)
    ran = device.run(artifact, [tmp_path / "x.npy"], tmp_path, LIMITS)
    assert not isinstance(ran, Failure)
    assert np.array_equal(np.load(ran.outputs[0]), x * 2)
    measured = device.measure(artifact, (), LIMITS)
    assert isinstance(measured, Measurement)
    assert measured.simulated and measured.latency_ms > 0
    assert measured.counters["hbm_read_bytes"] == x.nbytes
    assert device.measure(artifact, (), LIMITS) == measured


def test_the_device_follows_its_protocol(device):
    assert isinstance(device, Device)
    assert (device.name, device.hardware, device.simulated) == ("sim-trn1", "trn1", True)
    assert {"device", "numpy", "simulator_sha256"} <= set(device.fingerprint())
    assert get_device("sim-trn2").fingerprint() != device.fingerprint()


def test_a_device_profile_is_a_device(device, tmp_path):
    path = tmp_path / "slow.json"
    save_device_profile(replace(DEVICES["trn1"], name="slow", dma_bytes_per_us=25e3), path)
    slow = get_device(str(path))
    assert (slow.name, slow.hardware, slow.simulated) == (str(path), "trn1", True)
    artifact = compile_text(device, DOUBLE)
    assert slow.measure(artifact, (), LIMITS).latency_ms > device.measure(artifact, (), LIMITS).latency_ms
    before = slow.fingerprint()
    save_device_profile(replace(DEVICES["trn1"], name="slow", dma_bytes_per_us=20e3), path)
    assert slow.fingerprint() != before
    with pytest.raises(UserError, match="cannot read the device profile"):
        get_device(str(tmp_path / "absent.json"))


def test_latencies_of_uncalibrated_generations_are_called_so():
    assert latency_kind("sim-trn1", True) == "simulated"
    assert latency_kind("sim-trn2", True) == latency_kind("sim-trn3?relative=0.1", True) == "simulated, uncalibrated"
    assert latency_kind("neuron", False) == "measured"


@pytest.mark.parametrize("name, hint", [("sim-trn", "did you mean"), ("tpu", "choose from"), ("neuron", "sim-trn1")])
def test_an_unknown_device_is_the_users_mistake(name, hint):
    with pytest.raises(UserError, match=hint):
        get_device(name)


@pytest.mark.parametrize(
    "source, outcome, words",
    [
        ("def kernel(x:\n", EvaluationOutcome.COMPILE_ERROR, "SyntaxError"),
        ("x = 1\n", EvaluationOutcome.COMPILE_ERROR, "kernel"),
        (with_attack("raise ValueError('told to')"), EvaluationOutcome.COMPILE_ERROR, "told to"),
        (with_attack("undefined_name"), EvaluationOutcome.COMPILE_ERROR, "undefined_name"),
        (with_attack("import sys; sys.exit(0)"), EvaluationOutcome.COMPILE_ERROR, "SystemExit"),
    ],
)
def test_a_kernel_that_does_not_compile_says_why(device, source, outcome, words):
    failure = compile_text(device, source)
    assert isinstance(failure, Failure)
    assert failure.outcome is outcome and words in failure.error_text


@pytest.mark.parametrize(
    "attack, outcome",
    [
        ("while True: pass", EvaluationOutcome.TIMEOUT),
        (
            "import signal, time\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
            "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)",
            EvaluationOutcome.TIMEOUT,
        ),
        ("import os; os._exit(0)", EvaluationOutcome.CRASHED),
        ("import ctypes; ctypes.string_at(0)", EvaluationOutcome.CRASHED),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", EvaluationOutcome.CRASHED),
        # The bytes stay referenced, so this is memory in use and not garbage.
        ("keep = []\nwhile True: keep.append(b'x' * (1 << 24))", EvaluationOutcome.MEMORY_LIMIT),
        # Results that the kernel writes itself, in every descriptor it finds.
        (
            "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'A' + b'{\"verdict\": \"correct\"}')\n"
            "    except OSError: pass\nos._exit(0)",
            EvaluationOutcome.CRASHED,
        ),
    ],
)
def test_a_hostile_kernel_ends_with_a_typed_outcome(device, attack, outcome):
    failure = compile_text(device, with_attack(attack), Limits(timeout_s=2.0, memory_bytes=600 << 20))
    assert isinstance(failure, Failure), failure
    assert failure.outcome is outcome, failure.error_text
    assert len(failure.error_text) < 5000
    # And the next kernel is not affected.
    assert isinstance(compile_text(device, DOUBLE), Artifact)


def test_a_flood_of_output_is_no_crime(device):
    flood = with_attack("for _ in range(200): print('x' * 100_000)")
    assert isinstance(compile_text(device, flood), Artifact)


def test_processes_left_behind_are_ended_and_counted(device, monkeypatch):
    # As on a system that cannot forbid second processes.
    monkeypatch.setitem(confinement.available(), "seccomp", False)
    before = children()
    attack = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(100)
        time.sleep(100)
    time.sleep(0.1)
    """
    artifact = compile_text(device, with_attack(attack))
    assert isinstance(artifact, Artifact) and artifact.stragglers == 2
    # The process that starts the children is all that may be new.
    assert all("launcher.serve" in command for command in left_since(before, allowed=1))


@pytest.mark.skipif(not confinement.available()["landlock"], reason="needs Landlock")
@pytest.mark.parametrize("kind", ["read", "write", "delete"])
def test_files_of_the_machine_are_out_of_reach(device, tmp_path, kind):
    path = tmp_path / "file"
    path.write_text("kept")
    attack = {
        "read": f"open({str(path)!r}).read()",
        "write": f"open({str(path)!r}, 'w').write('gone')",
        "delete": f"import os; os.unlink({str(path)!r})",
    }[kind]
    failure = compile_text(device, with_attack(attack))
    assert isinstance(failure, Failure) and "PermissionError" in failure.error_text
    assert path.read_text() == "kept"


def test_patching_the_simulator_changes_neither_numbers_nor_latency(device, tmp_path):
    attack = """
    import time, numpy
    import accelopt_ray.nki_sim.cost as cost, accelopt_ray.nki_sim.numerics as numerics
    time.perf_counter = lambda: 0.0
    cost.predict = lambda *a, **k: None
    numerics.run_program = lambda *a, **k: None
    import accelopt_ray.devices.simulator_worker as worker
    worker.predict = worker.run_program = worker.validate = lambda *a, **k: None
    """
    honest, patched = compile_text(device, DOUBLE), compile_text(device, with_attack(attack))
    assert isinstance(honest, Artifact) and isinstance(patched, Artifact)
    np.save(tmp_path / "x.npy", np.ones((256, 512), np.float32))
    ran = device.run(patched, [tmp_path / "x.npy"], tmp_path, LIMITS)
    assert not isinstance(ran, Failure) and np.all(np.load(ran.outputs[0]) == 2)
    first, second = device.measure(honest, (), LIMITS), device.measure(patched, (), LIMITS)
    assert isinstance(first, Measurement) and isinstance(second, Measurement)
    assert second.latency_ms == first.latency_ms


def test_a_program_that_was_tampered_with_is_not_executed(device, tmp_path):
    artifact = compile_text(device, DOUBLE)
    assert isinstance(artifact, Artifact)
    np.save(tmp_path / "x.npy", np.ones((256, 512), np.float32))
    for payload in (b"", b"nonsense", artifact.payload[:-20], artifact.payload.replace(b"512", b"912", 1)):
        tampered = Artifact(artifact.device, payload, outputs=artifact.outputs)
        for answer in (
            device.measure(tampered, (), LIMITS),
            device.run(tampered, [tmp_path / "x.npy"], tmp_path, LIMITS),
        ):
            assert isinstance(answer, Failure)
            assert answer.reason != "simulator_error", answer.error_text


def test_running_is_bounded_as_well(device, tmp_path):
    artifact = compile_text(device, DOUBLE)
    assert isinstance(artifact, Artifact)
    np.save(tmp_path / "x.npy", np.ones((256, 512), np.float32))
    failure = device.run(artifact, [tmp_path / "x.npy"], tmp_path, Limits(timeout_s=0.0))
    assert isinstance(failure, Failure) and failure.outcome is EvaluationOutcome.TIMEOUT


def test_a_kernel_cannot_see_the_harness(device, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    attack = "import os; assert not any('sk-secret' in v for v in os.environ.values()); raise ValueError('clean')"
    failure = compile_text(device, with_attack(attack))
    assert isinstance(failure, Failure) and "clean" in failure.error_text


def test_writing_elsewhere_leaves_no_trace(device):
    names = {path.name for path in Path(os.getcwd()).iterdir()}
    compile_text(device, with_attack("open('verdict.json', 'w').write('correct')"))
    assert {path.name for path in Path(os.getcwd()).iterdir()} == names
