"""What a kernel's text may reach for: the language of kernels, not the machine that evaluates them.

A search selects for whatever raises its score, so a kernel that reads files, patches the simulator or draws the
benchmark's random numbers is not sloppy but an attempt on the check. The sandbox makes such attempts fruitless; this
module names them, from the syntax tree, before anything runs. Only what the entry can reach is looked at: a test at the
end of the file that draws random inputs does no harm.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_ALLOWED_MODULES = frozenset(
    {
        "__future__",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "itertools",
        "math",
        "ml_dtypes",
        "neuronxcc",
        "nki",
        "numpy",
        "operator",
        "typing",
    }
)
_FORBIDDEN_BUILTINS = frozenset(
    {
        "__builtins__",
        "__import__",
        "breakpoint",
        "compile",
        "delattr",
        "eval",
        "exec",
        "exit",
        "globals",
        "input",
        "locals",
        "open",
        "quit",
        "setattr",
        "vars",
    }
)
# Parts of NumPy that draw random numbers, touch files or run foreign code.
_FORBIDDEN_NUMPY = frozenset(
    {
        "DataSource",
        "ctypeslib",
        "f2py",
        "fromfile",
        "genfromtxt",
        "lib",
        "load",
        "loadtxt",
        "memmap",
        "random",
        "save",
        "savetxt",
        "savez",
        "savez_compressed",
        "testing",
    }
)
_HARMLESS_DUNDERS = frozenset({"__name__", "__doc__"})


@dataclass(frozen=True)
class Violation:
    """Something a kernel's text may not do.

    Attributes:
        reason: Machine-readable cause, such as ``forbidden_import:os``.
        text: The same in words, with the line.
    """

    reason: str
    text: str


def find_violation(source: str, entry: str) -> Violation | None:
    """Returns the first violation in what the entry can reach, or None; text that is not Python has none.

    Args:
        source: The kernel file.
        entry: Name of the kernel function.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # compiling it will say what is wrong
    aliases = _module_aliases(tree)
    for statement in _reachable(tree, entry):
        for node in ast.walk(statement):
            violation = _inspect(node, aliases)
            if violation is not None:
                return violation
    return None


def _inspect(node: ast.AST, aliases: dict[str, str]) -> Violation | None:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return _inspect_import(node)
    if isinstance(node, ast.Name):
        if node.id in _FORBIDDEN_BUILTINS and node.id not in aliases:
            return _violation(f"forbidden_name:{node.id}", f"uses '{node.id}'", node)
        if node.id == "__name__" and isinstance(node.ctx, ast.Store):
            return _violation("patches:__name__", "assigns to '__name__'", node)
    if isinstance(node, ast.Attribute):
        return _inspect_attribute(node, aliases)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}:
        name = node.args[1] if len(node.args) > 1 else None
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
            return _violation("computed_attribute", "computes the name of an attribute", node)
        return _inspect_attribute(
            ast.copy_location(ast.Attribute(value=node.args[0], attr=name.value, ctx=ast.Load()), node), aliases
        )
    return None


def _inspect_import(node: ast.Import | ast.ImportFrom) -> Violation | None:
    if isinstance(node, ast.ImportFrom):
        names = [node.module or ""] if node.level == 0 else ["." + (node.module or "")]
        submodules = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        names = [alias.name for alias in node.names]
        submodules = names
    for name in names:
        if name.split(".")[0] not in _ALLOWED_MODULES:
            return _violation(f"forbidden_import:{name}", f"imports '{name}'", node)
    for name in submodules:
        parts = name.split(".")
        if parts[0] == "numpy" and len(parts) > 1 and parts[1] in _FORBIDDEN_NUMPY:
            return _violation(f"forbidden_import:{name}", f"imports '{name}'", node)
    return None


def _inspect_attribute(node: ast.Attribute, aliases: dict[str, str]) -> Violation | None:
    base = node.value
    module = aliases.get(base.id, "") if isinstance(base, ast.Name) else ""
    if node.attr.startswith("__") and node.attr not in _HARMLESS_DUNDERS:
        return _violation(f"internals:{node.attr}", f"reaches for '{node.attr}'", node)
    if module == "numpy" and node.attr in _FORBIDDEN_NUMPY:
        return _violation(f"forbidden_name:numpy.{node.attr}", f"uses 'numpy.{node.attr}'", node)
    if isinstance(node.ctx, (ast.Store, ast.Del)) and not (isinstance(base, ast.Name) and base.id == "self"):
        return _violation(f"patches:{ast.unparse(node)}", f"assigns to '{ast.unparse(node)}'", node)
    return None


def _violation(reason: str, what: str, node: ast.AST) -> Violation:
    return Violation(reason, f"the kernel {what} (line {getattr(node, 'lineno', 0)}), which a kernel has no need to")


def _module_aliases(tree: ast.Module) -> dict[str, str]:
    """Maps the names that modules are known by to the modules' full names."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                aliases[name] = alias.name if alias.asname else name
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            for target in node.targets:
                if isinstance(target, ast.Name):
                    aliases[target.id] = aliases[node.value.id]
    return aliases


def _reachable(tree: ast.Module, entry: str) -> Iterator[ast.stmt]:
    """Yields the statements that run when the file is loaded, and the definitions that those and the entry refer to."""
    definitions: dict[str, ast.stmt] = {}
    pending: list[ast.stmt] = []
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            definitions[statement.name] = statement
            # Decorators and defaults run when the file is loaded.
            pending.extend(ast.copy_location(ast.Expr(value=value), value) for value in _evaluated_at_load(statement))
        elif not _is_main_block(statement):
            pending.append(statement)
    if entry in definitions:
        pending.append(definitions.pop(entry))
    else:
        pending.extend(definitions.values())
        definitions = {}
    while pending:
        statement = pending.pop(0)
        yield statement
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and node.id in definitions:
                pending.append(definitions.pop(node.id))


def _evaluated_at_load(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    defaults = [value for value in (*definition.args.defaults, *definition.args.kw_defaults) if value is not None]
    return [*definition.decorator_list, *defaults]


def _is_main_block(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test) in {
        "__name__ == '__main__'",
        "'__main__' == __name__",
    }
