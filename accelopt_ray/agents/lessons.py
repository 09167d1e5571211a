"""From a summariser's reply to a lesson."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NOTHING = re.compile(r"\bno\s+optimi[sz]ations?\s+(?:was\s+|were\s+)?found\b", re.IGNORECASE)
_FIRST = re.compile(r"\A\W*(?:title\W+|answer\W+)?" + _NOTHING.pattern, re.IGNORECASE)
_TITLE = re.compile(r"^[ \t#>*\-]*(?:title|optimi[sz]ation)[ \t]*(?:\*\*)?[ \t]*[:：][ \t]*(?P<title>.+)$", re.I | re.M)
_HEADING = re.compile(r"^[ \t]*#+[ \t]*(?P<title>.+)$", re.M)
_MAX_TITLE = 120


@dataclass(frozen=True)
class Lesson:
    """What a summariser found.

    Attributes:
        title: Short name; empty if nothing was found.
        text: The whole lesson, to be shown to planners; empty if nothing was found.
    """

    title: str
    text: str


def parse_lesson(reply_text: str) -> Lesson:
    """Reads a summariser's reply.

    "No optimization found" counts when it is what the reply says first or all that it says; a lesson that merely
    mentions the phrase stays a lesson.
    """
    text = reply_text.replace("\r\n", "\n").strip()
    if not text or _FIRST.match(text) or (len(text) <= 120 and _NOTHING.search(text)):
        return Lesson("", "")
    match = _TITLE.search(text) or _HEADING.search(text)
    title = match["title"] if match is not None else text.split("\n", 1)[0]
    return Lesson(title.strip(" \t*_#`:").strip()[:_MAX_TITLE] or "Untitled", text)
