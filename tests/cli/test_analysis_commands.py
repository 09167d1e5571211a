"""``report``, ``watch``, ``compare``, ``export``, ``compact``: what they print and write; mistakes are one line."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from accelopt_ray.cli import main
from accelopt_ray.trajectory import RunLock, TrajectoryWriter
from experiments.generated_run import generate_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        generate_run(folder / f"seed-{seed}", evaluations=20, run_id=f"r{seed}", seed=seed)
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert isinstance(caught.value.code, int)
    captured = capsys.readouterr()
    return caught.value.code, captured.out, captured.err


def test_report_writes_beside_the_run_or_where_it_is_told(
    capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path
):
    copy = tmp_path / "run"
    shutil.copytree(runs / "seed-0", copy)
    code, out, err = run(capsys, "report", copy)
    assert (code, err) == (0, "")
    assert str(copy / "report.html") in out
    assert (copy / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert run(capsys, "report", runs, "-o", tmp_path / "both.html")[0] == 0
    assert "2 runs" in (tmp_path / "both.html").read_text()


def test_report_writes_single_figures(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path):
    figures = ("--figure", "best-so-far", "--figure", "spending")
    code, _, _ = run(capsys, "report", runs, *figures, "--format", "pdf", "--to", tmp_path / "figures")
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["best-so-far.pdf", "spending.pdf"]


def test_compare_makes_a_row_for_each_argument_in_each_format(capsys: pytest.CaptureFixture[str], runs: Path):
    both = (runs / "seed-0", runs / "seed-1")
    _, table, _ = run(capsys, "compare", *both)
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:4]] == ["seed-0", "seed-1"]
    assert "Simulated" in table
    rows = list(csv.DictReader(io.StringIO(run(capsys, "compare", *both, "--format", "csv")[1])))
    records = json.loads(run(capsys, "compare", *both, "--format", "json")[1])
    assert [row["group"] for row in rows] == [record["group"] for record in records] == ["seed-0", "seed-1"]
    assert float(rows[0]["speedup"]) == pytest.approx(records[0]["speedup"])
    assert records[0]["speedup_low"] is None


def test_compare_of_one_sweep_gives_intervals_over_its_seeds(capsys: pytest.CaptureFixture[str], runs: Path):
    code, table, _ = run(capsys, "compare", runs, "--reach", "1.01")
    assert code == 0
    assert "| 2     |" in table
    assert "[" in table.splitlines()[2]
    assert "evaluations to 1.01×" in table


def test_watch_shows_where_a_run_stands(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path):
    code, out, _ = run(capsys, "watch", runs / "seed-0")
    assert code == 0
    for said in ("finished", "best so far", "(simulated)", "beam", "queue", "rates", "spent", "last failures"):
        assert said in out
    generate_run(tmp_path, evaluations=20, finished=False)
    assert "stopped" in run(capsys, "watch", tmp_path)[1]


def test_export_writes_kernels_and_pairs(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path):
    code, out, _ = run(capsys, "export", runs, "--to", tmp_path / "out")
    assert code == 0
    assert "silu:" in out
    assert {path.name for path in (tmp_path / "out" / "silu").iterdir()} == {
        "kernel.py",
        "module.py",
        "provenance.json",
    }
    assert (tmp_path / "out" / "pairs.jsonl").read_text().count("\n") > 0


def test_compact_leaves_one_part_for_each_table(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path):
    shutil.copytree(runs / "seed-0", tmp_path / "run")
    assert run(capsys, "compact", tmp_path / "run")[0] == 0
    for table in (tmp_path / "run" / "trajectory").iterdir():
        if table.is_dir():
            assert len(list(table.glob("*/part-*.parquet"))) == 1


def test_compacting_a_sweep_leaves_its_running_runs_alone(
    capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path
):
    shutil.copytree(runs, tmp_path / "sweep")
    lock = RunLock(tmp_path / "sweep" / "seed-1" / "trajectory")
    lock.acquire()
    code, out, err = run(capsys, "compact", tmp_path / "sweep")
    lock.release()
    assert code == 0
    assert "seed-0" in out and "seed-1" not in out
    assert err.count("\n") == 1 and "seed-1 as it is" in err and "being written by a run that is going on" in err


def test_a_damaged_part_is_told_in_one_line_and_the_rest_is_compared(
    capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path
):
    shutil.copytree(runs / "seed-0", tmp_path / "run")
    part = max((tmp_path / "run").glob("trajectory/evaluations/*/part-*.parquet"))
    part.write_bytes(b"PAR1")
    code, out, err = run(capsys, "compare", tmp_path / "run")
    assert code == 0
    assert out.startswith("| configuration")
    assert err.startswith("accelopt-ray: warning: left out damaged part")
    assert part.name in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "absent"], "there is no folder absent"),
        (["report", "plain"], "holds no trajectory"),
        (["report", "empty"], "run fresh has no evaluation: there is nothing to report yet"),
        (["report", "empty", "--figure", "best-so-far"], "there is nothing to draw yet"),
        (["report", "{runs}", "--figure", "pie"], "there is no figure 'pie': choose among all, "),
        (["report", "{runs}", "--run-id", "r9"], "no run r9"),
        (["report", "{runs}", "-o", "no/such/folder/r.html"], "choose another file with --output"),
        (["compare", "empty"], "none of the runs has a correct kernel yet"),
        (["compare", "{runs}", "--by", "width"], "no run has a setting width"),
        (["compare", "{runs}", "--reach", "0"], "--reach is 0"),
        (["watch", "absent"], "there is no folder absent"),
        (["watch", "{runs}", "--interval", "0"], "--interval is 0"),
        (["watch", "starting", "--once"], "is starting and has no row yet"),
        (["export", "{runs}"], "--to"),
        (["export", "{runs}", "--to", "plain"], "choose a new folder with --to"),
        (["export", "empty", "--to", "new"], "there is no correct kernel to export yet"),
        (["compact", "absent"], "there is no folder absent"),
        (["compact", "plain"], "holds no trajectory"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str],
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
):
    # `watch` would look for a run of that name in whatever cluster is running on this machine.
    monkeypatch.setitem(sys.modules, "actors.watching", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").mkdir()
    (tmp_path / "starting" / "trajectory").mkdir(parents=True)
    (tmp_path / "plain" / "notes.txt").touch()
    TrajectoryWriter(tmp_path / "empty" / "trajectory", "fresh").write("runs", [{"seed": 1, "config_json": "{}"}])
    code, out, err = run(capsys, *[argument.format(runs=runs) for argument in arguments])
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("accelopt-ray: ")
