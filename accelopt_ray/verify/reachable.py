"""What of a kernel file its entry can reach: all that loading the file runs, and the definitions referred to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TypeGuard, Union

_Definition = Union[ast.FunctionDef, ast.AsyncFunctionDef]


def reachable(tree: ast.Module, entry: str) -> Iterator[ast.AST]:
    """Yields the parts of a file that run when it is loaded or when its entry is called.

    A function that nothing refers to is not among them, except for what its definition evaluates. Where the entry is
    not among the functions of the file, all of them are.

    Args:
        tree: The file.
        entry: Name of the kernel function.
    """
    definitions: dict[str, list[_Definition]] = {}
    pending: list[ast.AST] = []
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            definitions.setdefault(statement.name, []).append(statement)
            pending.extend(_evaluated_at_load(statement))
        elif _is_main_block(statement):
            pending.extend(statement.orelse)
        else:
            pending.append(statement)
    names = [entry] if entry in definitions else list(definitions)
    for name in names:
        pending.extend(definitions.pop(name))
    while pending:
        part = pending.pop(0)
        yield part
        for node in ast.walk(part):
            if isinstance(node, ast.Name):
                pending.extend(definitions.pop(node.id, []))


def _evaluated_at_load(definition: _Definition) -> list[ast.expr]:
    arguments = definition.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    values = [argument.annotation for argument in named if argument is not None]
    values += [definition.returns, *arguments.defaults, *arguments.kw_defaults, *definition.decorator_list]
    return [value for value in values if value is not None]


def _is_main_block(statement: ast.stmt) -> TypeGuard[ast.If]:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) in {
        "__name__ == '__main__'",
        "'__main__' == __name__",
    }
