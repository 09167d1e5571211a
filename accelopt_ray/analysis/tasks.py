"""The tasks that runs were about, found again from their settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from nkibench.task import Task, TaskError, load_task


def run_task(settings: Mapping[str, object], task: str) -> Task:
    """Loads one of a run's tasks at the shape the run used.

    Args:
        settings: The run's settings, a row of ``Trajectory.settings``.
        task: The task's name.

    Raises:
        TaskError: Its files are not here, or are no longer those of that task.
    """
    locations = [location for location in _locations(settings.get("task")) if _name_in(location) == task]
    found = load_task(locations[0] if locations else task, _shape(settings, task) or None)
    if found.name != task:
        raise TaskError(f"{locations[0] if locations else task} is now the task {found.name}, not {task}")
    return found


def _locations(given: object) -> list[str]:
    """One location, or several with commas between them; a folder may have commas in its name."""
    if not isinstance(given, str):
        return []
    if Path(given.partition("#")[0]).exists():
        return [given]
    return [part.strip() for part in given.split(",") if part.strip()]


def _name_in(location: str) -> str:
    return location.rpartition("#")[2] if "#" in location else Path(location).name


def _shape(settings: Mapping[str, object], task: str) -> dict[str, int]:
    """Shape parameters of one task: ``shape.M`` is for all tasks, ``shape.silu.M`` for one, which wins."""
    values = {
        name.removeprefix("shape."): int(value)
        for name, value in settings.items()
        if name.startswith("shape.") and isinstance(value, (int, float)) and not pd.isna(value)
    }
    general = {name: value for name, value in values.items() if "." not in name}
    own = {name.partition(".")[2]: value for name, value in values.items() if name.partition(".")[0] == task}
    return {**general, **{name: value for name, value in own.items() if name}}
