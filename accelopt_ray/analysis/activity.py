"""Whether somebody is writing a trajectory at this moment, without disturbing them."""

from __future__ import annotations

import os
from pathlib import Path

from accelopt_ray.trajectory.lock import LOCK_NAME

_LOCK_TABLE = Path("/proc/locks")


def is_being_written(location: str) -> bool | None:
    """Looks the run's lock up in the kernel's table of locks.

    It is not tried out: for that moment the lock would be ours, and a run that is about to start would be refused.

    Args:
        location: A run's or sweep's folder, or its ``trajectory`` folder.

    Returns:
        None where that cannot be known: another machine's run, or no such table.
    """
    for folder in (Path(location) / "trajectory", Path(location)):
        path = folder / LOCK_NAME
        if path.is_file():
            return _is_locked(path)
    return False if Path(location).is_dir() else None


def _is_locked(path: Path) -> bool | None:
    try:
        lines = _LOCK_TABLE.read_text().splitlines()
        inode = os.stat(path).st_ino
    except OSError:
        return None
    # A line is like "1: FLOCK  ADVISORY  WRITE 4242 fe:00:131 0 EOF"; the device differs from stat's on layered disks.
    return any("FLOCK" in line and line.split()[-3].endswith(f":{inode}") for line in lines)
