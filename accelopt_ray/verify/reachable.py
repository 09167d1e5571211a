"""What of a kernel file its entry can reach: all that loading the file runs, and the definitions referred to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Union

_Definition = Union[ast.FunctionDef, ast.AsyncFunctionDef]
Function = Union[_Definition, ast.Lambda]


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
        elif isinstance(statement, ast.If) and _asks_for_script(statement.test):
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


def arguments_of(function: Function) -> list[ast.arg]:
    """Returns a function's parameters, those that gather others last."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [argument for argument in named if argument is not None]


def _evaluated_at_load(definition: _Definition) -> list[ast.expr]:
    values = [argument.annotation for argument in arguments_of(definition)]
    values += [definition.returns, *definition.args.defaults, *definition.args.kw_defaults, *definition.decorator_list]
    return [value for value in values if value is not None]


def _asks_for_script(test: ast.expr) -> bool:
    """Recognises ``__name__ == "__main__"``, either way round."""
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return False
    sides = (test.left, test.comparators[0])
    names = [side.id for side in sides if isinstance(side, ast.Name)]
    values = [side.value for side in sides if isinstance(side, ast.Constant)]
    return names == ["__name__"] and values == ["__main__"]
