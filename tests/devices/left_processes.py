"""Which children a test has left behind, some of which may just be coming to their end."""

from __future__ import annotations

import time

import psutil

_END_S = 2.0


def children() -> set[int]:
    """Ids of all processes below this one."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def left_since(before: set[int], words: str = "", allowed: int = 0) -> list[str]:
    """Command lines of children that were not there before, once no more than ``allowed`` are left or a while is over.

    Args:
        before: Of :func:`children`, earlier.
        words: Only those whose command line has them.
        allowed: How many may stay.
    """
    deadline = time.monotonic() + _END_S
    while True:
        found = [command for pid in children() - before if (command := _command(pid)) and words in command]
        if len(found) <= allowed or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def _command(pid: int) -> str:
    """What a process runs; nothing for one that has ended."""
    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
