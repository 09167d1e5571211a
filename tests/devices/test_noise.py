"""The rules that tell gain from noise: laws over arbitrary samples, and a simulator that measures with noise."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from contract_kernels import SHAPE, scaling
from hypothesis import given
from hypothesis import strategies as st

from accelopt_ray.devices.noise import (
    NOISE_RULES,
    Comparison,
    NoiseRule,
    compare_interleaved,
    measure_rounds,
    spread,
)
from accelopt_ray.devices.noisy import Noise, NoisyDevice
from accelopt_ray.devices.protocol import Artifact, KernelRequest, Limits, Measurement, TensorSpec
from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import evaluate
from accelopt_ray.evaluation.records import CheckStage, EvaluationJob, TaskRef
from accelopt_ray.evaluation.remeasure import PROMOTION_MARGIN, remeasure
from accelopt_ray.outcome import UserError
from accelopt_ray.verify.references import ReferenceCache
from nkibench.task import load_task

LATENCIES = st.floats(0.001, 1000.0)
ROUNDS = st.lists(st.lists(LATENCIES, min_size=2, max_size=5), min_size=10, max_size=10)


def test_the_rules_are_the_published_ones():
    assert NOISE_RULES["trn1"] == NoiseRule(0.01, max_rounds=10, warmup_runs=2, timed_runs=10)
    assert NOISE_RULES["trn2"] == NoiseRule(0.04, max_rounds=10, warmup_runs=2, timed_runs=10)


@given(ROUNDS, st.floats(0.0, 2.0))
def test_rounds_end_with_the_first_quiet_one_or_keep_the_quietest(rounds, threshold):
    taken = iter(rounds)
    found = measure_rounds(lambda: next(taken), NoiseRule(threshold))
    spreads = [spread(samples) for samples in rounds]
    quiet = [index for index, value in enumerate(spreads) if value <= threshold]
    assert len(found.samples_ms) == (quiet[0] + 1 if quiet else 10)
    assert found.spread == min(spreads[: len(found.samples_ms)])
    assert min(found.kept_ms) <= found.latency_ms * (1 + 1e-12)
    assert found.latency_ms <= max(found.kept_ms) * (1 + 1e-12)


@given(st.lists(LATENCIES, min_size=1, max_size=20), st.floats(0.01, 100.0))
def test_the_spread_is_relative(samples, scale):
    assert spread([sample * scale for sample in samples]) == pytest.approx(spread(samples), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("samples", [[0.0, 1.0], [-1.0, 1.0], [float("nan")], [float("inf")]])
def test_impossible_samples_are_never_quiet(samples):
    assert spread(samples) == float("inf")


@given(st.lists(st.tuples(LATENCIES, LATENCIES), min_size=2, max_size=6), st.floats(0.0, 0.5), st.floats(0.0, 0.5))
def test_a_larger_margin_never_promotes_more(turns, margin, more):
    comparison = Comparison(tuple(turn[0] for turn in turns), tuple(turn[1] for turn in turns))
    assert comparison.promotes(margin) or not comparison.promotes(margin + more)


def test_turns_alternate():
    order = []

    def measure(name: str, value: float):
        order.append(name)
        return value

    comparison = compare_interleaved(lambda: measure("A", 2.0), lambda: measure("B", 1.0), 3)
    assert order == ["A", "B"] * 3
    assert comparison.speedup == 2.0 and comparison.noise == 0.0


def test_drift_meets_both_kernels_alike():
    clock = iter(range(100))
    same = compare_interleaved(lambda: 1 + 0.1 * next(clock), lambda: 1 + 0.1 * next(clock), 4)
    assert not same.promotes(0.0)


# ----- the simulator with noise ------------------------------------------------------------------------------------


def artifact(device: NoisyDevice) -> Artifact:
    made = device.compile(KernelRequest(scaling("A"), (TensorSpec(SHAPE), 2.0)), Limits())
    assert isinstance(made, Artifact)
    return made


def measured(device: NoisyDevice) -> Measurement:
    found = device.measure(artifact(device), (), Limits())
    assert isinstance(found, Measurement)
    return found


def noisy(**noise: object) -> NoisyDevice:
    device = get_device("sim-trn1?" + "&".join(f"{name}={value}" for name, value in noise.items()))
    assert isinstance(device, NoisyDevice)
    return device


def test_without_noise_the_prediction_is_measured_in_one_round():
    plain = get_device("sim-trn1").measure(artifact(noisy()), (), Limits())
    found = measured(noisy())
    assert found.latency_ms == pytest.approx(plain.latency_ms) and found.latency_spread == pytest.approx(0)
    assert len(found.latency_samples_ms) == 10 and len(found.explanation["rounds_ms"]) == 1
    assert found.simulated and found.confidence is None


def test_noise_is_repeated_until_quiet_and_follows_from_its_seed():
    quiet, loud = measured(noisy(relative=0.002, seed=1)), measured(noisy(relative=0.05, seed=1))
    assert quiet.latency_spread <= 0.01
    assert loud.latency_spread > 0.01 and len(loud.explanation["rounds_ms"]) == 10
    assert measured(noisy(relative=0.05, seed=1)) == loud
    assert measured(noisy(relative=0.05, seed=2)) != loud


def test_a_slow_core_is_slow_for_every_kernel(monkeypatch):
    fast = measured(noisy(slow_core=3, slow_factor=1.5))
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "3")
    slow = measured(noisy(slow_core=3, slow_factor=1.5))
    assert slow.latency_ms == pytest.approx(1.5 * fast.latency_ms)


def test_noise_belongs_to_what_a_result_depends_on():
    assert noisy(seed=1).fingerprint() != noisy(seed=2).fingerprint()


@pytest.mark.parametrize("options", ["loudness=1", "relative=much"])
def test_unknown_noise_is_the_users_mistake(options):
    with pytest.raises(UserError, match="noise"):
        Noise.parse(options)


@pytest.fixture
def x(tmp_path: Path) -> list[Path | float]:
    np.save(tmp_path / "x.npy", np.ones(SHAPE, np.float32))
    return [tmp_path / "x.npy", 2.0]


def test_a_kernel_is_not_promoted_over_itself_however_noisy_and_drifting_the_core(x):
    promoted = 0
    for seed in range(20):
        device = dataclasses.replace(noisy(relative=0.02, drift_per_run=1e-4, seed=seed), rule=NoiseRule(0.01, 2))
        kernel = artifact(device)
        found = remeasure(device, kernel, kernel, x, Limits())
        assert isinstance(found, Comparison) and len(found.child_ms) == 3
        promoted += found.promotes(PROMOTION_MARGIN)
    assert promoted == 0


def test_a_gain_well_above_the_noise_is_promoted(x):
    # The second kernel's latencies as if it were a tenth faster: the noise of both stays.
    device = noisy(relative=0.01, drift_per_run=1e-4, seed=4)
    found = remeasure(device, artifact(device), artifact(device), x, Limits())
    assert isinstance(found, Comparison)
    assert dataclasses.replace(found, child_ms=tuple(np.array(found.child_ms) / 1.1)).promotes(PROMOTION_MARGIN)


@pytest.mark.parametrize("relative", [0.0, 0.02])
def test_a_candidate_that_is_no_faster_than_its_parent_gets_its_parents_latency(relative: float, tmp_path: Path):
    task = load_task("silu")
    first = EvaluationJob(
        "e",
        TaskRef("silu", tuple(task.reduced.items())),
        task.baseline_source(),
        "sim-trn1",
        "published",
        seeds=(0, 21),
        stage=CheckStage.FIRST,
    )
    device, references = noisy(relative=relative, seed=5), ReferenceCache(tmp_path)
    lucky = dataclasses.replace(evaluate(first, device, references), latency_ms=1e-6, percent_of_peak=90.0)
    rest = evaluate(dataclasses.replace(first, stage=CheckStage.REST, parent_source=first.source), device, references)
    assert lucky.provisional and rest.correct, rest.error_text
    turns = rest.check_details["turns"]
    assert not turns["promoted"] and len(turns["parent_ms"]) == len(turns["child_ms"]) == 3
    settled = lucky.completed(rest)
    assert settled.correct and settled.latency_ms == turns["parent_latency_ms"]
    assert settled.percent_of_peak == pytest.approx(90.0 * 1e-6 / settled.latency_ms)


def test_a_predicting_device_takes_no_turns(tmp_path: Path):
    task = load_task("silu")
    job = EvaluationJob(
        "e",
        TaskRef("silu", tuple(task.reduced.items())),
        task.baseline_source(),
        "sim-trn1",
        "published",
        seeds=(0, 21),
        stage=CheckStage.REST,
        parent_source=task.baseline_source(),
    )
    assert "turns" not in evaluate(job, get_device("sim-trn1"), ReferenceCache(tmp_path)).check_details
