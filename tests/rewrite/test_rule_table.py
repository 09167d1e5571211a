"""The page on the rewriter lists its rules."""

from __future__ import annotations

import re
from pathlib import Path

from accelopt_ray.rewrite.catalogue import BY_ID

PAGE = Path(__file__).parents[2] / "docs" / "rewriter.md"


def test_the_page_lists_every_rule_with_its_title() -> None:
    rows = re.findall(r"^\| [^|]+ \| `([a-z0-9-]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(rule.id, rule.title, str(rule.relieves)) for rule in BY_ID.values()]
