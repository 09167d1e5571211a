"""``profile``: what one kernel does on the simulator, why, and its schedule as a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accelopt_ray.cli import main
from nkibench.task import load_task

SHAPE = ["--shape", "M=256", "--shape", "N=2048"]


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.py"
    path.write_text(load_task("silu").baseline_source())
    return path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_json_holds_outcome_latency_and_counters(baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", str(baseline), "--task", "silu", *SHAPE, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["outcome"] == "correct"
    assert record["simulated"] is True
    assert record["latency_ms"] > 0
    assert record["counters"]["hbm_read_bytes"] == 256 * 2048 * 4


def test_explanation_names_bottleneck_source_lines_and_traffic(
    baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("profile", str(baseline), "--task", "silu", *SHAPE, "--explain") == 0
    text = capsys.readouterr().out
    assert "bottleneck" in text
    assert "reciprocal" in text.split("critical path")[1]
    assert "nisa.reciprocal(data=denominator)" in text
    traffic = text.split("HBM traffic")[1]
    assert traffic.index("x ") < traffic.index("SBUF")
    assert all("simulated" in line for line in text.splitlines() if line.startswith(("latency", "percent", "SBUF")))


def test_trace_file_has_a_track_for_each_engine(
    baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = tmp_path / "schedule.json"
    assert run("profile", str(baseline), "--task", "silu", *SHAPE, "--trace", str(schedule)) == 0
    content = json.loads(schedule.read_text())
    assert content["otherData"]["simulated"] is True
    tracks = {event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"}
    assert {"vector", "scalar", "dma"} <= tracks
    assert any(event["ph"] == "X" and event["dur"] > 0 for event in content["traceEvents"])


def test_trace_of_a_kernel_that_does_not_compile_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text("import neuronxcc.nki as nki\n\n@nki.jit\ndef kernel(x):\n    return x.nothing\n")
    schedule = tmp_path / "schedule.json"
    assert run("profile", str(kernel), "--task", "silu", *SHAPE, "--trace", str(schedule)) == 2
    assert "mend it first" in capsys.readouterr().err
    assert not schedule.exists()
