"""Where tensors that live for a moment are put."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_MEMORY_FOLDER = Path("/dev/shm")
_PREFIX = "accelopt-ray-run-"
_LOCK_NAME = "lock"
# Left to everyone else on the machine.
_RESERVE_BYTES = 1 << 30


@contextlib.contextmanager
def scratch_folder(size_bytes: int) -> Iterator[Path]:
    """Makes a folder for about ``size_bytes`` and removes it afterwards.

    It lies in the memory file system where that has plenty of room: writing a gigabyte of outputs to a disk takes
    longer than computing them, and they are deleted a second later. Folders that a killed process left behind are
    removed on the way.
    """
    parent = _MEMORY_FOLDER if _fits_in_memory(size_bytes) else Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    # The lock says that the owner lives, whatever process namespace it lives in.
    lock = os.open(folder / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _fits_in_memory(size_bytes: int) -> bool:
    try:
        space = os.statvfs(_MEMORY_FOLDER)
        available = _available_memory_bytes()
    except OSError:
        return False
    roomy = space.f_bavail * space.f_frsize >= 2 * size_bytes and available >= 4 * size_bytes + _RESERVE_BYTES
    return roomy and os.access(_MEMORY_FOLDER, os.W_OK)


def _available_memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*/{_LOCK_NAME}"):
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # another user's, or just removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(path.parent, ignore_errors=True)
        finally:
            os.close(lock)
