"""Lines of a run's log: plain text that programs can take apart, ``name=value`` after ``name=value``."""

from __future__ import annotations

import json
import logging
import re
import time

_PLAIN = re.compile(r"[^\s=\"]+\Z")


def fields(**values: object) -> str:
    """Joins values with their names; a text that is empty or has blanks, ``=`` or ``"`` in it is quoted as in JSON."""
    return " ".join(f"{name}={_shown(value)}" for name, value in values.items() if value is not None)


def run_formatter(run_id: str) -> logging.Formatter:
    """Heads each line with time (UTC), level, logger and the run."""
    escaped = fields(run=run_id).replace("%", "%%")
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s {escaped} %(message)s")
    formatter.datefmt = "%Y-%m-%dT%H:%M:%S"
    formatter.converter = time.gmtime
    return formatter


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.match(text) else json.dumps(text, ensure_ascii=False)
