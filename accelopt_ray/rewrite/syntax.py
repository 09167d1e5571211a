"""Kernel source as a syntax tree that prints unchanged statements exactly as they were written.

Rules edit an ordinary :mod:`ast` tree. Every statement remembers the lines it came from, and the printer copies those
lines (comments included) for each statement that no rule has touched; only changed statements are generated anew.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LINE_LENGTH = 120
_ENTRY_NAMES = ("kernel", "optimized_kernel")


class KernelSyntaxError(ValueError):
    """The text is not Python, or defines no kernel entry."""


@dataclass(frozen=True)
class Origin:
    """Where a statement came from.

    Attributes:
        leading: Comment and blank lines directly above it.
        lines: Its own lines, including a trailing comment.
        column: Indentation of its first line.
        fingerprint: Dump of the node (of the header alone for compound statements).
    """

    leading: tuple[str, ...]
    lines: tuple[str, ...]
    column: int
    fingerprint: str


def walk(root: ast.AST) -> Iterator[ast.AST]:
    """All nodes below and including ``root``, expression contexts left out; faster than :func:`ast.walk`."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        for name in node._fields:
            if name == "ctx":
                continue
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                stack.append(value)
            elif isinstance(value, list):
                stack.extend(item for item in value if isinstance(item, ast.AST))


def find_entry(tree: ast.Module) -> ast.FunctionDef | None:
    """Returns the kernel's entry function.

    A function named ``kernel`` or ``optimized_kernel`` wins; otherwise the last function with a decorator whose name
    ends in ``jit``.
    """
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for name in _ENTRY_NAMES:
        for function in functions:
            if function.name == name:
                return function
    decorated = [f for f in functions if any(_decorator_name(d).endswith("jit") for d in f.decorator_list)]
    return decorated[-1] if decorated else None


def _decorator_name(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


class SourceTree:
    """A parsed kernel file.

    Attributes:
        module: The tree; edit it in place.
        entry: The entry function inside ``module``.
    """

    def __init__(self, source: str) -> None:
        """Parses ``source``.

        Raises:
            KernelSyntaxError: The text does not parse or has no entry function.
        """
        try:
            self.module = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise KernelSyntaxError(f"the kernel does not parse: {error}") from error
        entry = find_entry(self.module)
        if entry is None:
            raise KernelSyntaxError("no function named kernel or optimized_kernel is defined")
        self.entry = entry
        self.indent = " " * max(entry.body[0].col_offset, 1)
        lines = source.splitlines()
        _attach_origins(self.module.body, lines, 0)

    def copy(self) -> SourceTree:
        """Returns an independent copy to edit."""
        twin = object.__new__(SourceTree)
        twin.module = copy.deepcopy(self.module)
        twin.indent = self.indent
        entry = find_entry(twin.module)
        assert entry is not None
        twin.entry = entry
        return twin

    def source(self) -> str:
        """Prints the module."""
        return "\n".join(_print_block(self.module.body, "", self.indent)).rstrip() + "\n"


def _attach_origins(body: list[ast.stmt], lines: list[str], previous_end: int) -> None:
    for number, statement in enumerate(body):
        first = statement.lineno
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) and statement.decorator_list:
            first = min(first, statement.decorator_list[0].lineno)
        children = _bodies(statement)
        if children:
            header_end = children[0][0].lineno - 1
            if isinstance(children[0][0], ast.FunctionDef) and children[0][0].decorator_list:
                header_end = children[0][0].decorator_list[0].lineno - 1
            while header_end > first and _is_blank(lines[header_end - 1]):
                header_end -= 1
            last = max(header_end, first)
        else:
            last = statement.end_lineno or first
        leading_start = first - 1
        while leading_start > previous_end and _is_blank(lines[leading_start - 1]):
            leading_start -= 1
        own = lines[first - 1 : last]
        following = body[number + 1].lineno if number + 1 < len(body) else 0
        shared_line = first <= previous_end or following == (statement.end_lineno or first)
        shared_line = shared_line or bool(children and children[0][0].lineno == first)
        if not shared_line and own:
            statement.origin = Origin(  # type: ignore[attr-defined]
                leading=tuple(line.strip() for line in lines[leading_start : first - 1]),
                lines=tuple(own),
                column=len(own[0]) - len(own[0].lstrip()),
                fingerprint=_known_fingerprint(statement, own),
            )
        inner_end = last
        for child in children:
            _attach_origins(child, lines, inner_end)
            inner_end = child[-1].end_lineno or inner_end
        previous_end = statement.end_lineno or last


def _is_blank(line: str) -> bool:
    stripped = line.strip()
    return not stripped or stripped.startswith("#")


def _bodies(statement: ast.stmt) -> list[list[ast.stmt]]:
    bodies: list[list[ast.stmt]] = []
    for field in ("body", "orelse", "finalbody"):
        block = getattr(statement, field, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            bodies.append(block)
    return bodies


_FINGERPRINTS: dict[str, str] = {}
_MOST_FINGERPRINTS = 20_000


def _known_fingerprint(statement: ast.stmt, lines: list[str]) -> str:
    """The fingerprint of a statement just parsed from ``lines``; most lines of a rewritten kernel have been seen."""
    key = "\n".join(line.strip() for line in lines)
    known = _FINGERPRINTS.get(key)
    if known is None:
        if len(_FINGERPRINTS) >= _MOST_FINGERPRINTS:
            _FINGERPRINTS.clear()
        known = _FINGERPRINTS[key] = _fingerprint(statement)
    return known


def _fingerprint(statement: ast.stmt) -> str:
    if isinstance(statement, ast.For):
        return f"for {ast.dump(statement.target)} in {ast.dump(statement.iter)}"
    if isinstance(statement, ast.If):
        return f"if {ast.dump(statement.test)}"
    if isinstance(statement, ast.FunctionDef):
        return f"def {statement.name} {ast.dump(statement.args)} {[ast.dump(d) for d in statement.decorator_list]}"
    return ast.dump(statement)


def _print_block(body: list[ast.stmt], indent: str, unit: str) -> Iterator[str]:
    for statement in body:
        yield from _print_statement(statement, indent, unit)


def _print_statement(statement: ast.stmt, indent: str, unit: str) -> Iterator[str]:
    origin: Origin | None = getattr(statement, "origin", None)
    if origin is not None:
        for line in origin.leading:
            yield indent + line if line else ""
    intact = origin is not None and origin.fingerprint == _fingerprint(statement)
    compound = bool(_bodies(statement))
    if intact and (not compound or isinstance(statement, (ast.For, ast.FunctionDef, ast.If))):
        assert origin is not None
        yield from _reindent(origin, indent)
    elif compound and isinstance(statement, (ast.For, ast.If, ast.FunctionDef)):
        yield from (indent + line for line in _header(statement).splitlines())
    else:
        comment = _trailing_comment(origin)
        rows = _wrapped(ast.fix_missing_locations(statement), _LINE_LENGTH - len(indent), unit)
        for number, row in enumerate(rows):
            yield indent + row + (comment if number == len(rows) - 1 else "")
        return
    if compound:
        blocks = _bodies(statement)
        for number, block in enumerate(blocks):
            if number == 1:
                yield indent + "else:"
            yield from _print_block(block, indent + unit, unit)


def _wrapped(statement: ast.stmt, width: int, unit: str) -> list[str]:
    """Source of a simple statement, its outermost call broken into one argument per line when it is too long."""
    text = ast.unparse(statement)
    call = getattr(statement, "value", None)
    if len(text) <= width or not isinstance(call, ast.Call) or not (call.args or call.keywords):
        return text.splitlines()
    inner = ast.unparse(call)
    if not text.endswith(inner):
        return text.splitlines()
    arguments = [ast.unparse(argument) for argument in call.args]
    for keyword in call.keywords:
        value = ast.unparse(keyword.value)
        arguments.append(f"{keyword.arg}={value}" if keyword.arg else f"**{value}")
    head = f"{text[: -len(inner)]}{ast.unparse(call.func)}("
    return [head, *(f"{unit}{argument}," for argument in arguments), ")"]


def _header(statement: ast.stmt) -> str:
    shell = copy.copy(statement)
    shell.body = [ast.Pass()]  # type: ignore[attr-defined]
    if hasattr(shell, "orelse"):
        shell.orelse = []
    return ast.unparse(ast.fix_missing_locations(shell)).rsplit("\n", 1)[0]


def _reindent(origin: Origin, indent: str) -> Iterator[str]:
    for number, line in enumerate(origin.lines):
        if number == 0:
            yield indent + line.strip()
            continue
        own = len(line) - len(line.lstrip())
        extra = max(own - origin.column, 0)
        yield indent + " " * extra + line.strip() if line.strip() else ""


def _trailing_comment(origin: Origin | None) -> str:
    if origin is None or not origin.lines:
        return ""
    found = re.search(r"(\s+#[^'\"]*)$", origin.lines[-1])
    return found.group(1) if found else ""


def statement(text: str) -> ast.stmt:
    """Parses one statement from generated text."""
    return ast.parse(text).body[0]


def statements(text: str) -> list[ast.stmt]:
    """Parses a block of statements from generated text."""
    return ast.parse(text).body


def expression(text: str) -> ast.expr:
    """Parses one expression from generated text."""
    return ast.parse(text, mode="eval").body


class _Renamer(ast.NodeTransformer):
    def __init__(self, mapping: dict[str, ast.expr]) -> None:
        self.mapping = mapping

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if isinstance(node.ctx, ast.Load) and node.id in self.mapping:
            return copy.deepcopy(self.mapping[node.id])
        return node


def substitute(node: ast.AST, mapping: dict[str, ast.expr]) -> ast.AST:
    """Replaces names that are read by expressions, in place; returns the node."""
    return _Renamer(mapping).visit(node)  # type: ignore[no-any-return]


def names_read(node: ast.AST) -> set[str]:
    """Names that are read (or subscripted) anywhere below ``node``."""
    return {n.id for n in walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def index_of(block: Sequence[ast.stmt], node: ast.stmt) -> int:
    """Where in a list of statements a statement stands: that very one, not an equal one."""
    return next(number for number, item in enumerate(block) if item is node)
