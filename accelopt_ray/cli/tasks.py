"""What commands share: a task from what the user typed, or one line that says what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from nkibench.task import Task


def parse_shape(pairs: Sequence[str]) -> dict[str, int]:
    """Reads ``NAME=VALUE`` options.

    Raises:
        UserError: One of them is something else.
    """
    shape = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if not name or not value.isdecimal() or int(value) < 1:
            raise UserError(f"--shape {pair!r} is not NAME=VALUE with a positive whole number, for instance M=256")
        shape[name] = int(value)
    return shape


def usable_task(location: str, shape: dict[str, int]) -> Task:
    """Loads a task and runs its reference once at the reduced shape.

    Raises:
        UserError: There is no such task, or one of its files is missing or broken.
    """
    from nkibench.task import TaskError, load_task

    try:
        task = load_task(location, shape)
        task.check()
    except TaskError as error:
        raise UserError(str(error)) from None
    return task


def kernel_text(path: Path, entries: Sequence[str]) -> str:
    """Reads a kernel file.

    Raises:
        UserError: It is missing, is not Python, or defines none of the entries.
    """
    import ast

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read the kernel {path}: {reason}") from None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        line = f" line {error.lineno}:" if isinstance(error, SyntaxError) else ""
        raise UserError(f"{path}:{line} is not Python ({getattr(error, 'msg', error)}): mend the kernel file") from None
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if not defined & set(entries):
        found = ", ".join(sorted(defined)) or "no function"
        raise UserError(f"{path} defines {found} and not the entry {entries[0]!r}: rename the kernel function")
    return text


def task_around(reference: Path, kernel: Path, folder: Path) -> str:
    """Makes a task of a reference file and a kernel, in the published layout.

    Args:
        reference: Python file with the four functions of a task.
        kernel: Kernel file.
        folder: Where the summary is written; it must outlive the task.

    Returns:
        The task's location.

    Raises:
        UserError: There is no reference file.
    """
    if not reference.is_file():
        raise UserError(f"there is no reference file {reference}: name a Python file with get_inputs and forward")
    name = reference.stem
    files = {"task": str(reference.resolve()), "kernel": str(kernel.resolve())}
    (folder / "summary.json").write_text(json.dumps({name: {"cases": {"only": {"values": {}, "impls": [files]}}}}))
    return f"{folder}#{name}"
