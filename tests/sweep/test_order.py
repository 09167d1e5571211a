"""Runs that start with another's lessons begin after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from accelopt_ray.config import load_config
from accelopt_ray.sweep.file import SweepRun, load_sweep
from accelopt_ray.sweep.order import next_run

FILE = Path(__file__).parents[2] / "experiments" / "memory-transfer.yaml"


def runs(**teachers: str | None) -> list[SweepRun]:
    config = load_config(None, {"task": "silu", "output": "unset"})
    [pattern, *_] = load_sweep(FILE).runs
    changed = {
        name: config.model_copy(update={"memory_from": None if teacher is None else Path(teacher)})
        for name, teacher in teachers.items()
    }
    return [replace(pattern, name=name, config=each) for name, each in changed.items()]


def test_a_taught_run_waits_for_its_teacher():
    taught, teacher, other = runs(taught="teacher", teacher=None, other=None)
    assert next_run([taught, teacher, other], []) is teacher
    assert next_run([taught, other], [teacher]) is other
    assert next_run([taught], [teacher]) is None
    assert next_run([taught], [other]) is taught
    assert next_run([], [taught]) is None


def test_a_teacher_elsewhere_is_there_already():
    [taught] = runs(taught="/runs/of/last/week")
    assert next_run([taught], []) is taught


def test_runs_that_wait_for_one_another_are_begun_all_the_same():
    one, other = runs(one="other", other="one")
    assert next_run([one, other], []) is one


def test_the_sweep_that_measures_transfer_says_who_teaches():
    by_name = {run.name: run.config for run in load_sweep(FILE).runs}
    assert str(by_name["taught"].memory_from) in by_name
    assert by_name["untaught"].memory_from is None
    assert by_name["teacher"].task != by_name["taught"].task == by_name["untaught"].task
