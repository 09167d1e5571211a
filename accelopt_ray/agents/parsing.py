"""From a model's reply to a kernel, or to a typed reason why it holds none.

The kernel is the last complete block that parses and defines the entry. A piece of code is never repaired, joined or
shortened: what is returned stands in the reply as it is, so an extracted kernel is one that the model wrote.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from accelopt_ray.agents.fences import blocks_last_first, first_fence_opens, text_before_fences
from accelopt_ray.outcome import StrEnum

# Models that are asked for an optimised kernel like to call it so; devices accept the name as well.
_ALSO_ACCEPTED = {"kernel": "optimized_kernel"}
_CODE_LINE = re.compile(r"^(?:import |from \w[\w.]* import |@\w|def \w|async def \w)")
_REFUSAL = re.compile(
    r"\b(?:i(?:'m| am) sorry|i apologi[sz]e|i (?:can ?not|can't|won't|will not|am unable to|'m unable to)"
    r"|(?:can ?not|can't|unable to) (?:help|assist|comply|provide|fulfil))",
    re.IGNORECASE,
)
_DIFF_LINE = re.compile(r"^(?:@@ .*@@|--- \S|\+\+\+ \S|diff --git |\*\*\* (?:Begin|Update) )", re.MULTILINE)
# Tokens of a chat template that some servers leave at a reply's end, often right behind the closing fence.
_END_TOKENS = re.compile(r"(?:<\|\w+\|>\s*)+\Z")
_MAX_JSON_DEPTH = 6
# Characters that may be parsed in looking for an unfenced kernel; a reply that needs more is not one.
_PARSE_BUDGET = 2_000_000


class NoKernelReason(StrEnum):
    """Why a reply holds no usable kernel."""

    NONE = ""
    EMPTY = "empty"
    REFUSAL = "refusal"
    TRUNCATED = "truncated"
    DIFF = "diff"
    SYNTAX_ERROR = "syntax_error"
    NO_ENTRY = "no_entry"
    NO_CODE = "no_code"


@dataclass(frozen=True)
class Extraction:
    """What a reply holds.

    Attributes:
        code: The kernel's source, ending in one newline; None if there is none.
        reason: Why there is none.
        detail: One sentence for the row's error text and for a repair request.
    """

    code: str | None
    reason: NoKernelReason = NoKernelReason.NONE
    detail: str = ""


def extract_kernel(reply_text: str, entry: str = "kernel", finish_reason: str = "") -> Extraction:
    """Finds the kernel in a model's reply.

    Args:
        reply_text: The answer, without reasoning.
        entry: Name that the kernel must define at top level; ``optimized_kernel`` is accepted for ``kernel``.
        finish_reason: Why the model stopped; after ``length`` a block without a closing fence is a torso and does not
            count, even if it parses.

    Returns:
        The kernel or the reason; never raises, whatever the reply.
    """
    text = reply_text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    text = _END_TOKENS.sub("", text)
    if not text.strip():
        return Extraction(None, NoKernelReason.EMPTY, "The reply is empty.")
    entries = (entry, _ALSO_ACCEPTED[entry]) if entry in _ALSO_ACCEPTED else (entry,)
    truncated = finish_reason == "length"
    code = _find(text, entries, truncated=truncated, json_depth=0)
    if code is not None:
        return Extraction(code)
    return _explain(text, entry, truncated=truncated)


def defines_entry(source: str, entries: Iterable[str]) -> bool:
    """Whether a source parses and binds one of the names at top level."""
    names = set(entries)
    # Most blocks do not even mention the name, and parsing is what takes time.
    if not any(name in source for name in names):
        return False
    tree, _ = _parse(source)
    return tree is not None and any(name in names for name in _bound_names(tree.body))


def _find(text: str, entries: tuple[str, ...], *, truncated: bool, json_depth: int) -> str | None:
    from_json = _from_json(text, entries, json_depth)
    if from_json is not None:
        return from_json
    for block in blocks_last_first(text):
        if block.continued or (truncated and not block.closed):
            continue
        for content in block.texts:
            if defines_entry(content, entries):
                return _tidy(content)
        nested = _from_json(block.texts[-1], entries, json_depth)
        if nested is not None:
            return nested
    if truncated or first_fence_opens(text):
        return None
    return _from_plain_text(text_before_fences(text), entries)


def _from_plain_text(text: str, entries: tuple[str, ...]) -> str | None:
    """Finds a kernel without fences: all of the text, or its longest suffix from a line that can start a module."""
    if defines_entry(text, entries):
        return _tidy(text)
    lines = text.split("\n")
    starts = [number for number, line in enumerate(lines) if _CODE_LINE.match(line)]
    affordable = _PARSE_BUDGET // max(1, len(text))
    for start in starts[:affordable]:
        if not any(name in line for line in lines[start:] for name in entries):
            return None
        code = _without_trailing_prose(lines[start:])
        if code is not None and defines_entry(code, entries):
            return _tidy(code)
    return None


def _without_trailing_prose(lines: list[str]) -> str | None:
    """Cuts off a closing remark: text from an unindented line on that is not Python, after lines that are."""
    text = "\n".join(lines)
    tree, error_line = _parse(text)
    if tree is not None:
        return text
    # An error on an indented line lies inside the kernel, and a kernel with an error must not be cut down to a valid
    # piece of itself. Prose starts a paragraph: it follows a blank line.
    if not 1 < error_line <= len(lines):
        return None
    first = error_line - 1
    while first > 0 and lines[first - 1].strip():
        first -= 1
    if not lines[first].strip() or lines[first][0].isspace():
        return None
    rest = "\n".join(lines[:first])
    return rest if _parse(rest)[0] is not None else None


def _from_json(text: str, entries: tuple[str, ...], depth: int) -> str | None:
    stripped = text.strip()
    if depth >= _MAX_JSON_DEPTH or stripped[:1] not in ("{", "[", '"'):
        return None
    try:
        # Models put raw newlines into JSON strings; strict=False reads them.
        value = json.loads(stripped, strict=False)
    except (ValueError, RecursionError):
        return None
    for string in reversed(list(_strings(value))):
        code = _find(string.replace("\r\n", "\n"), entries, truncated=False, json_depth=depth + 1)
        if code is not None:
            return code
    return None


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _explain(text: str, entry: str, *, truncated: bool) -> Extraction:
    if truncated:
        detail = f"The reply was cut off at the token limit before a complete block that defines {entry}."
        return Extraction(None, NoKernelReason.TRUNCATED, detail)
    blocks = [block for block in blocks_last_first(text) if block.closed]
    if any(block.tag in ("diff", "patch") for block in blocks) or len(_DIFF_LINE.findall(text)) >= 2:
        return Extraction(None, NoKernelReason.DIFF, "The reply is a diff; the complete kernel file is needed.")
    # Of overlapping readings of one block the shortest is the likeliest, and it comes first.
    for block in blocks:
        if not block.texts[-1].strip():
            continue
        tree, line = _parse(block.texts[-1])
        if tree is not None:
            detail = f"No code block defines a top-level function {entry}."
            return Extraction(None, NoKernelReason.NO_ENTRY, detail)
        if f"def {entry}" in block.texts[-1] or block.tag.startswith("py"):
            detail = f"The code block does not parse: line {line} is not valid Python."
            return Extraction(None, NoKernelReason.SYNTAX_ERROR, detail)
    if not blocks and _REFUSAL.search(text[:400]):
        return Extraction(None, NoKernelReason.REFUSAL, "The model declined to answer.")
    if f"def {entry}" in text:
        return Extraction(None, NoKernelReason.SYNTAX_ERROR, "The reply's code does not parse.")
    return Extraction(None, NoKernelReason.NO_CODE, "The reply holds no code block.")


def _parse(source: str) -> tuple[ast.Module | None, int]:
    """Returns the syntax tree, or None and the line of the error."""
    try:
        with warnings.catch_warnings():
            # Invalid escapes in a model's docstring are not ours to complain of.
            warnings.simplefilter("ignore")
            return ast.parse(source), 0
    except SyntaxError as error:
        return None, error.lineno or 0
    except (ValueError, RecursionError, MemoryError):
        return None, 0


def _bound_names(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield statement.name
        elif isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, (ast.If, ast.Try, ast.With)):
            yield from _bound_names(statement.body)


def _tidy(code: str) -> str:
    """Drops blank lines at both ends; the code's own first line keeps its indentation of zero."""
    lines = code.split("\n")
    while lines and not lines[0].strip():
        lines.pop(0)
    return "\n".join(lines).rstrip() + "\n"
