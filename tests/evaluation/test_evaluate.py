"""An evaluation's stages, their order, and what the result keeps of a kernel that fails on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from accelopt_ray.devices.protocol import Artifact, Failure, KernelRequest, Limits, Measurement, RunResult, TensorSpec
from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import evaluate, fingerprint_sha256
from accelopt_ray.evaluation.records import CheckStage, EvaluationJob, EvaluationResult, TaskRef
from accelopt_ray.outcome import EvaluationOutcome, UserError
from accelopt_ray.verify.references import ReferenceCache
from nkibench.task import load_task

SHAPE = (("M", 128), ("N", 1024))
TASK = load_task("silu", dict(SHAPE))
JOB = EvaluationJob("e1", TaskRef("silu", SHAPE), TASK.baseline_source(), "sim-trn1", "published")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ReferenceCache:
    return ReferenceCache(tmp_path_factory.mktemp("cache"))


class RecordingDevice:
    """A device that computes with NumPy and notes what it is asked for; its faults are settable."""

    name, hardware, simulated = "recording", "trn1", False

    def __init__(self, predicts_latency: bool = False) -> None:
        self.predicts_latency = predicts_latency
        self.calls: list[str] = []
        self.failures: dict[str, Failure] = {}
        self.artifact = Artifact("recording", b"", outputs=(TensorSpec((128, 1, 1024)),), precision_tier="fp32")
        self.latency_ms = 1.0
        self.factor = np.float32(1)
        self.drift = np.float32(0)

    def fingerprint(self) -> Mapping[str, str]:
        return {"device": self.name}

    def compile(self, request: KernelRequest, limits: Limits) -> Artifact | Failure:
        self.calls.append("compile")
        return self.failures.get("compile", self.artifact)

    def run(self, artifact: Artifact, inputs: Sequence, folder: Path, limits: Limits) -> RunResult | Failure:
        self.calls.append("run")
        x = np.load(inputs[0])
        self.factor += self.drift
        with np.errstate(over="ignore"):
            np.save(folder / "out.npy", self.factor * x / (1 + np.exp(-x)))
        return self.failures.get("run", RunResult((folder / "out.npy",), 0.5))

    def measure(self, artifact: Artifact, inputs: Sequence, limits: Limits) -> Measurement | Failure:
        self.calls.append(f"measure with {len(inputs)} inputs")
        measured = Measurement(self.latency_ms, (self.latency_ms,), 0.0, {}, simulated=False)
        return self.failures.get("measure", measured)


def run(cache: ReferenceCache, device: RecordingDevice, **changes: object) -> EvaluationResult:
    return evaluate(replace(JOB, **changes), device, cache)


def test_a_baseline_is_correct_and_its_row_complete(cache):
    device = get_device("sim-trn1")
    result = evaluate(JOB, device, cache)
    assert result.correct and result.evaluation_id == "e1" and result.check == "published"
    assert result.simulated and result.device == "sim-trn1" and result.precision_tier == "fp32"
    assert result.latency_ms > 0 and result.latency_samples_ms == (result.latency_ms,)
    assert 0 < result.percent_of_peak <= 100
    assert result.counters["hbm_write_bytes"] == 128 * 1024 * 4
    assert [trial["seed"] for trial in result.check_details["trials"]] == [0, 21, 42, 63, 84]
    assert result.fingerprint_sha256 == fingerprint_sha256(device)
    assert evaluate(JOB, device, cache).latency_ms == result.latency_ms


def test_a_device_that_predicts_is_asked_before_anything_runs(cache):
    device = RecordingDevice(predicts_latency=True)
    assert run(cache, device, seeds=(0, 1)).correct
    assert device.calls == ["compile", "measure with 0 inputs", "run", "run"]


def test_a_device_that_measures_is_asked_after_the_first_trial_has_passed(cache):
    device = RecordingDevice()
    result = run(cache, device, seeds=(0, 1))
    assert result.correct and result.run_s == 1.0
    assert device.calls == ["compile", "run", "measure with 1 inputs", "run"]
    wrong = RecordingDevice()
    wrong.factor = np.float32(1.1)
    assert run(cache, wrong).outcome is EvaluationOutcome.INCORRECT
    assert wrong.calls == ["compile", "run"]  # no core's time for a wrong kernel


def test_the_first_finding_ends_the_evaluation_and_keeps_what_was_measured(cache):
    device = RecordingDevice(predicts_latency=True)
    device.factor = np.float32(1.001)
    result = run(cache, device)
    assert (result.outcome, result.reason) == (EvaluationOutcome.INCORRECT, "relative_l2")
    assert device.calls.count("run") == 1
    assert result.latency_ms == 1.0 and result.percent_of_peak is not None
    assert result.error_text.startswith("seed 0, ordinary inputs: output 0")


@pytest.mark.parametrize("stage", ["compile", "measure", "run"])
def test_a_failure_of_any_stage_is_the_outcome(cache, stage):
    device = RecordingDevice(predicts_latency=True)
    device.failures[stage] = Failure(EvaluationOutcome.TIMEOUT, "x" * 10_000, "slow")
    result = run(cache, device)
    assert (result.outcome, result.reason) == (EvaluationOutcome.TIMEOUT, "slow")
    assert len(result.error_text) <= 4000
    assert (result.latency_ms is None) == (stage != "run")


def test_strict_quarantines_what_the_hardware_cannot_do(cache):
    device = RecordingDevice(predicts_latency=True)
    device.latency_ms = 1e-6
    result = run(cache, device, check="strict")
    assert (result.outcome, result.reason) == (EvaluationOutcome.REJECTED, "implausible:faster_than_roofline")
    assert run(cache, device, check="published").correct


def test_strict_looks_at_what_compiling_revealed(cache):
    device = RecordingDevice(predicts_latency=True)
    device.artifact = replace(device.artifact, precision_tier="reduced")
    result = run(cache, device, check="strict")
    assert (result.outcome, result.precision_tier) == (EvaluationOutcome.PRECISION_VIOLATION, "reduced")
    assert run(cache, device, check="strict", precision="reduced").correct
    device.artifact = replace(device.artifact, precision_tier="fp32", stragglers=2)
    assert run(cache, device, check="strict").reason == "background_process"
    assert run(cache, device, check="published").correct


def test_strict_tries_secret_seeds_and_every_distribution(cache):
    result = run(cache, RecordingDevice(), check="strict")
    assert result.correct, result.error_text
    trials = result.check_details["trials"]
    assert {"ordinary", "scaled", "spikes", "outliers", "constant_rows", "small", "tiny_rows", "influence"} == {
        trial["distribution"] for trial in trials
    }
    other = ReferenceCache(cache.folder / "other")
    assert other.secret_seed(TASK, "ordinary") != cache.secret_seed(TASK, "ordinary")
    assert cache.secret_seed(TASK, "ordinary") == ReferenceCache(cache.folder).secret_seed(TASK, "ordinary")


def test_strict_runs_again_where_the_device_does_not_guarantee_the_same_result(cache):
    device = RecordingDevice()
    device.drift = np.float32(2e-7)  # within every tolerance
    assert run(cache, device, check="strict").reason == "not_repeatable"
    trusted = RecordingDevice()
    trusted.artifact = replace(trusted.artifact, repeatable=True)
    assert run(cache, trusted, check="strict").correct
    assert trusted.calls.count("run") == device.calls.count("run") - 1


def test_outputs_of_another_shape_are_incorrect(cache):
    job = replace(
        JOB, source=JOB.source.replace("(partitions, rows, columns), dtype", "(partitions, rows, 2048), dtype")
    )
    result = evaluate(job, get_device("sim-trn1"), cache)
    assert (result.outcome, result.reason) == (EvaluationOutcome.INCORRECT, "output_shape")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"task": TaskRef("sillu")}, "silu"),
        ({"task": TaskRef("silu", (("Q", 1),))}, "Q"),
        ({"check": "strickt"}, "strict"),
        ({"precision": "fp64"}, "fp32"),
    ],
)
def test_the_users_mistakes_are_told_in_one_line(cache, changes, words):
    with pytest.raises(UserError, match=words) as caught:
        run(cache, RecordingDevice(), **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("check", ["published", "strict"])
def test_a_check_in_two_stages_tries_what_a_whole_one_tries(cache: ReferenceCache, check: str):
    device = get_device("sim-trn1")
    whole = evaluate(replace(JOB, check=check), device, cache)
    first = evaluate(replace(JOB, check=check, stage=CheckStage.FIRST), device, cache)
    rest = evaluate(replace(JOB, check=check, stage=CheckStage.REST), device, cache)
    assert first.provisional
    assert first.latency_ms == whole.latency_ms
    assert (rest.outcome, rest.latency_ms) == (EvaluationOutcome.CORRECT, None)
    tried = [(trial["seed"], trial["distribution"]) for trial in whole.check_details["trials"]]
    staged = [
        (trial["seed"], trial["distribution"]) for part in (first, rest) for trial in part.check_details["trials"]
    ]
    assert staged == tried
    assert len(first.check_details["trials"]) == 1
    complete = first.completed(rest)
    assert (complete.outcome, complete.check_stage) == (whole.outcome, CheckStage.WHOLE)


def test_one_given_seed_is_the_whole_of_the_published_check(cache: ReferenceCache):
    result = evaluate(replace(JOB, seeds=(3,), stage=CheckStage.FIRST), get_device("sim-trn1"), cache)
    assert result.correct
    assert not result.provisional


def test_a_measuring_device_measures_in_the_first_stage_alone(cache: ReferenceCache):
    device = RecordingDevice()
    evaluate(replace(JOB, stage=CheckStage.FIRST), device, cache)
    assert device.calls == ["compile", "run", "measure with 1 inputs"]
    device.calls.clear()
    evaluate(replace(JOB, stage=CheckStage.REST), device, cache)
    assert device.calls == ["compile", "run", "run", "run", "run"]
