"""Carrying lessons from one run to another: what a run had learnt at its end, as a small file beside the next one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelopt_ray.outcome import UserError
from accelopt_ray.search.memory import ExperienceItem, ExperienceKind, RewritePair
from accelopt_ray.trajectory.reader import read_table

LESSONS_NAME = "lessons.json"
"""In the folder of the run that starts with them, so that it can be resumed when the other one is gone."""


@dataclass(frozen=True)
class Lesson:
    """A lesson as it travels: kernels stay behind.

    Attributes:
        kind: ``positive`` or ``negative``.
        speedup: Of the pair it was drawn from.
        title: Its title.
        text: Its text.
        origin: Run and item.
    """

    kind: str
    speedup: float
    title: str
    text: str
    origin: str

    def item(self) -> ExperienceItem:
        """The same as an experience item; its id is given by the search that takes it in."""
        pair = RewritePair(ExperienceKind(self.kind), "", "", "", "", self.speedup, "")
        return ExperienceItem("", 0, pair, self.title, self.text, "", self.origin)


def final_lessons(run: Path) -> list[Lesson]:
    """Reads what a run's memories held at its end, all its tasks together, greatest speed-up first.

    Raises:
        UserError: The folder holds no trajectory, or the run has learnt nothing.
    """
    columns = ["run_id", "item_id", "kind", "speedup", "title", "summary_text", "evicted_iteration"]
    rows = read_table(run, "memory_items", columns=columns).to_pylist()
    left = {(row["run_id"], row["item_id"]) for row in rows if row["evicted_iteration"] is not None}
    lessons = {
        (row["run_id"], row["item_id"]): Lesson(
            row["kind"], row["speedup"], row["title"], row["summary_text"], f"{row['run_id']}/{row['item_id']}"
        )
        for row in rows
        if row["summary_text"] and (row["run_id"], row["item_id"]) not in left
    }
    if not lessons:
        raise UserError(
            f"{run} has no lessons to pass on: it kept no memory, or no kernel was enough faster or slower to teach one"
        )
    return sorted(lessons.values(), key=lambda lesson: (-lesson.speedup, lesson.origin))


def write_lessons(folder: Path, lessons: Sequence[Lesson]) -> None:
    """Writes lessons into the folder of the run that starts with them."""
    content = json.dumps([vars(lesson) for lesson in lessons], indent=1)
    (folder / LESSONS_NAME).write_text(content, encoding="utf-8")


def bring_lessons(folder: Path, teacher: Path) -> None:
    """Writes the last lessons of another run into the folder of the run that starts with them, unless they are there.

    Args:
        folder: Of the run that starts.
        teacher: Of the other run; a relative path starts where ``folder`` lies.

    Raises:
        UserError: The other folder holds no trajectory, or that run has learnt nothing.
    """
    if not (folder / LESSONS_NAME).is_file():
        write_lessons(folder, final_lessons(folder.parent / teacher))


def read_lessons(folder: Path) -> list[ExperienceItem]:
    """Reads the lessons that a run starts with; none if there is no such file.

    Raises:
        UserError: The file is not what :func:`write_lessons` writes.
    """
    path = folder / LESSONS_NAME
    if not path.is_file():
        return []
    try:
        return [Lesson(**content).item() for content in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} holds no lessons ({error}): remove it, or give the run again") from None
