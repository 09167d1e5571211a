"""Reading profile summaries: fixtures of the documented form, and everything a broken profiler prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelopt_ray.devices.faults import DeviceFault
from accelopt_ray.devices.neuron.summary import parse_summary

FIXTURES = Path(__file__).parent / "summaries"


def test_times_become_milliseconds_and_fields_keep_their_names_and_units():
    summary = parse_summary((FIXTURES / "matmul.json").read_text())
    assert summary.latency_ms == pytest.approx(1.89)
    assert summary.counters["psum_read_bytes"] == 8650752
    assert summary.counters["hfu_estimated_percent"] == 0.397
    assert summary.counters["total_time"] == 0.00189
    assert "instance_type" not in summary.counters


def test_fields_that_do_not_apply_stay_absent():
    summary = parse_summary((FIXTURES / "silu.json").read_text())
    assert summary.latency_ms == pytest.approx(0.042)
    assert "hardware_flops" not in summary.counters


def test_the_first_core_counts():
    assert parse_summary((FIXTURES / "two_cores.json").read_text()).counters["hbm_read_bytes"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "panic: runtime error",
        "[]",
        "{}",
        '{"n0_nc0": 3}',
        '{"n0_nc0": {}}',
        '{"n0_nc0": {"total_time": 0}}',
        '{"n0_nc0": {"total_time": "0.1"}}',
        '{"n0_nc0": {"total_time": NaN}}',
        '{"n0_nc0": {"total_time": true}}',
    ],
)
def test_anything_else_is_a_fault_of_the_device_not_of_the_kernel(text: str):
    with pytest.raises(DeviceFault):
        parse_summary(text)


def test_a_missing_total_time_is_reported_with_the_fields_that_are_there():
    content = json.loads((FIXTURES / "matmul.json").read_text())
    del content["n0_nc0"]["total_time"]
    with pytest.raises(DeviceFault, match=r"no total_time.*hbm_read_bytes"):
        parse_summary(json.dumps(content))
