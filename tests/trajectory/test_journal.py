"""The journal's promise: acknowledged means on disk, and many rows share a flush."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from accelopt_ray.trajectory import Journal, TrajectoryWriter, read_table


class SlowWriter(TrajectoryWriter):
    """Lets a test hold a flush on its way to the disk, or fail it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "r")
        self.gate = threading.Event()
        self.gate.set()
        self.flushes: list[int] = []
        self.failures = 0

    def write(self, table: str, rows: Sequence[Mapping[str, object]]) -> str | None:
        self.gate.wait(10)
        self.flushes.append(len(rows))
        if self.failures:
            self.failures -= 1
            raise OSError("no space left on device")
        return super().write(table, rows)


def plan_ids(root: Path) -> list[str]:
    return [str(plan) for plan in read_table(root, "plans")["plan_id"].to_pylist()]


def row(index: int) -> dict[str, object]:
    return {"plan_id": str(index)}


async def settle() -> None:
    """Lets every ready coroutine run."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_committed_row_is_on_disk_when_commit_returns(tmp_path: Path):
    async def scenario() -> None:
        journal = Journal(TrajectoryWriter(tmp_path, "r"))
        for index in range(3):
            await journal.commit("plans", [row(index)])
            assert plan_ids(tmp_path) == [str(i) for i in range(index + 1)]

    asyncio.run(scenario())


def test_rows_that_come_during_a_flush_share_the_next_one(tmp_path: Path):
    async def scenario() -> None:
        writer = SlowWriter(tmp_path)
        journal = Journal(writer)
        writer.gate.clear()
        commits = [asyncio.create_task(journal.commit("plans", [row(0)]))]
        await settle()
        commits += [asyncio.create_task(journal.commit("plans", [row(index)])) for index in range(1, 50)]
        await settle()
        assert not any(commit.done() for commit in commits)
        writer.gate.set()
        await asyncio.gather(*commits)
        assert writer.flushes == [1, 49]

    asyncio.run(scenario())
    assert plan_ids(tmp_path) == [str(index) for index in range(50)]


def test_added_rows_are_flushed_by_count_by_time_and_at_the_end(tmp_path: Path):
    async def scenario() -> None:
        journal = Journal(TrajectoryWriter(tmp_path, "r"), flush_rows=3, flush_interval_s=0.01)
        await journal.add("plans", [row(0), row(1), row(2)])
        assert len(plan_ids(tmp_path)) == 3
        await journal.add("plans", [row(3)])
        for _ in range(500):
            if len(plan_ids(tmp_path)) == 4:
                break
            await asyncio.sleep(0.01)
        assert len(plan_ids(tmp_path)) == 4
        await journal.add("plans", [row(4)])
        await journal.close()
        assert len(plan_ids(tmp_path)) == 5

    asyncio.run(scenario())


def test_flush_waits_for_a_flush_that_is_under_way(tmp_path: Path):
    async def scenario() -> None:
        writer = SlowWriter(tmp_path)
        journal = Journal(writer)
        writer.gate.clear()
        commit = asyncio.create_task(journal.commit("plans", [row(0)]))
        await settle()
        flush = asyncio.create_task(journal.flush())
        await settle()
        assert not flush.done()
        writer.gate.set()
        await flush
        assert plan_ids(tmp_path) == ["0"]
        await commit

    asyncio.run(scenario())


def test_a_refused_flush_tells_everyone_who_waits_and_keeps_the_rows(tmp_path: Path):
    async def scenario() -> None:
        writer = SlowWriter(tmp_path)
        journal = Journal(writer)
        writer.failures = 1
        writer.gate.clear()
        first = asyncio.create_task(journal.commit("plans", [row(0)]))
        await settle()
        writer.gate.set()
        with pytest.raises(OSError, match="no space"):
            await first
        await journal.commit("plans", [row(1)])

    asyncio.run(scenario())
    assert plan_ids(tmp_path) == ["0", "1"]


def test_a_misfit_row_is_its_senders_error_alone(tmp_path: Path):
    async def scenario() -> None:
        journal = Journal(TrajectoryWriter(tmp_path, "r"))
        await journal.add("plans", [row(0)])
        with pytest.raises(ValueError, match="'plan'"):
            await journal.commit("plans", [{"plan": "?"}])
        await journal.close()

    asyncio.run(scenario())
    assert plan_ids(tmp_path) == ["0"]
