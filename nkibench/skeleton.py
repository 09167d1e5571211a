"""The files of a new task: a small working example to edit."""

from __future__ import annotations

import re
from pathlib import Path

from nkibench.source import read_text
from nkibench.task_file import FILE_NAME, TaskError, builtin_names

EXAMPLE_FOLDER = Path(__file__).parent / "example_task"
_FILES = (FILE_NAME, "reference.py", "baseline.py")


def write_skeleton(parent: str | Path, name: str) -> Path:
    """Writes a working task, ``alpha * x + y``, that :func:`nkibench.task.load_task` accepts.

    Args:
        parent: Folder in which the task's folder is made; created when missing.
        name: Name of the task and of its folder.

    Returns:
        The new folder.

    Raises:
        TaskError: The name is not usable or taken, or the folder cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name):
        raise TaskError(f"'{name}' is no task name: use small letters, digits and '_', starting with a letter")
    if name in builtin_names():
        raise TaskError(f"'{name}' is the name of a built-in task; choose another")
    folder = Path(parent) / name
    if folder.exists():
        raise TaskError(f"{folder}: already exists; choose another name or remove it")
    contents = {file: read_text(EXAMPLE_FOLDER / file) for file in _FILES}
    contents[FILE_NAME] = contents[FILE_NAME].replace("title: NAME", f"title: {name}")
    try:
        folder.mkdir(parents=True)
        for file, text in contents.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise TaskError(f"{folder}: cannot be written ({error.strerror or error})") from error
    return folder
