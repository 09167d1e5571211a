"""Code fences as models write them, which is not always as Markdown has them.

A reply's fences may be of either character and any length, nested, indented, quoted, unpaired, or share a line with
code. Rather than decide which fence closes which, this module lists every block the fences allow; whoever reads the
reply keeps those that are what it wants (for a kernel: that parse and define it), and a wrong pairing does not.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

_FENCE = re.compile(r"^(?P<prefix>[ \t>]*)(?P<mark>`{3,}|~{3,})(?P<info>.*)$")
# A first word that can only be code: fence and code share a line, and the word must not be lost as a language tag.
_CODE_START = re.compile(r"(?:import|from|def|async|class|@)\b|@\w|#")

# A line that goes on with a function's body.
_BODY_LINE = re.compile(r"(?:return|for|if|else|elif|with|while|assert)\b|[\w.]+(?:\[.*\])?\s*(?:=|\()")

# A reply with more fences than this is noise; the bound keeps the number of pairings small.
_MAX_FENCES = 400
_MAX_OPENINGS_PER_CLOSE = 16


@dataclass(frozen=True)
class Block:
    """A piece of a reply between fences.

    Attributes:
        tag: Language tag in lower case; may be empty.
        texts: The content, as it stands and with indentation or quoting removed where the fence has any; each a way to
            read the same block.
        closed: Whether a fence closes it.
        continued: Whether the code goes on behind that fence, so that the block is a torso.
        end_line: Line after its content, for ordering.
    """

    tag: str
    texts: tuple[str, ...]
    closed: bool
    continued: bool
    end_line: int


@dataclass(frozen=True)
class _Fence:
    line: int
    prefix: str
    character: str
    length: int
    info: str
    code_before: str | None = None

    def may_close(self, opening: _Fence) -> bool:
        return not self.info and self.character == opening.character and self.length >= opening.length


def blocks_last_first(text: str) -> Iterator[Block]:
    """Yields every block that a text's fences allow, by end from last to first, for one end the shortest first.

    Args:
        text: A reply with ``\\n`` line ends.
    """
    lines = text.split("\n")
    fences = list(_fences(lines))[-_MAX_FENCES:]
    openings = [fence for fence in fences if fence.code_before is None]
    # A fence that nothing closes: the block runs to the end. A reading that takes a closing fence for an opening one
    # yields the prose behind it, which is no kernel.
    for opening in reversed(openings[-_MAX_OPENINGS_PER_CLOSE:]):
        yield _block(lines, opening, len(lines), None, closed=False)
    for close in reversed(fences):
        before = [opening for opening in openings if opening.line < close.line and close.may_close(opening)]
        for opening in reversed(before[-_MAX_OPENINGS_PER_CLOSE:]):
            yield _block(lines, opening, close.line, close.code_before, closed=True)


def _goes_on(lines: list[str], close: int, prefix: str, code_before: str | None) -> bool:
    """Whether the first line of text behind a fence is one of an indented body of code."""
    following = next((line for line in lines[close + 1 :] if line.strip()), "")
    indent = len(following) - len(following.lstrip())
    if code_before is not None:
        return indent > 0
    return indent > len(prefix) and _BODY_LINE.match(following.lstrip()) is not None


def text_before_fences(text: str) -> str:
    """Returns what comes before the first fence: all of a text without fences, nothing of code that goes on behind."""
    lines = text.split("\n")
    for fence in _fences(lines):
        if _goes_on(lines, fence.line, "", fence.code_before):
            return ""
        tail = [] if fence.code_before is None else [fence.code_before]
        return "\n".join([*lines[: fence.line], *tail])
    return text


def first_fence_opens(text: str) -> bool:
    """Whether the first fence carries a language tag, so that what stands before it is not the block it closes."""
    for fence in _fences(text.split("\n")):
        return bool(fence.info)
    return False


def _fences(lines: list[str]) -> Iterator[_Fence]:
    for number, line in enumerate(lines):
        match = _FENCE.match(line)
        if match is not None:
            mark, info = match["mark"], match["info"].strip()
            if mark[0] == "`" and "`" in info:
                # Inline code that happens to start a line.
                continue
            yield _Fence(number, match["prefix"], mark[0], len(mark), info)
            continue
        # A fence that shares its line with the code before it; a pattern would backtrack for seconds on a long line.
        stripped = line.rstrip(" \t")
        code = stripped.rstrip("`")
        if len(stripped) - len(code) >= 3 and code.strip("` \t"):
            yield _Fence(number, "", "`", len(stripped) - len(code), "", code)


def _block(lines: list[str], opening: _Fence, end: int, code_before_close: str | None, *, closed: bool) -> Block:
    tag, first_code = _split_info(opening.info)
    content = lines[opening.line + 1 : end]
    if code_before_close is not None:
        content = [*content, code_before_close]
    if first_code:
        content = [opening.prefix + first_code, *content]
    variants = ["\n".join(content)]
    if opening.prefix.strip():
        quoted = re.compile(r"^[ \t]*(?:>[ \t]?)+")
        variants.append(textwrap.dedent("\n".join(quoted.sub("", line) for line in content)))
    elif opening.prefix:
        width = len(opening.prefix)
        variants.append("\n".join(line[width:] if not line[:width].strip() else line for line in content))
    variants.append(textwrap.dedent(variants[0]))
    continued = closed and _goes_on(lines, end, opening.prefix, code_before_close)
    return Block(tag.lower(), tuple(dict.fromkeys(variants)), closed, continued, end)


def _split_info(info: str) -> tuple[str, str]:
    """Splits what follows a fence's mark into a language tag and code that shares its line."""
    if _CODE_START.match(info):
        return "", info
    tag, _, rest = info.partition(" ")
    return tag, rest.strip() if _CODE_START.match(rest.strip()) else ""
