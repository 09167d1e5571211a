"""The recorder: the one process that writes a run's trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelopt_ray.trajectory import Journal, RunLock, TrajectoryWriter

_PATIENCE_S = 30.0
"""How long processes of a killed run may live on and hold its lock."""


class Recorder:
    """An asynchronous Ray actor around a :class:`~accelopt_ray.trajectory.Journal`.

    Calls of many actors run concurrently, so that those that wait for the disk share one flush.
    """

    def __init__(self, root: str, run_id: str) -> None:
        """Names the trajectory under ``root`` and the run; nothing is opened yet."""
        self._root = root
        self._run_id = run_id
        self._lock = RunLock(Path(root))
        self._opened: Journal | None = None

    async def lock(self) -> None:
        """Makes this recorder the only writer of the trajectory; it stays so until its process ends.

        Raises:
            UserError: Another run that goes on is writing it.
        """
        await asyncio.to_thread(self._lock.acquire, _PATIENCE_S)

    async def add(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Accepts rows; see :meth:`Journal.add`."""
        await self._journal.add(table, rows)

    async def commit(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Returns once the rows are on disk; see :meth:`Journal.commit`."""
        await self._journal.commit(table, rows)

    async def close(self) -> None:
        """Makes everything accepted durable and lets others write."""
        if self._opened is not None:
            await self._opened.close()
        self._lock.release()

    @property
    def _journal(self) -> Journal:
        """Opened with the first row, so that a resumed run's leftovers have been cleared by then."""
        if self._opened is None:
            self._opened = Journal(TrajectoryWriter(self._root, self._run_id))
        return self._opened
