"""A sweep's folder and summary."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.file import Sweep, load_sweep
from accelopt_ray.sweep.folder import Grant, RunState, RunStatus, SweepFolder, TaskOutcome
from accelopt_ray.sweep.summary import comparison_lines, summary_lines, write_summary


def _sweep(folder: Path, **content: Any) -> Sweep:
    path = folder / "sweep.yaml"
    grid = {"preset": ["paper", "beyond"], "seed": [0, 1]}
    path.write_text(yaml.safe_dump({"name": "x", "base": {"task": "silu"}, "grid": grid, **content}), "utf-8")
    return load_sweep(path)


def _outcome(speedup: float = 2.0, **fields: Any) -> TaskOutcome:
    values: dict[str, Any] = {
        "task": "silu", "status": "completed", "reason": "", "baseline_latency_ms": 1.0,
        "best_latency_ms": 1.0 / speedup, "simulated": True, "evaluations": 7, "calls": 9, "cost_usd": 0.5,
        "tokens": 100,
    }  # fmt: skip
    return TaskOutcome(**{**values, **fields})


def test_a_folder_is_claimed_once_and_again_by_the_same_sweep(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "out")
    folder.claim(_sweep(tmp_path))
    folder.claim(_sweep(tmp_path))
    folder.claim(_sweep(tmp_path, slots=4, concurrent_runs=1, budget={"usd": 3}))
    folder.claim(_sweep(tmp_path, grid={"preset": ["paper"], "seed": [0, 1, 2]}))
    assert len(folder.known_runs()) == 5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"name": "other"}, "holds the sweep x"),
        ({"scales": {"small": {}}}, "holds the sweep x"),
        ({"base": {"task": "silu", "check": "published"}}, "with another configuration than the file has now"),
    ],
)
def test_another_sweep_is_refused(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    folder = SweepFolder(tmp_path / "out")
    folder.claim(_sweep(tmp_path))
    with pytest.raises(UserError, match=expected):
        folder.claim(_sweep(tmp_path, **change))


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="not empty and holds no sweep"):
        SweepFolder(tmp_path).claim(_sweep(tmp_path))
    with pytest.raises(UserError, match="not empty and holds no sweep"):
        SweepFolder(tmp_path / "thesis.tex").claim(_sweep(tmp_path))
    with pytest.raises(UserError, match="holds no sweep"):
        SweepFolder(tmp_path).known_runs()


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path)
    assert folder.state("a") is None
    state = RunState(
        "a", "id", RunStatus.FINISHED, 2, 3.5, "", (_outcome(), _outcome(best_latency_ms=None)), Grant(1.5, 7)
    )
    folder.write_state(state)
    assert folder.state("a") == state


def test_the_summary_accounts_for_every_run_and_says_why(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path)
    states: dict[str, RunState | None] = {
        "paper-seed0": RunState("paper-seed0", "i0", RunStatus.FINISHED, 1, 2.0, "", (_outcome(2.0),)),
        "paper-seed1": RunState(
            "paper-seed1", "i1", RunStatus.FINISHED, 1, 2.0, "", (_outcome(8.0, status="stopped", reason="no money"),)
        ),
        "beyond-seed0": RunState("beyond-seed0", "i2", RunStatus.FAILED, 3, 2.0, "the driver was lost"),
    }
    text = "\n".join(summary_lines([run.name for run in sweep.runs], states))
    for expected in (
        "the driver was lost", "silu: no money", "beyond-seed1  not begun", "4 runs: 2 finished, 1 failed, 1 not begun",
        "14 evaluations", "1.00 USD", "geometric mean 4.000x (simulated)",
    ):  # fmt: skip
        assert expected in text
    assert "preset paper: 4.000x over 2 searches (simulated)" in list(comparison_lines(sweep.runs, states))
    path = write_summary(tmp_path, sweep.runs, states)
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    assert [row["run_status"] for row in rows] == ["finished", "finished", "failed", "not begun"]
    assert [row["preset"] for row in rows] == ["paper", "paper", "beyond", "beyond"]
    assert float(rows[1]["speedup"]) == pytest.approx(8.0)
    assert rows[2]["error"] == "the driver was lost"
