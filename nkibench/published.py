"""The published layout on disk: a folder whose ``summary.json`` lists tasks, cases and kernels, used unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nkibench.source import function_names
from nkibench.task_file import FILE_NAME, TASKS_FOLDER, TaskError, TaskFile, builtin_names, read_task_file

SUMMARY_NAME = "summary.json"
ENTRIES = ("kernel", "optimized_kernel")
DEFAULT_TOLERANCE = 2e-5


@dataclass(frozen=True)
class PublishedCase:
    """One kernel of one case of one task.

    Attributes:
        name: The task's name, with ``:case`` and ``:case:implementation`` added where that is needed to be unique.
        task: The task's name.
        values: Shape parameters.
        reference_path: Python file with the four functions.
        kernel_path: Python file with the kernel.
    """

    name: str
    task: str
    values: Mapping[str, int]
    reference_path: Path
    kernel_path: Path


def list_published(location: str | Path) -> list[PublishedCase]:
    """Lists what a suite offers, in the order of its summary.

    Args:
        location: The folder, or its ``summary.json``.

    Raises:
        TaskError: The summary is missing or malformed.
    """
    path = Path(location)
    summary_path = (path if path.name == SUMMARY_NAME else path / SUMMARY_NAME).resolve()
    cases: list[PublishedCase] = []
    for task, entry in _load_summary(summary_path).items():
        cases.extend(_cases(summary_path, task, entry))
    return cases


def find_published(location: str) -> PublishedCase:
    """Finds ``PATH#task``; a task with several cases is named ``PATH#task:case``.

    Raises:
        TaskError: There is no such suite or task.
    """
    root, _, name = location.rpartition("#")
    cases = list_published(root)
    for case in cases:
        if case.name == name:
            return case
    known = ", ".join(case.name for case in cases)
    raise TaskError(f"{root}: has no task '{name}'; it has {known or 'none'}")


def published_content(case: PublishedCase) -> TaskFile:
    """Returns what a task file would say; tolerance and roofline come from the built-in task of the same name.

    Raises:
        TaskError: The kernel file defines no entry.
    """
    functions = function_names(case.kernel_path)
    entry = next((name for name in ENTRIES if name in functions), None)
    if entry is None:
        raise TaskError(f"{case.kernel_path}: defines neither 'kernel' nor 'optimized_kernel'")
    builtin = _builtin(case)
    if builtin is not None:
        return replace(builtin, parameters=case.values, reduced={}, entry=entry)
    return TaskFile(
        title=case.task,
        description="",
        parameters=case.values,
        reduced={},
        tolerance=DEFAULT_TOLERANCE,
        strict_tolerance=DEFAULT_TOLERANCE,
        entry=entry,
        in_average=True,
        roofline=None,
        inputs=None,
        outputs=None,
    )


def _load_summary(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskError(f"{path}: file is missing") from None
    except (OSError, ValueError) as error:
        raise TaskError(f"{path}: is not readable JSON ({error})") from error
    if not isinstance(data, dict):
        raise TaskError(f"{path}: must map task names to their cases")
    return data


def _cases(summary_path: Path, task: str, entry: Any) -> list[PublishedCase]:
    cases = entry.get("cases") if isinstance(entry, dict) else None
    if not isinstance(cases, dict) or not cases:
        raise TaskError(f"{summary_path}: task '{task}' has no 'cases'")
    found = []
    for case, content in cases.items():
        where = f"{summary_path}: case '{case}' of task '{task}'"
        implementations = content.get("impls") if isinstance(content, dict) else None
        if not isinstance(implementations, list) or not implementations:
            raise TaskError(f"{where} has no 'impls'")
        values = content.get("values", {})
        if not isinstance(values, dict) or any(type(value) is not int for value in values.values()):
            raise TaskError(f"{where}: 'values' must map names to whole numbers")
        for position, implementation in enumerate(implementations):
            name = task if len(cases) == 1 else f"{task}:{case}"
            if len(implementations) > 1:
                name = f"{task}:{case}:{position}"
            files = implementation if isinstance(implementation, dict) else {}
            paths = [files.get(key) for key in ("task", "kernel")]
            if not all(isinstance(path, str) for path in paths):
                raise TaskError(f"{where}: each of 'impls' needs 'task' and 'kernel' file names")
            reference_path, kernel_path = ((summary_path.parent / str(path)).resolve() for path in paths)
            found.append(PublishedCase(name, task, dict(values), reference_path, kernel_path))
    return found


def _builtin(case: PublishedCase) -> TaskFile | None:
    """Returns the file of the built-in task of that name, if its parameters are the same."""
    if case.task not in builtin_names():
        return None
    content = read_task_file(TASKS_FOLDER / case.task / FILE_NAME)
    return content if set(content.parameters) == set(case.values) else None
