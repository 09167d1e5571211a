"""Roofline formulas, hardware constants and the benchmark's average."""

from __future__ import annotations

import math

import pytest

from nkibench.hardware import HARDWARE
from nkibench.roofline import Counts, bound, geometric_mean, peak_latency_ms, percent_of_peak
from nkibench.task import list_tasks, load_task
from nkibench.task_file import shape_of

# Latencies of the published baselines on one trn1 core, in ms (AccelOpt's device profiles).
PUBLISHED_TRN1_LATENCY_MS = {
    "swiglu": 4.221777,
    "matmul_add_rmsnorm": 2.66658,
    "add_rmsnorm_matmul": 1.221911,
    "matmul": 35.199742,
    "gqa_full": 19.110503,
    "rmsnorm_matmul": 1.05576,
    "rope_single_freq_apply": 4.33301,
    "bmm": 4.610889,
    "bmm_softmax": 11.999614,
    "transpose_matmul": 9.610311,
    "lora": 30.16637,
    "adamw": 1.999829,
    "silu": 1.333232,
    "mamba": 2.888663,
}

# Vector flops, matmul flops and elements at the published shapes, worked out by hand from the sizes.
COUNTS = {
    "adamw": (7 * 10944 * 2048, 0, 5 * 10944 * 2048),
    "add_rmsnorm_matmul": (6 * 4096 * 1024, 2 * 4096 * 2048 * 1024, 18_875_392),
    "bmm": (0, 34_359_738_368, 276_824_064),
    "bmm_softmax": (1_342_177_280, 34_359_738_368, 276_824_064),
    "gqa_full": (1_342_177_280, 137_438_953_472, 25_165_824),
    "lora": (50_331_648, 533_649_686_528, 136_445_952),
    "mamba": (234_881_024, 0, 5_738_496),
    "matmul": (0, 515_396_075_520, 134_217_728),
    "matmul_add_rmsnorm": (50_331_648, 34_359_738_368, 29_362_176),
    "rmsnorm_matmul": (16_777_216, 17_179_869_184, 14_680_064),
    "rope_single_freq_apply": (100_663_296, 0, 100_663_296),
    "silu": (88_080_384, 0, 58_720_256),
    "swiglu": (62_914_560, 77_309_411_328, 17_825_792),
    "transpose_matmul": (0, 183_609_851_904, 75_628_544),
}


def test_the_benchmark_has_fourteen_tasks_and_one_extra() -> None:
    averaged = {name for name in list_tasks() if load_task(name).in_average}
    assert averaged == set(PUBLISHED_TRN1_LATENCY_MS)
    assert set(list_tasks()) - averaged == {"conv2d"}


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_counts_at_the_published_shapes(name: str) -> None:
    assert load_task(name).counts == Counts(*COUNTS[name])


@pytest.mark.parametrize("name", list_tasks())
def test_elements_are_those_of_all_inputs_and_outputs(name: str) -> None:
    task = load_task(name)
    assert task.counts is not None and task.output_shapes is not None
    inputs = sum(math.prod(spec[0]) for spec in task.input_specs() if isinstance(spec, tuple))
    outputs = sum(math.prod(shape_of(shape, task.parameters)) for shape in task.output_shapes)
    assert task.counts.elements == inputs + outputs


def test_published_latencies_give_the_published_average() -> None:
    shares = []
    for name, latency_ms in PUBLISHED_TRN1_LATENCY_MS.items():
        counts = load_task(name).counts
        assert counts is not None
        shares.append(percent_of_peak(counts, HARDWARE["trn1"], latency_ms))
    assert geometric_mean(shares) == pytest.approx(49.24, abs=0.005)


def test_hardware_constants() -> None:
    trn1, trn2 = HARDWARE["trn1"], HARDWARE["trn2"]
    assert trn1.hbm_bytes_per_s == pytest.approx(440.2e9, rel=1e-3)
    assert trn1.matmul_flops_per_s == 23.75e12
    assert trn1.vector_flops_per_s == pytest.approx(286.72e9)
    assert (trn2.hbm_bytes_per_s, trn2.matmul_flops_per_s, trn2.vector_flops_per_s) == (640e9, 19.75e12, 550e9)


@pytest.mark.parametrize(
    ("counts", "limit", "latency_ms"),
    [
        (Counts(0, 0, 410 * 2**30 / 4 / 1000), "memory", 1.0),
        (Counts(0, 23.75e12, 1), "matmul", 1000.0),
        (Counts(286.72e9, 0, 1), "vector", 1000.0),
    ],
)
def test_the_slowest_resource_sets_the_bound(counts: Counts, limit: str, latency_ms: float) -> None:
    result = bound(counts, HARDWARE["trn1"])
    assert result.limit == limit
    assert result.latency_ms == pytest.approx(latency_ms)
    assert percent_of_peak(counts, HARDWARE["trn1"], 2 * latency_ms) == pytest.approx(50.0)


def test_silu_is_bound_by_memory_on_trn1() -> None:
    counts = load_task("silu").counts
    assert counts is not None
    assert peak_latency_ms(counts, HARDWARE["trn1"]) == pytest.approx(2 * 4096 * 7168 * 4 / (410 * 2**30) * 1e3)


@pytest.mark.parametrize("latency_ms", [0.0, -1.0, math.nan, math.inf])
def test_a_latency_must_be_positive(latency_ms: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        percent_of_peak(Counts(1, 1, 1), HARDWARE["trn1"], latency_ms)


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)
    for values in ([], [1.0, 0.0], [math.nan]):
        with pytest.raises(ValueError, match="geometric mean"):
            geometric_mean(values)
