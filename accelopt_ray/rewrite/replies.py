"""From chat messages to the rewriter's answers, and how their length is counted."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from accelopt_ray.rewrite.executor import execute
from accelopt_ray.rewrite.planner import plan_text
from accelopt_ray.rewrite.prompt import Role, read_request
from accelopt_ray.rewrite.summariser import summarise

#: A token is up to four word characters, or one other character that is not white space.
_TOKEN = re.compile(r"\w{1,4}|[^\w\s]")


def answers(messages: Sequence[Mapping[str, str]], seed: int, count: int) -> list[str]:
    """Answers a prompt ``count`` times; a pure function of its arguments.

    Args:
        messages: Chat messages, ``role`` and ``content``.
        seed: Decides which of the promising plans a planner proposes.
        count: Number of answers; a planner's differ as long as it has different plans.
    """
    request = read_request(messages)
    if request.role is Role.PLANNER:
        return [plan_text(request, seed, sample) for sample in range(count)]
    text = summarise(request) if request.role is Role.SUMMARIZER else execute(request)
    return [text] * count


@lru_cache(maxsize=1024)  # all calls of a role share their system message
def count_tokens(text: str) -> int:
    """Length of a text in tokens: one per four word characters of a word, one per other visible character."""
    return sum(1 for _ in _TOKEN.finditer(text))


def truncate(text: str, max_tokens: int | None) -> tuple[str, bool]:
    """Cuts a text after ``max_tokens`` tokens; also returns whether something was cut."""
    if max_tokens is None:
        return text, False
    for number, match in enumerate(_TOKEN.finditer(text)):
        if number == max_tokens:
            return text[: match.start()], True
    return text, False
