"""What a kernel's text may reach for: the language of kernels, not the machine that evaluates them.

A search selects for whatever raises its score, so a kernel that reads files, patches the simulator or draws the
benchmark's random numbers is not sloppy but an attempt on the check. The sandbox makes such attempts fruitless; this
module names them, from the syntax tree, before anything runs. Only what the entry can reach is looked at: a test at the
end of the file that draws random inputs does no harm.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from accelopt_ray.verify.libraries import HARMLESS_DUNDERS, LIBRARIES, Path, forbidden_part, is_module, own_path
from accelopt_ray.verify.reachable import Function, arguments_of, reachable

# The device provides them and they hold nothing but the language.
_KERNEL_PACKAGES = frozenset({"neuronxcc", "nki"})
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
# Attributes of values that lead to files, memory or the frames of whoever calls.
_FORBIDDEN_ATTRIBUTES = frozenset({"ctypes", "dump", "tofile"})
_FRAME_ATTRIBUTES = frozenset(
    {
        "ag_code",
        "ag_frame",
        "cr_code",
        "cr_frame",
        "f_back",
        "f_builtins",
        "f_code",
        "f_globals",
        "f_locals",
        "gi_code",
        "gi_frame",
        "tb_frame",
        "tb_next",
    }
)

_INNER_SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp,
)  # fmt: skip


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
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return None  # compiling it will say what is wrong
        reader = _Reader(_aliases(tree))
        for part in reachable(tree, entry):
            reader.visit(part)
    except _Found as found:
        return found.violation
    except (RecursionError, MemoryError):  # compiling it goes deeper
        return Violation("nested_too_deeply", "the kernel's expressions are nested too deeply to be read")
    return None


class _Found(Exception):
    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.text)
        self.violation = violation


class _Reader(ast.NodeVisitor):
    """Walks through code and raises at the first violation.

    Attributes:
        aliases: What the file's imports and plain assignments call modules and their parts, by name; a name that has
            several meanings in it is looked at in each of them.
    """

    def __init__(self, aliases: Mapping[str, Collection[Path]]) -> None:
        self.aliases = aliases
        self._scopes: list[frozenset[str]] = []  # names that the enclosing functions bind
        self._own: list[str] = []  # for each of them the name of its instance, if it is a method
        self._in_class = False

    def visit_Import(self, node: ast.Import) -> None:
        """Imports of modules."""
        for alias in node.names:
            self._inspect_import(alias.name, tuple(alias.name.split(".")), node)
            self._inspect_binding(alias.asname or alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Imports of parts of modules."""
        module = "." * node.level + (node.module or "")
        self._inspect_import(module, tuple(module.split(".")), node)
        for alias in node.names:
            path = (*module.split("."), alias.name)
            if alias.name == "*" and path[0] not in _KERNEL_PACKAGES:
                raise _found(f"forbidden_import:{module}.*", f"imports all of '{module}'", node)
            self._inspect_import(".".join(path), path, node)
            self._inspect_binding(alias.asname or alias.name, node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """A function, whose parameters and variables hide what is called alike outside."""
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """As :meth:`visit_FunctionDef`."""
        self._visit_function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """As :meth:`visit_FunctionDef`."""
        self._visit_function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """A class, whose methods may set attributes of their instance."""
        self._inspect_binding(node.name, node)
        for part in (*node.decorator_list, *node.bases, *node.keywords):
            self.visit(part)
        for statement in node.body:
            self._in_class = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        """An assignment; a module may get another name, which :func:`_aliases` knows."""
        for target in node.targets:
            self.visit(target)
        paths = self._paths(node.value)
        if paths and all(isinstance(target, ast.Name) for target in node.targets):
            self._inspect_paths(paths, node.value)
        else:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        """A call; an attribute's name has to stand in the text."""
        if isinstance(node.func, ast.Name) and node.func.id in {"getattr", "hasattr"}:
            name = node.args[1] if len(node.args) > 1 else None
            if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
                raise _found("computed_attribute", "computes the name of an attribute", node)
            attribute = ast.Attribute(value=node.args[0], attr=name.value, ctx=ast.Load())
            self.visit(ast.copy_location(attribute, node))
            for argument in (*node.args[2:], *node.keywords):
                self.visit(argument)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """An attribute of a module or of a value."""
        paths = self._paths(node)
        if paths:
            self._inspect_paths(paths, node)
            self._inspect_modules(paths, node)
        else:
            self._inspect_attribute(node.attr, node)
            self.visit(node.value)
        is_own = isinstance(node.value, ast.Name) and bool(self._own) and node.value.id == self._own[-1]
        if isinstance(node.ctx, (ast.Store, ast.Del)) and not is_own:
            name = ".".join(_dotted(node) or (node.attr,))
            raise _found(f"patches:{name}", f"assigns to '{name}'", node)

    def visit_Name(self, node: ast.Name) -> None:
        """A name that no function binds is a module's or a built-in one."""
        if isinstance(node.ctx, ast.Store):
            self._inspect_binding(node.id, node)
        if any(node.id in names for names in self._scopes):
            return
        if node.id in _FORBIDDEN_BUILTINS:
            raise _found(f"forbidden_name:{node.id}", f"uses '{node.id}'", node)
        if node.id in {"getattr", "hasattr"}:
            raise _found("computed_attribute", f"hands '{node.id}' on", node)
        if isinstance(node.ctx, ast.Load):
            self._inspect_internals(node.id, node)
            self._inspect_modules(self.aliases.get(node.id, ()), node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        """A pattern of a class, which reads attributes."""
        for name in node.kwd_attrs:
            self._inspect_attribute(name, node)
        self.generic_visit(node)

    def _visit_function(self, node: Function) -> None:
        is_method, self._in_class = self._in_class, False
        if not isinstance(node, ast.Lambda):
            self._inspect_binding(node.name, node)
            for decorator in node.decorator_list:
                self.visit(decorator)
            if node.returns is not None:
                self.visit(node.returns)
        self.visit(node.args)
        parameters, stored = [argument.arg for argument in arguments_of(node)], _stored_names(node)
        # A module that a function imports or gives another name is no less the module.
        self._scopes.append(frozenset(stored - self.aliases.keys()).union(parameters))
        self._own.append(parameters[0] if is_method and parameters and parameters[0] not in stored else "")
        for part in [node.body] if isinstance(node, ast.Lambda) else node.body:
            self.visit(part)
        self._scopes.pop()
        self._own.pop()

    def _paths(self, node: ast.expr) -> list[Path]:
        dotted = _dotted(node)
        if dotted is None or any(dotted[0] in names for names in self._scopes):
            return []
        return [(*path, *dotted[1:]) for path in self.aliases.get(dotted[0], ())]

    def _inspect_import(self, name: str, path: Path, node: ast.stmt) -> None:
        if path[0] not in LIBRARIES | _KERNEL_PACKAGES or forbidden_part(path) is not None:
            raise _found(f"forbidden_import:{name}", f"imports '{name}'", node)

    def _inspect_paths(self, paths: Collection[Path], node: ast.expr) -> None:
        for path in paths:
            for name in path[1:]:
                self._inspect_attribute(name, node)
            forbidden = forbidden_part(path)
            if forbidden is not None:
                raise _found(f"forbidden_name:{forbidden}", f"uses '{forbidden}'", node)

    def _inspect_modules(self, paths: Collection[Path], node: ast.expr) -> None:
        """A module that is handed on may be called anything."""
        for path in paths:
            if path[0] in LIBRARIES and is_module(path):
                name = ".".join(path)
                raise _found(f"hands_on:{name}", f"hands the module '{name}' on", node)

    def _inspect_attribute(self, name: str, node: ast.AST) -> None:
        self._inspect_internals(name, node)
        if name in _FRAME_ATTRIBUTES:
            raise _found(f"internals:{name}", f"reaches for '{name}'", node)
        if name in _FORBIDDEN_ATTRIBUTES:
            raise _found(f"forbidden_name:{name}", f"uses '{name}'", node)

    def _inspect_internals(self, name: str, node: ast.AST) -> None:
        if name.startswith("__") and name not in HARMLESS_DUNDERS:
            raise _found(f"internals:{name}", f"reaches for '{name}'", node)

    def _inspect_binding(self, name: str, node: ast.AST) -> None:
        if name == "__name__":
            raise _found("patches:__name__", "gives '__name__' another meaning", node)


def _found(reason: str, what: str, node: ast.AST) -> _Found:
    line = getattr(node, "lineno", 0)
    return _Found(Violation(reason, f"the kernel {what} (line {line}), which a kernel has no need to"))


def _aliases(tree: ast.Module) -> dict[str, set[Path]]:
    """Maps the names that modules and what is imported from them go by to their full names."""
    aliases: dict[str, set[Path]] = defaultdict(set)
    assignments: list[tuple[list[ast.expr], Path]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                path = tuple(alias.name.split("."))
                aliases[alias.asname or path[0]].add(path if alias.asname else path[:1])
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                aliases[alias.asname or alias.name].add((*node.module.split("."), alias.name))
        elif isinstance(node, ast.Assign):
            dotted = _dotted(node.value)
            if dotted is not None:
                assignments.append((node.targets, dotted))
    changed = True
    while changed:
        changed = False
        for targets, dotted in assignments:
            paths = {(*path, *dotted[1:]) for path in aliases.get(dotted[0], ())}
            modules = {own_path(path) for path in paths if path[0] in LIBRARIES and is_module(path)}
            for target in targets:
                if isinstance(target, ast.Name) and not modules <= aliases.get(target.id, set()):
                    aliases[target.id] |= modules
                    changed = True
    return dict(aliases)


def _dotted(node: ast.expr) -> Path | None:
    """Returns the parts of ``a.b.c``."""
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else (*before, node.attr)
    return (node.id,) if isinstance(node, ast.Name) else None


def _stored_names(function: Function) -> set[str]:
    """Names that a function's own statements assign to, without those of functions and comprehensions within."""
    stored: set[str] = set()
    elsewhere: set[str] = set()
    pending: list[ast.AST] = [function.body] if isinstance(function, ast.Lambda) else list(function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            elsewhere.update(node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stored.add(node.id)
        if not isinstance(node, _INNER_SCOPES):
            pending.extend(ast.iter_child_nodes(node))
    return stored - elsewhere
