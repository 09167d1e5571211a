"""What every device promises: one suite over the simulator and the Neuron device with each stand-in toolchain."""

from __future__ import annotations

import dataclasses
import pickle
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from contract_kernels import SHAPE, scaling
from left_processes import children, left_since
from standin_toolchain import install

from accelopt_ray.devices import confinement
from accelopt_ray.devices.protocol import (
    Artifact,
    Device,
    Failure,
    KernelRequest,
    Limits,
    Measurement,
    RunResult,
    TensorSpec,
)
from accelopt_ray.devices.registry import get_device
from accelopt_ray.outcome import EvaluationOutcome
from nkibench.hardware import HARDWARE

LIMITS = Limits(timeout_s=60.0)
TIGHT = Limits(timeout_s=4.0, memory_bytes=600 << 20)
FACTOR = 2.5


@dataclass(frozen=True)
class Subject:
    """A device under test and the language of its kernels."""

    device: Device
    generation: str

    def compile(self, attack: str = "", limits: Limits = LIMITS) -> Artifact | Failure:
        return self.compile_text(scaling(self.generation, attack), limits)

    def compile_text(self, source: str, limits: Limits = LIMITS) -> Artifact | Failure:
        return self.device.compile(KernelRequest(source, (TensorSpec(SHAPE), FACTOR)), limits)

    def carry_out(self, source: str, folder: Path, limits: Limits = LIMITS) -> RunResult | Failure:
        """Compiles and runs, wherever this device does which."""
        artifact = self.compile_text(source, limits)
        if isinstance(artifact, Failure):
            return artifact
        return self.device.run(artifact, inputs(folder), outputs_folder(folder), limits)


@pytest.fixture(params=["simulator", "standin-a", "standin-b"])
def subject(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    if request.param == "simulator":
        return Subject(get_device("sim-trn1"), "A")
    generation = request.param[-1]
    install(generation, tmp_path / "toolchain", monkeypatch)
    device = get_device("neuron")
    rule = dataclasses.replace(device.rule, warmup_runs=1, timed_runs=2)
    return Subject(dataclasses.replace(device, rule=rule), generation.upper())


def values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)


def inputs(folder: Path) -> list[Path | float]:
    np.save(folder / "x.npy", values())
    return [folder / "x.npy", FACTOR]


def outputs_folder(folder: Path) -> Path:
    (folder / "outputs").mkdir(exist_ok=True)
    return folder / "outputs"


def test_it_names_itself_and_what_its_results_depend_on(subject: Subject):
    device = subject.device
    assert isinstance(device, Device)
    assert device.hardware in HARDWARE
    assert get_device(device.name).name == device.name
    fingerprint = device.fingerprint()
    assert fingerprint == device.fingerprint() and all(
        isinstance(name, str) and isinstance(value, str) for name, value in fingerprint.items()
    )
    assert fingerprint["device"] == device.name


def test_a_kernel_is_compiled_run_and_measured(subject: Subject, tmp_path: Path):
    artifact = subject.compile()
    assert isinstance(artifact, Artifact), artifact
    assert artifact.device == subject.device.name
    ran = subject.device.run(artifact, inputs(tmp_path), outputs_folder(tmp_path), LIMITS)
    assert isinstance(ran, RunResult), ran
    assert len(ran.outputs) == 1 and ran.run_s > 0
    output = np.load(ran.outputs[0])
    assert output.dtype == np.float32 and np.array_equal(output, values() * np.float32(FACTOR))
    measured = subject.device.measure(artifact, inputs(tmp_path), LIMITS)
    assert isinstance(measured, Measurement), measured
    assert measured.simulated == subject.device.simulated
    assert measured.latency_ms == pytest.approx(np.mean(measured.latency_samples_ms)) and measured.latency_ms > 0
    assert measured.latency_spread >= 0
    assert measured.counters["hbm_read_bytes"] == measured.counters["hbm_write_bytes"] == values().nbytes


def test_only_the_outputs_stay_behind(subject: Subject, tmp_path: Path):
    ran = subject.carry_out(scaling(subject.generation), tmp_path)
    assert isinstance(ran, RunResult)
    assert sorted(outputs_folder(tmp_path).iterdir()) == sorted(ran.outputs)


def test_an_artefact_travels_between_processes(subject: Subject, tmp_path: Path):
    artifact = pickle.loads(pickle.dumps(subject.compile()))
    elsewhere = pickle.loads(pickle.dumps(subject.device))
    assert isinstance(elsewhere.run(artifact, inputs(tmp_path), outputs_folder(tmp_path), LIMITS), RunResult)


@pytest.mark.parametrize(
    "source, words",
    [("def kernel(x:\n", "SyntaxError"), ("x = 1\n", "kernel"), ("def other(x, factor): return x\n", "kernel")],
)
def test_a_file_that_is_no_kernel_fails_to_compile(subject: Subject, source: str, words: str):
    failure = subject.compile_text(source)
    assert isinstance(failure, Failure)
    assert failure.outcome is EvaluationOutcome.COMPILE_ERROR and words in failure.error_text


@pytest.mark.parametrize(
    "attack, outcome, words",
    [
        ("raise ValueError('told to')", EvaluationOutcome.COMPILE_ERROR, "told to"),
        ("undefined_name", EvaluationOutcome.COMPILE_ERROR, "undefined_name"),
        ("import os; os._exit(0)", EvaluationOutcome.CRASHED, "exit code 0"),
        ("import ctypes; ctypes.string_at(0)", EvaluationOutcome.CRASHED, "SIGSEGV"),
        ("keep = []\nwhile True: keep.append(b'x' * (1 << 24))", EvaluationOutcome.MEMORY_LIMIT, "memory"),
    ],
)
def test_a_kernels_failure_is_typed_and_says_why(
    subject: Subject, tmp_path: Path, attack: str, outcome: EvaluationOutcome, words: str
):
    failure = subject.carry_out(scaling(subject.generation, attack), tmp_path, dataclasses.replace(TIGHT, timeout_s=30))
    assert isinstance(failure, Failure), failure
    assert failure.outcome is outcome, failure.error_text
    assert words in failure.error_text and len(failure.error_text) < 5000
    # The next kernel is not affected.
    assert isinstance(subject.carry_out(scaling(subject.generation), tmp_path), RunResult)


def test_a_kernel_that_hangs_ends_at_its_deadline_with_all_it_started(subject: Subject, tmp_path: Path):
    before = children()
    attack = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(1)"
    started = time.monotonic()
    failure = subject.carry_out(scaling(subject.generation, attack), tmp_path, TIGHT)
    assert isinstance(failure, Failure) and failure.outcome is EvaluationOutcome.TIMEOUT
    assert time.monotonic() - started >= TIGHT.timeout_s
    # The process that starts the children is all that may be new.
    assert all("launcher.serve" in command for command in left_since(before, allowed=1))


def test_secrets_of_the_harness_are_not_in_the_kernels_environment(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    attack = "import os; assert not any('sk-secret' in v for v in os.environ.values()); raise ValueError('clean')"
    failure = subject.carry_out(scaling(subject.generation, attack), tmp_path)
    assert isinstance(failure, Failure) and "clean" in failure.error_text


@pytest.mark.skipif(not confinement.available()["landlock"], reason="needs Landlock")
@pytest.mark.parametrize("kind", ["read", "write", "delete"])
def test_files_of_the_machine_are_out_of_reach(subject: Subject, tmp_path: Path, kind: str):
    path = tmp_path / "file"
    path.write_text("kept")
    attack = {
        "read": f"open({str(path)!r}).read()",
        "write": f"open({str(path)!r}, 'w').write('gone')",
        "delete": f"import os; os.unlink({str(path)!r})",
    }[kind]
    failure = subject.carry_out(scaling(subject.generation, attack), tmp_path)
    assert isinstance(failure, Failure) and "PermissionError" in failure.error_text
    assert path.read_text() == "kept"


@pytest.mark.skipif(not confinement.available()["namespaces"], reason="needs user namespaces")
def test_the_network_is_out_of_reach(subject: Subject, tmp_path: Path):
    attack = """
    import socket
    listener = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(listener.getsockname(), 2)
    """
    failure = subject.carry_out(scaling(subject.generation, attack), tmp_path)
    assert isinstance(failure, Failure) and "Error" in failure.error_text
