"""A configuration of several tasks: which, at which shapes, with which part of the budgets."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelopt_ray.cli import main
from accelopt_ray.config import RunConfig, load_config
from accelopt_ray.outcome import UserError


def config(**values: object) -> RunConfig:
    return load_config(None, {"task": "silu,mamba", "output": "x", **values})


def test_commas_separate_tasks_unless_they_are_part_of_a_folder(tmp_path: Path):
    assert config().tasks == ["silu", "mamba"]
    folder = tmp_path / "a,b"
    folder.mkdir()
    assert config(task=str(folder)).tasks == [str(folder)]
    assert config(task=f"{folder}#silu").tasks == [f"{folder}#silu"]


def test_a_shape_is_for_all_tasks_or_for_the_one_it_names():
    several = config(shape={"M": 256, "silu.M": 512, "silu.N": 2048})
    assert several.shape_of("silu") == {"M": 512, "N": 2048}
    assert several.shape_of("mamba") == {"M": 256}
    silu, _ = config(shape={"silu.M": 256}).load_tasks()
    assert silu.parameters["M"] == 256


@pytest.mark.parametrize(
    ("values", "said"),
    [({"task": "silu,silu"}, "two tasks are called 'silu'"), ({"shape": {"rope.M": 2}}, "names no task of the run")],
)
def test_a_mistake_in_the_list_is_named(values: dict[str, object], said: str):
    with pytest.raises(UserError, match=said):
        config(**values).load_tasks()


def test_budgets_are_of_the_whole_run():
    several = config(search={"max_evaluations": 101, "max_cost_usd": 3.0})
    assert several.settings_of_each(1).max_evaluations == 101
    each = several.settings_of_each(2)
    assert (each.max_evaluations, each.max_cost_usd) == (50, 1.5)
    shared = config(search={"max_evaluations": 101}, allocate="adaptive").settings_of_each(2)
    assert shared.max_evaluations is None
    moved = config(search={"max_evaluations": 101, "max_cost_usd": 3.0}, allocate="adaptive").settings_of_each(2)
    assert (moved.max_evaluations, moved.max_cost_usd) == (50, None), "the money moves, the rest is shared evenly"


def test_a_budget_that_is_not_there_cannot_be_moved(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with pytest.raises(SystemExit) as ended:
        main(["optimize", "silu", "mamba", "--allocate", "adaptive", "-o", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert "give --max-usd or --max-evaluations" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()
