"""Python files of a task, read without running them."""

from __future__ import annotations

import ast
from pathlib import Path

from nkibench.task_file import TaskError


def read_text(path: Path) -> str:
    """Returns a file's text.

    Raises:
        TaskError: It is missing or cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"{path}: file is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}: cannot be read ({error})") from error


def function_names(path: Path) -> list[str]:
    """Returns the names of the functions a Python file defines at top level, without running it.

    Raises:
        TaskError: The file is missing or is not Python.
    """
    text = read_text(path)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise TaskError(f"{path}: line {error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise TaskError(f"{path}: is not Python text ({error})") from error
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
