"""One run's recorder: many concurrent writers of rows, few files, and a promise when a row is durable."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accelopt_ray.trajectory.writer import TrajectoryWriter

FLUSH_ROWS = 256
"""A table is flushed at the latest when this many accepted rows wait."""

FLUSH_INTERVAL_S = 2.0
"""All tables are flushed at the latest this long after the first accepted row."""


@dataclass
class _Lane:
    """What waits for one table's next flush, and the future that tells when that flush is done."""

    rows: list[Mapping[str, object]] = field(default_factory=list)
    flushed: asyncio.Future[None] | None = None


class Journal:
    """Collects rows and flushes them together (group commit).

    While one flush writes, all rows that arrive gather for the next, so that the number of files and of waits for the
    disk grows with time, not with rows. All methods belong to one event loop; the disk is waited for in a thread.
    """

    def __init__(
        self, writer: TrajectoryWriter, *, flush_rows: int = FLUSH_ROWS, flush_interval_s: float = FLUSH_INTERVAL_S
    ) -> None:
        """Wraps a writer, which from now on belongs to this journal."""
        self._writer = writer
        self._flush_rows = flush_rows
        self._flush_interval_s = flush_interval_s
        self._lanes: dict[str, _Lane] = {}
        self._writing = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._timed_flush: asyncio.Task[None] | None = None

    async def add(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Accepts rows; they are durable after the next flush, by count, by time, or by anyone's :meth:`flush`.

        Raises:
            ValueError: The table does not exist or a row does not fit it; then none of the rows is accepted.
            OSError: The file system refused a flush that these rows made due; they are accepted nevertheless.
        """
        self._accept(table, rows)
        if len(self._lanes[table].rows) >= self._flush_rows:
            await self._flush_table(table)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._flush_interval_s, self._flush_on_time)

    async def commit(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Accepts rows and returns once they are on disk.

        Raises:
            ValueError: As in :meth:`add`.
            OSError: The file system refused; the rows stay and the next flush tries again.
        """
        self._accept(table, rows)
        await self._flush_table(table)

    async def flush(self) -> None:
        """Returns once every row accepted so far is on disk.

        Raises:
            OSError: As in :meth:`commit`.
        """
        for table in list(self._lanes):
            await self._flush_table(table)

    async def close(self) -> None:
        """Stops the timer and flushes what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self.flush()

    def _accept(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        # Refused here, a misfit row is its sender's error; refused while flushing, it would be everybody's.
        self._writer.check(table, rows)
        self._lanes.setdefault(table, _Lane()).rows.extend(rows)

    async def _flush_table(self, table: str) -> None:
        lane = self._lanes[table]
        if not lane.rows and lane.flushed is None:
            async with self._writing:  # a flush that has taken the rows may still be writing them
                return
        if lane.flushed is None:
            lane.flushed = asyncio.get_running_loop().create_future()
        flushed = lane.flushed
        async with self._writing:
            if flushed.done():  # another caller's flush has taken these rows along
                flushed.result()  # and raises here what it met there
                return
            rows, lane.rows, lane.flushed = lane.rows, [], None
            try:
                await asyncio.to_thread(self._writer.write, table, rows)
            except OSError as error:
                lane.rows = [*rows, *lane.rows]
                flushed.set_exception(error)
                flushed.exception()  # marks it as seen: with nobody else waiting, raising it here is enough
                raise
            flushed.set_result(None)

    def _flush_on_time(self) -> None:
        self._timer = None
        self._timed_flush = asyncio.get_running_loop().create_task(self.flush())
