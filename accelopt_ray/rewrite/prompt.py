"""What the rewriter reads from a prompt, as a model would: its role, kernels, plan, profile and experience.

Nothing depends on a template's wording. Kernels are code blocks that parse and define an entry; counters are
``name: value`` pairs or JSON; the role is the word the system message opens with.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from accelopt_ray.agents.fences import blocks_last_first
from accelopt_ray.outcome import StrEnum
from accelopt_ray.rewrite.syntax import find_entry


class Role(StrEnum):
    """What is asked for."""

    PLANNER = "planner"
    EXECUTOR = "executor"
    SUMMARIZER = "summarizer"
    FIXER = "fixer"


@dataclass(frozen=True)
class Experience:
    """One experience item of a planner's prompt.

    Attributes:
        title: Its heading.
        text: Heading and body.
        speedup: Slow over fast latency, 1 if the prompt does not say.
        warns: Whether it tells what to avoid or undo.
    """

    title: str
    text: str
    speedup: float
    warns: bool


@dataclass(frozen=True)
class Request:
    """A prompt as the rewriter understands it.

    Attributes:
        role: What is asked for.
        kernels: Sources of all kernels in the user message, in order.
        counters: Profile counters by name.
        experiences: Experience items of the system message.
        plan: Text that may hold a plan: the user message without its kernels.
        speedup: The ratio a summariser is told, or None.
        tried: Tags of this rewriter's plans that the prompt lists as tried already.
    """

    role: Role
    kernels: tuple[str, ...]
    counters: Mapping[str, float]
    experiences: tuple[Experience, ...]
    plan: str
    speedup: float | None
    tried: frozenset[str] = frozenset()


_COUNTER = re.compile(
    r"[\"'`*\-\s]*\b([a-z][a-z0-9_]{3,})\b[\"'`*]*\s*[:=]\s*([-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?)"
)
PLAN_TAG = re.compile(r"^\W*plan ([0-9a-f]{8})\b", re.IGNORECASE | re.MULTILINE)
"""How this rewriter's plans begin, so that a prompt that lists their first lines names them."""

_SPEEDUP = re.compile(r"(\d+(?:\.\d+)?)\s*(?:x\b|times\b|×)", re.IGNORECASE)
_ITEM = re.compile(r"^#{1,6}\s*(?:experience|example|item|lesson)\b.*$", re.IGNORECASE | re.MULTILINE)
_WARNING = re.compile(r"\b(?:avoid|undo|do not|don't|slower|failed)\b", re.IGNORECASE)


def read_request(messages: Sequence[Mapping[str, str]]) -> Request:
    """Reads chat messages (``role`` and ``content`` as plain text)."""
    system = "\n".join(m["content"] for m in messages if m["role"] in ("system", "developer"))
    user = "\n".join(m["content"] for m in messages if m["role"] not in ("system", "developer", "assistant"))
    kernels = kernels_in(user)
    role = _role(system, user, len(kernels))
    prose = user
    for kernel in kernels:
        prose = prose.replace(kernel.strip("\n"), "")
    found = _SPEEDUP.search(prose) if role is Role.SUMMARIZER else None
    return Request(
        role,
        tuple(kernels),
        _counters(prose) if role is Role.PLANNER else {},
        tuple(_experiences(system)) if role is Role.PLANNER else (),
        prose,
        float(found[1]) if found else None,
        frozenset(match.lower() for match in PLAN_TAG.findall(prose)) if role is Role.PLANNER else frozenset(),
    )


def kernels_in(text: str) -> list[str]:
    """Code blocks that parse and define a kernel entry, in order of appearance."""
    found: list[tuple[int, str]] = []
    taken: set[int] = set()
    for block in blocks_last_first(text.replace("\r\n", "\n")):
        if not block.closed or block.end_line in taken:
            continue
        for code in block.texts:
            if _is_kernel(code):
                found.append((block.end_line, code.strip("\n") + "\n"))
                taken.add(block.end_line)
                break
    ordered: list[str] = []
    for _, code in sorted(found):
        # A pairing that spans several blocks does not parse; one that only adds surroundings repeats the kernel.
        if not any(code in other and code != other for _, other in found) or code not in ordered:
            ordered.append(code)
    if not ordered and _is_kernel(text):
        ordered.append(text)
    return ordered


@lru_cache(maxsize=1024)  # the kernels of a search come again in prompt after prompt
def _is_kernel(code: str) -> bool:
    if "def " not in code:
        return False
    try:
        return find_entry(ast.parse(code)) is not None
    except (SyntaxError, ValueError, RecursionError):
        return False


def _role(system: str, user: str, kernels: int) -> Role:
    head = next((line for line in system.splitlines() if line.strip()), "").lower()
    for text in (head, system.lower(), user.lower()):
        places = {
            Role.PLANNER: text.find("planner"),
            Role.EXECUTOR: text.find("executor"),
            Role.SUMMARIZER: min((p for p in (text.find("summarizer"), text.find("summariser")) if p >= 0), default=-1),
            Role.FIXER: text.find("fixer"),
        }
        named = {role: place for role, place in places.items() if place >= 0}
        if named:
            return min(named, key=lambda role: named[role])
    if kernels >= 2:
        return Role.SUMMARIZER
    return Role.EXECUTOR if "plan" in user.lower() and "rewrite:" in user.lower() else Role.PLANNER


def _counters(text: str) -> dict[str, float]:
    counters: dict[str, float] = {}
    for name, value in _COUNTER.findall(text):
        if "_" in name or name == "latency":
            counters.setdefault(name, float(value.replace(",", "")))
    return counters


def _experiences(system: str) -> list[Experience]:
    starts = [match.start() for match in _ITEM.finditer(system)]
    items: list[Experience] = []
    for start, end in zip(starts, [*starts[1:], len(system)], strict=False):
        text = system[start:end].strip()
        following = re.search(r"^#{1,2} (?!#)", text[3:], re.MULTILINE)
        if following:
            text = text[: following.start() + 3].strip()
        title, _, body = text.partition("\n")
        if not body.strip() and not re.search(r":\s*\S", title):
            continue
        ratio = _SPEEDUP.search(title) or _SPEEDUP.search(body)
        heading = re.sub(r"^#+\s*", "", title)
        stated = re.search(r"^\W*title\W+(.+)$", body, re.IGNORECASE | re.MULTILINE)
        warns = bool(_WARNING.search(f"{heading} {stated[1] if stated else ''}"))
        items.append(Experience(heading, text, float(ratio[1]) if ratio else 1.0, warns))
    return items
