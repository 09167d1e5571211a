"""When two kernel sources are the same kernel.

Two sources are the same when their syntax trees agree after comments, docstrings, other bare literals, formatting and
the names of local variables are taken away. Models repeat themselves in exactly those ways. The comparison errs on the
side of "different": a missed duplicate costs one evaluation, a false one would lose a kernel.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Union

_Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]


@dataclass(frozen=True)
class KernelSource:
    """A kernel's text and its two names by content.

    Attributes:
        text: Python source.
        sha256: Hash of the text, the key of the ``sources`` table.
        canonical_sha256: Hash of the canonical form; equal for the same kernel in other words.
    """

    text: str
    sha256: str
    canonical_sha256: str

    @classmethod
    def of(cls, text: str) -> KernelSource:
        """Hashes a source text."""
        return cls(text, _sha256(text), canonical_sha256(text))


def canonical_sha256(source: str) -> str:
    """Returns the hash of a source's canonical form.

    A text that Python cannot parse has no canonical form; it is only the same as itself.
    """
    try:
        tree = ast.parse(source)
        form = _dump(_Canonicalizer().visit(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        form = f"text:{source}"
    return _sha256(form)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


class _Canonicalizer(ast.NodeTransformer):
    """Drops bare literals and renames what each outermost function binds by order of appearance."""

    _inside_function = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Pass(self, node: ast.Pass) -> None:
        """A ``pass`` says as little as a docstring; an emptied body and one with ``pass`` agree."""

    def _function(self, node: _Function) -> ast.AST:
        # The outermost function's renaming covers the functions inside it; done again, it would forget what the
        # outer one keeps.
        if self._inside_function:
            return self.generic_visit(node)
        _rename_locals(node)
        self._inside_function = True
        try:
            return self.generic_visit(node)
        finally:
            self._inside_function = False


def _rename_locals(function: _Function) -> None:
    bound: set[str] = set()
    # Names that also stand in the tree as plain text must keep their spelling, or a renaming could swap arguments.
    kept: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, (ast.Store, ast.Del)):
                bound.add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif not isinstance(node, (ast.Attribute, ast.Constant)):
            kept.update(_plain_names(node))
    # The published check looks for this word in the text, so here a name decides the outcome.
    kept.update(name for name in bound if "float16" in name.lower())
    names: dict[str, str] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id in bound and node.id not in kept:
            node.id = _local(names, node.id)
        elif isinstance(node, ast.arg) and node.arg not in kept:
            node.arg = _local(names, node.arg)


def _plain_names(node: ast.AST) -> Iterator[str]:
    """Yields the names that a node holds as text: keywords, imports, nested functions, ``global`` and patterns."""
    for _, value in ast.iter_fields(node):
        for text in value if isinstance(value, list) else (value,):
            if isinstance(text, str):
                yield text.split(".")[0]


def _local(names: dict[str, str], name: str) -> str:
    # "%" cannot stand in an identifier, so no global name can be mistaken for a renamed local.
    return names.setdefault(name, f"%{len(names)}")


def _dump(node: object) -> str:
    """Writes a tree out the same way on every Python version, unlike :func:`ast.dump`."""
    if isinstance(node, ast.AST):
        fields = (
            f"{name}={_dump(value)}"
            for name, value in ast.iter_fields(node)
            if value is not None and value != [] and name not in ("ctx", "type_comment", "kind")
        )
        # A literal None is a field whose value is None; it must not look like an absent one.
        if isinstance(node, ast.Constant) and node.value is None:
            return "Constant(value=None)"
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(_dump(item) for item in node)}]"
    return f"{type(node).__name__}:{node!r}"
