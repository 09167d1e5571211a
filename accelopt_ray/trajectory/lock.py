"""One writer at a time: a lock on a run's trajectory that no crash can leave behind."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from accelopt_ray.outcome import UserError

LOCK_NAME = ".lock"
_POLL_S = 0.1


class RunLock:
    """Held by whoever writes a trajectory, until it lets go or its process ends in any way."""

    def __init__(self, root: Path) -> None:
        """Names the trajectory's folder; nothing is locked yet."""
        self._path = root / LOCK_NAME
        self._descriptor: int | None = None

    def acquire(self, patience_s: float = 0.0) -> None:
        """Takes the lock, making the folder where it is missing.

        Args:
            patience_s: How long to wait for a holder to end; processes of a killed run live on for some seconds.

        Raises:
            UserError: Somebody else holds it.
            OSError: The folder cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    raise UserError(
                        f"{self._path.parent} is being written by a run that is going on: wait for it, or stop it"
                    ) from None
                time.sleep(_POLL_S)
            else:
                self._descriptor = descriptor
                return

    def release(self) -> None:
        """Lets go; does nothing without the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
