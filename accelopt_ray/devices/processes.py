"""What the operating system tells of a process; nothing of one that has ended."""

from __future__ import annotations

import os


def resident_bytes(pid: int) -> int:
    """Memory that is the process's own: mapped tensor files do not count, they can be dropped at any time."""
    return _sum_fields(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:", "VmSwap:"))


def proportional_bytes(pid: int) -> int:
    """As :func:`resident_bytes`, each shared page divided by the number of processes that share it."""
    return _sum_fields(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))


def _sum_fields(path: str, fields: tuple[str, ...]) -> int:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(fields))
    except OSError:  # the process has ended
        return 0


def session_of(pid: int) -> int:
    """The process's session; 0 if it has ended or is another user's."""
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return 0
