"""The recorder: the one process that writes a run's trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accelopt_ray.trajectory import Journal, TrajectoryWriter


class Recorder:
    """An asynchronous Ray actor around a :class:`~accelopt_ray.trajectory.Journal`.

    Calls of many actors run concurrently, so that those that wait for the disk share one flush.
    """

    def __init__(self, root: str, run_id: str) -> None:
        """Opens the trajectory under ``root`` for one run."""
        self._journal = Journal(TrajectoryWriter(root, run_id))

    async def add(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Accepts rows; see :meth:`Journal.add`."""
        await self._journal.add(table, rows)

    async def commit(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Returns once the rows are on disk; see :meth:`Journal.commit`."""
        await self._journal.commit(table, rows)

    async def close(self) -> None:
        """Makes everything accepted durable."""
        await self._journal.close()
