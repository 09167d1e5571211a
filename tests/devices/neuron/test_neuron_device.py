"""The Neuron device against a stand-in toolchain that fails in the documented ways, and measures with noise."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from contract_kernels import SHAPE, scaling
from left_processes import children, left_since
from standin_toolchain import StandinToolchain, install

from accelopt_ray.analysis import load
from accelopt_ray.devices.faults import DeviceFault
from accelopt_ray.devices.neuron.device import NeuronDevice
from accelopt_ray.devices.neuron.toolchain import Generation
from accelopt_ray.devices.protocol import (
    Artifact,
    Failure,
    KernelRequest,
    Limits,
    Measurement,
    RunResult,
    TensorSpec,
)
from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import evaluate
from accelopt_ray.evaluation.records import EvaluationJob, TaskRef
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.search.candidates import Candidate
from accelopt_ray.search.canonical import KernelSource
from accelopt_ray.search.rows import measurement_row
from accelopt_ray.trajectory import TrajectoryWriter
from accelopt_ray.verify.references import ReferenceCache
from nkibench.task import load_task

LIMITS = Limits(timeout_s=60.0)


@dataclasses.dataclass
class Bench:
    """A device on its stand-in toolchain, and a folder for tensors."""

    standin: StandinToolchain
    device: NeuronDevice
    folder: Path

    @property
    def generation(self) -> Generation:
        return self.device.toolchain.generation

    def with_rule(self, **changes: object) -> Bench:
        device = dataclasses.replace(self.device, rule=dataclasses.replace(self.device.rule, **changes))
        return dataclasses.replace(self, device=device)

    def compile(self) -> Artifact | Failure:
        request = KernelRequest(scaling(self.generation), (TensorSpec(SHAPE), 2.0))
        return self.device.compile(request, LIMITS)

    def inputs(self) -> list[Path | float]:
        np.save(self.folder / "x.npy", np.ones(SHAPE, np.float32))
        return [self.folder / "x.npy", 2.0]

    def run(self, limits: Limits = LIMITS) -> RunResult | Failure:
        artifact = self.compile()
        if isinstance(artifact, Failure):
            return artifact
        (self.folder / "outputs").mkdir(exist_ok=True)
        return self.device.run(artifact, self.inputs(), self.folder / "outputs", limits)

    def measure(self) -> Measurement | Failure:
        artifact = self.compile()
        assert isinstance(artifact, Artifact)
        return self.device.measure(artifact, self.inputs(), LIMITS)


def make_bench(generation: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    standin = install(generation, folder / "toolchain", monkeypatch)
    device = get_device("neuron")
    assert isinstance(device, NeuronDevice)
    return Bench(standin, device, folder).with_rule(warmup_runs=1, timed_runs=3)


@pytest.fixture(params=["a", "b"])
def bench(request, tmp_path, monkeypatch) -> Bench:
    return make_bench(request.param, tmp_path, monkeypatch)


@pytest.fixture
def bench_a(tmp_path, monkeypatch) -> Bench:
    return make_bench("a", tmp_path, monkeypatch)


def test_a_compiler_error_carries_the_compilers_words(bench):
    bench.standin.behave(toolchain="compile_error")
    failure = bench.run()
    assert isinstance(failure, Failure)
    assert failure.outcome is EvaluationOutcome.COMPILE_ERROR and "NCC_EVRF007" in failure.error_text


def test_what_the_compiler_printed_is_kept_with_the_evaluation(bench_a, tmp_path):
    bench_a.standin.behave(toolchain="compile_error")
    task = load_task("silu")
    reference = TaskRef("silu", tuple(task.reduced.items()))
    job = EvaluationJob("e", reference, task.baseline_source(), "neuron", "published", seeds=(0,))
    result = evaluate(job, bench_a.device, ReferenceCache(tmp_path / "cache"))
    assert result.outcome is EvaluationOutcome.COMPILE_ERROR and "NCC_EVRF007" in result.error_text
    assert result.toolchain_output.startswith("[run]\ncompiler pass 0\ncompiler pass 1\n")
    assert result.toolchain_output.endswith("compiler pass 7999")
    assert len(result.error_text) <= 4000 < len(result.toolchain_output) < 70_000
    row = measurement_row("silu", 1, Candidate("c", KernelSource.of(job.source), result), result, 1.0)
    TrajectoryWriter(tmp_path / "trajectory", "r").write("evaluations", [row])
    outputs = load(tmp_path).toolchain_outputs
    assert list(outputs["candidate_id"]) == ["c"]
    assert list(outputs["toolchain_output"]) == [result.toolchain_output]


def test_a_kernel_that_reads_out_of_bounds_fails_at_run_time(bench):
    bench.standin.behave(toolchain="out_of_bounds")
    failure = bench.run()
    assert isinstance(failure, Failure)
    assert failure.outcome is EvaluationOutcome.RUNTIME_ERROR and "NRT_EXEC_OOB" in failure.error_text


def test_a_busy_core_is_no_failure_of_the_kernel(bench):
    bench.standin.behave(toolchain="core_busy")
    with pytest.raises(DeviceFault, match=r"not available - Requested|NRT_EXEC_NC_BUSY"):
        bench.run()


@pytest.mark.parametrize(
    "behaviour, words", [("missing_field", "total_time"), ("garbage", "no JSON"), ("crash", "exit")]
)
def test_a_failing_profiler_is_no_failure_of_the_kernel(bench, behaviour, words):
    bench.standin.behave(profiler=behaviour)
    with pytest.raises(DeviceFault, match=words):
        bench.measure()


def test_a_missing_trace_is_no_failure_of_the_kernel(bench):
    bench.standin.behave(toolchain="no_trace")
    with pytest.raises(DeviceFault, match=r"profile\.ntff"):
        bench.measure()


def test_a_compiler_that_hangs_dies_with_its_children(bench_a):
    bench_a.standin.behave(toolchain="compiler_hangs")
    before = children()
    failure = bench_a.run(Limits(timeout_s=3.0))
    assert isinstance(failure, Failure) and failure.outcome is EvaluationOutcome.TIMEOUT
    assert left_since(before, "time.sleep(600)") == []


def test_rounds_are_repeated_until_one_is_quiet_and_all_samples_are_kept(bench_a):
    # Three timed runs a round: the first two rounds are noisy, the third is not.
    bench_a.standin.behave(factors=[1.0, 1.2, 1.0, 1.0, 1.05, 1.0, 1.0, 1.002, 1.0])
    measured = bench_a.measure()
    assert isinstance(measured, Measurement)
    assert measured.latency_spread == pytest.approx(0.002)
    assert bench_a.standin.profiler_calls == 9
    assert [len(samples) for samples in measured.explanation["rounds_ms"]] == [3, 3, 3]
    assert measured.explanation["kept_round"] == 2
    assert not measured.simulated and measured.confidence is None


def test_the_cap_ends_it_and_the_quietest_round_is_kept(bench_a):
    bench_a.standin.behave(factors=[1.0, 1.3, 1.0, 1.0, 1.1, 1.0])
    measured = bench_a.with_rule(max_rounds=4).measure()
    assert isinstance(measured, Measurement)
    assert measured.latency_spread == pytest.approx(0.1)
    assert bench_a.standin.profiler_calls == 12


def test_the_fingerprint_tells_toolchains_apart(bench_a, monkeypatch):
    before = bench_a.device.fingerprint()
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    assert bench_a.device.fingerprint() != before


def test_links_to_other_files_are_no_outputs(bench_a, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELOPT_RAY_NEURON_CONFINEMENT", "off")
    np.save(tmp_path / "reference.npy", np.zeros(SHAPE, np.float32))
    attack = f"""
    import builtins, os, numpy
    def forge(file, *args, **kwargs): os.symlink({str(tmp_path / "reference.npy")!r}, file)
    numpy.save = forge
    """
    artifact = bench_a.device.compile(KernelRequest(scaling("A", attack), (TensorSpec(SHAPE), 2.0)), LIMITS)
    assert isinstance(artifact, Artifact)
    (tmp_path / "outputs").mkdir()
    failure = bench_a.device.run(artifact, bench_a.inputs(), tmp_path / "outputs", LIMITS)
    assert isinstance(failure, Failure) and failure.reason == "bad_result"


def test_a_task_is_evaluated_to_the_end(bench_a, tmp_path):
    task = load_task("silu")
    job = EvaluationJob(
        "e", TaskRef("silu", tuple(task.reduced.items())), task.baseline_source(), "neuron", "published", seeds=(0, 21)
    )
    result = evaluate(job, bench_a.device, ReferenceCache(tmp_path / "cache"))
    assert result.correct, result.error_text
    assert not result.simulated and result.device == "neuron"
    assert len(result.latency_samples_ms) == 3 and result.percent_of_peak > 0
