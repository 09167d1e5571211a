"""What a run cost and what its models are sent, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from accelopt_ray.analysis import load
from accelopt_ray.analysis.spending import price_of_speedup, spending
from accelopt_ray.cli import main
from accelopt_ray.trajectory import TrajectoryWriter
from experiments.generated_run import generate_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cost") / "run"
    generate_run(path, evaluations=60)
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_every_view_adds_up_to_the_calls_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]):
    answer = json.loads(said(capsys, "cost", str(folder), "--json"))
    calls = load(folder).llm_calls
    total = answer["total"]
    assert total["calls"] == len(calls)
    assert total["cost_usd"] == pytest.approx(calls["cost_usd"].sum())
    for view in ("role_and_model", "iteration", "model"):
        for column in ("calls", "prompt_tokens", "completion_tokens", "cost_usd"):
            assert sum(row[column] for row in answer[view]) == pytest.approx(total[column])
    [search] = answer["searches"]
    points = (search["speedup"] - 1) * 100
    assert search["usd_per_point"] == pytest.approx(total["cost_usd"] / points)


def test_the_printed_report_names_roles_iterations_and_the_price_of_speed(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    text = said(capsys, "cost", str(folder))
    for words in ("by role and model", "planner", "executor", "by iteration", "usd_per_point"):
        assert words in text


def test_calls_without_price_or_usage_and_lost_ones_are_counted_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    common = {"task": "silu", "iteration": 1, "role": "planner", "model": "m", "cost_usd": 0.0, "asking": 0}
    TrajectoryWriter(tmp_path / "trajectory", "run").write(
        "llm_calls",
        [
            {**common, "call_id": "a", "outcome": "ok", "price_known": False, "usage_estimated": True},
            {**common, "call_id": "b", "outcome": "lost", "price_known": True, "usage_estimated": True},
        ],
    )
    text = said(capsys, "cost", str(tmp_path))
    assert "1 calls have no known price" in text
    assert "2 calls came without usage" in text
    assert "1 calls were in flight at a kill" in text


def test_without_a_gain_there_is_no_price_of_it():
    frame = pd.DataFrame(
        {"run_id": ["a", "b"], "task": "t", "speedup": [1.0, 1.5], "simulated": True, "cost_usd": [2.0, 2.0]}
    )
    prices = price_of_speedup(frame)["usd_per_point"]
    assert pd.isna(prices[0])
    assert prices[1] == pytest.approx(0.04)


def test_totals_of_no_calls_at_all_are_no_rows(folder: Path):
    assert spending(load(folder).llm_calls.iloc[:0], ("role",)).empty


def test_prompts_show_prints_what_the_search_would_send(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ("--task", "silu", "--shape", "M=128", "--shape", "N=1024")
    planner = said(capsys, "prompts", "show", "planner", *arguments)
    assert "--- system (sha256" in planner
    assert "latency: " in planner
    assert "def forward" in planner
    assert "def kernel" in planner
    plan = tmp_path / "plan.txt"
    plan.write_text("Use one activation instead of four instructions.")
    for role in ("executor", "fixer"):
        shown = said(capsys, "prompts", "show", role, *arguments, "--plan", str(plan))
        assert "Use one activation instead of four instructions." in shown
    assert "holds no code block" in shown
    assert said(capsys, "prompts", "show", "summarizer", *arguments)


def test_the_published_preset_tells_the_planner_neither_peak_nor_bottleneck(capsys: pytest.CaptureFixture[str]):
    arguments = ("prompts", "show", "planner", "--task", "silu", "--shape", "M=128", "--shape", "N=1024", "--preset")
    assert len(said(capsys, *arguments, "published")) < len(said(capsys, *arguments, "beyond"))


def test_prompts_of_ones_own_replace_the_packages(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "planner.system.j2").write_text("You are a plumber.\n")
    shown = said(capsys, "prompts", "show", "planner", "--task", "silu", "--shape", "M=128", "--prompts", str(tmp_path))
    assert "You are a plumber." in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prompts", "show", "critic", "--task", "silu"], "there is no role 'critic'"),
        (["prompts", "show", "planner", "--task", "absent"], "absent"),
        (["prompts", "show", "planner", "--task", "silu", "--prompts", "absent"], "there is no prompt folder"),
        (["prompts", "show", "executor", "--task", "silu", "--plan", "absent"], "cannot read the plan absent"),
        (["cost", "absent"], "there is no folder absent"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
