"""The summariser's part: the lesson in a slow and a fast kernel."""

from __future__ import annotations

import ast
import difflib

from accelopt_ray.rewrite.catalogue import BY_ID
from accelopt_ray.rewrite.planner import options_for
from accelopt_ray.rewrite.prompt import Request
from accelopt_ray.rewrite.syntax import KernelSyntaxError

_NOTHING = "No optimization found"
_MOST_LINES = 8


def summarise(request: Request) -> str:
    """Writes a titled, general lesson, or says that there is none."""
    if len(request.kernels) < 2:
        return _NOTHING
    slow, fast = request.kernels[-2], request.kernels[-1]
    if _canonical(slow) == _canonical(fast):
        return _NOTHING
    ratio = f" It made the kernel {request.speedup:.2f} times as fast." if request.speedup else ""
    rules = _explanation(slow, fast)
    if rules:
        return _lesson(rules, slow, fast, ratio)
    undone = _explanation(fast, slow)
    if undone:
        return _warning(undone, slow, fast, ratio)
    before, after = _snippets(slow, fast)
    if not before and not after:
        return _NOTHING
    return _format(
        "Local rewrite of the instruction sequence",
        "The fast kernel replaces the statements shown first by those shown second and computes the same values; look "
        f"for the same sequence on tiles of the same layout.{ratio}",
        before,
        after,
    )


def _canonical(source: str) -> str:
    try:
        return ast.dump(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError):
        return source


def _explanation(slow: str, fast: str) -> list[str]:
    """Ids of the rules that lead from one kernel to the other, most important first, or none."""
    target = _canonical(fast)
    try:
        options = options_for(slow)
    except KernelSyntaxError:
        return []
    for option in sorted(options, key=lambda item: len(item.steps)):
        if _canonical(option.source) == target:
            names = list(dict.fromkeys(step.rule for step in option.steps))
            return sorted(names, key=lambda name: -BY_ID[name].typical_gain)
    return []


def _lesson(rules: list[str], slow: str, fast: str, ratio: str) -> str:
    first = BY_ID[rules[0]]
    others = [BY_ID[name].title for name in rules[1:4]]
    more = f" Together with it: {'; '.join(others)}." if others else ""
    text = (
        f"Look for this waste: {first.problem} The profile shows it: {first.evidence} Then {first.change} Legal when "
        f"the intermediate values have no other use. Expected: {first.expectation}{more}{ratio}"
    )
    return _format(first.title, text, *_snippets(slow, fast))


def _warning(rules: list[str], slow: str, fast: str, ratio: str) -> str:
    first = BY_ID[rules[0]]
    text = (
        f"Here the opposite of this rewrite paid: {first.title.lower()} ({first.id}). Keep the form shown second when "
        f"the profile does not show that need: {first.evidence}{ratio}"
    )
    return _format(f"Avoid: {first.title.lower()}", text, *_snippets(slow, fast))


def _snippets(slow: str, fast: str) -> tuple[list[str], list[str]]:
    """A few changed lines of both kernels."""
    old, new = slow.splitlines(), fast.splitlines()
    matcher = difflib.SequenceMatcher(None, [line.strip() for line in old], [line.strip() for line in new], False)
    before: list[str] = []
    after: list[str] = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            before += [line.strip() for line in old[a:b] if line.strip()]
            after += [line.strip() for line in new[c:d] if line.strip()]
    return before[:_MOST_LINES], after[:_MOST_LINES]


def _format(title: str, text: str, before: list[str], after: list[str]) -> str:
    lines = [f"Title: {title}", f"Plan: {text}"]
    for name, rows in (("Before", before), ("After", after)):
        if rows:
            lines += ["", f"{name}:", "```python", *rows, "```"]
    return "\n".join(lines)
