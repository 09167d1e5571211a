"""The skeleton of a new task."""

from __future__ import annotations

from pathlib import Path

import pytest

from nkibench.skeleton import write_skeleton
from nkibench.task import TaskError, load_task


def test_a_skeleton_is_a_working_task(tmp_path: Path) -> None:
    folder = write_skeleton(tmp_path / "mine", "fused_gate")
    task = load_task(folder)
    task.check()
    assert folder == tmp_path / "mine" / "fused_gate"
    assert (task.name, task.title) == ("fused_gate", "fused_gate")
    assert task.counts is not None


@pytest.mark.parametrize("name", ["", "2nd", "../up", "Big", "a b", "x" * 80])
def test_names_are_checked(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskError, match="is no task name"):
        write_skeleton(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write_skeleton(tmp_path, "mine")
    with pytest.raises(TaskError, match="already exists"):
        write_skeleton(tmp_path, "mine")
    with pytest.raises(TaskError, match="built-in"):
        write_skeleton(tmp_path, "silu")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(TaskError, match="cannot be written"):
        write_skeleton(tmp_path / "file", "mine")
