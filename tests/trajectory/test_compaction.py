"""Compaction: the same rows in fewer files, at no moment fewer or twice for this package's reader."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from accelopt_ray.outcome import UserError
from accelopt_ray.trajectory import TABLES, DamagedPartWarning, TrajectoryWriter, compact, read_table
from accelopt_ray.trajectory.lock import RunLock


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for run_id in ("a", "b"):
        writer = TrajectoryWriter(tmp_path / "trajectory", run_id)
        for number in range(5):
            writer.write("plans", [{"plan_id": f"{run_id}{number}"}, {"plan_id": f"{run_id}{number}x"}])
            writer.write("sources", [{"source": f"{run_id}{number}"}])
    return tmp_path


def rows(folder: Path) -> dict[str, list[dict[str, object]]]:
    return {table: read_table(folder, table).to_pylist() for table in TABLES}


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("trajectory/*/*/part-*.parquet"))


def test_rows_and_their_order_stay_in_one_part_for_each_table_of_a_run(run: Path):
    before = rows(run)
    done = compact(run)
    assert (done.parts_before, done.parts_after, len(parts(run))) == (20, 4, 4)
    assert rows(run) == before
    assert compact(run).parts_after == 4


def test_a_writer_goes_on_behind_what_was_compacted(run: Path):
    compact(run)
    TrajectoryWriter(run / "trajectory", "a").write("plans", [{"plan_id": "later"}])
    assert read_table(run, "plans", "a")["plan_id"].to_pylist()[-1] == "later"
    compact(run)
    assert read_table(run, "plans", "a")["plan_id"].to_pylist()[-1] == "later"


def test_a_kill_between_the_merge_and_the_removal_shows_no_row_twice(run: Path, tmp_path: Path):
    before = rows(run)
    copies = {path: path.read_bytes() for path in parts(run)}
    compact(run)
    for path, content in copies.items():
        if not path.exists():  # as if it had not been removed yet
            path.write_bytes(content)
    assert rows(run) == before
    assert compact(run).parts_after == 4
    assert rows(run) == before


def test_a_damaged_part_is_left_and_named(run: Path):
    broken = parts(run)[1]
    broken.write_bytes(broken.read_bytes()[:-9])
    done = compact(run)
    assert done.damaged == (str(broken),)
    assert broken.exists()
    with pytest.warns(DamagedPartWarning, match=broken.name):
        assert len(read_table(run, "plans")) == 18


def test_a_reader_survives_parts_that_vanish_while_it_reads(run: Path, monkeypatch: pytest.MonkeyPatch):
    before = rows(run)["plans"]
    original = pq.ParquetFile
    state = {"first": True}

    def opening(*arguments: object, **options: object) -> object:
        if state.pop("first", False):
            raise FileNotFoundError("compacted away")
        return original(*arguments, **options)

    monkeypatch.setattr("accelopt_ray.trajectory.reader.pq.ParquetFile", opening)
    assert read_table(run, "plans").to_pylist() == before


def test_a_run_that_is_going_on_is_left_alone(run: Path):
    lock = RunLock(run / "trajectory")
    lock.acquire()
    try:
        with pytest.raises(UserError, match="going on"):
            compact(run)
    finally:
        lock.release()
    assert len(parts(run)) == 20


def test_a_folder_without_a_trajectory_is_refused(tmp_path: Path):
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError, match="holds no trajectory"):
        compact(tmp_path / "x")
    shutil.rmtree(tmp_path / "x")
