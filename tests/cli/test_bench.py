"""``bench``: what it prints about every baseline, as text and as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from accelopt_ray.cli import main
from nkibench.roofline import geometric_mean
from nkibench.task import load_task


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELOPT_RAY_CACHE", str(tmp_path / "cache"))


def bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Runs the command in this process; returns its exit code and standard output."""
    code = 0
    try:
        main(["bench", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, capsys.readouterr().out


def write_suite(folder: Path, baseline: str) -> Path:
    """A folder in the published layout with a small SiLU, whose reference fixes its shapes as the published ones do."""
    task = load_task("silu")
    folder.mkdir()
    reference = task.reference_path.read_text()
    fixed = reference.replace("def get_inputs(M, N):\n", "M, N = 128, 1024\n\n\ndef get_inputs():\n")
    (folder / "silu.py").write_text(fixed)
    (folder / "kernel.py").write_text(baseline)
    case = {"values": {"M": 128, "N": 1024}, "impls": [{"task": "silu.py", "kernel": "kernel.py"}]}
    (folder / "summary.json").write_text(json.dumps({"silu": {"cases": {"0": case}}}))
    return folder


def test_json_has_a_row_for_each_task_and_their_mean(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = bench(capsys, "silu", "mamba", "--reduced", "--seed", "0", "--json")
    record = json.loads(out)
    assert code == 0
    assert [row["task"] for row in record["tasks"]] == ["silu", "mamba"]
    assert (record["device"], record["check"]) == ("sim-trn1", "published")
    for row in record["tasks"]:
        assert (row["outcome"], row["simulated"], row["check"]) == ("correct", True, "published")
        assert row["latency_ms"] > 0 and 0 < row["percent_of_peak"] < 100 and row["evaluated_s"] > 0
        assert row["shape"] == dict(load_task(row["task"]).at_reduced_shape().parameters)
    shares = [row["percent_of_peak"] for row in record["tasks"]]
    assert record["geometric_mean_percent_of_peak"] == pytest.approx(geometric_mean(shares))


def test_latencies_of_devices_without_measurements_are_called_uncalibrated(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("mamba", "--reduced", "--seed", "0", "--device", "sim-trn2")
    assert bench(capsys, *arguments)[1].endswith("% (simulated, uncalibrated on sim-trn2)\n")
    (row,) = json.loads(bench(capsys, *arguments, "--json")[1])["tasks"]
    assert row["latency_kind"] == "simulated, uncalibrated"


def test_latencies_outside_the_average_are_labelled_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(capsys, "conv2d", "--reduced", "--seed", "0")[1].endswith("latencies: simulated on sim-trn1\n")


def test_the_text_says_that_latencies_are_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = bench(capsys, "silu", "--reduced", "--check", "strict")
    assert code == 0
    assert out.splitlines()[1].split()[:2] == ["silu", "correct"]
    assert "geometric mean of percent of peak" in out and "(simulated on sim-trn1)" in out


def test_a_suite_in_the_published_layout_runs_by_its_own_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = write_suite(tmp_path / "suite", load_task("silu").baseline_source())
    code, out = bench(capsys, "--suite", str(suite), "--seed", "0", "--json")
    (row,) = json.loads(out)["tasks"]
    assert (code, row["task"], row["outcome"]) == (0, "silu", "correct")
    shutil.rmtree(suite)
    wrong = load_task("silu").baseline_source().replace("scale=-1.0", "scale=-0.9")
    write_suite(tmp_path / "suite", wrong)
    code, out = bench(capsys, "--suite", str(suite), "--seed", "0")
    assert code == 1
    assert "incorrect" in out and "relative_l2: seed 0" in out
    assert "geometric mean" not in out  # a wrong kernel's latency counts for nothing
