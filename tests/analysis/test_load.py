"""Loading: typed frames of one run, of a sweep and of a pattern; bad input named, never fewer rows in silence."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from accelopt_ray.analysis import Trajectory, load
from accelopt_ray.outcome import UserError
from accelopt_ray.trajectory import DamagedPartWarning, NewerSchemaError, TrajectoryWriter, read_table
from accelopt_ray.trajectory.schema import VERSION_KEY
from experiments.generated_run import generate_run

FRAMES = (
    "runs",
    "iterations",
    "llm_calls",
    "plans",
    "sources",
    "evaluations",
    "memory_items",
    "selections",
    "resumes",
    "call_starts",
    "results",
)


def test_types_do_not_depend_on_the_rows(run: Trajectory, tmp_path: Path):
    TrajectoryWriter(tmp_path / "trajectory", "bare").write("runs", [{"seed": 1}])
    bare = load(tmp_path)
    for name in FRAMES:
        full, empty = getattr(run, name), getattr(bare, name)
        shared = [column for column in full.columns if column in empty.columns]
        assert full[shared].dtypes.equals(empty[shared].dtypes), name


def test_nothing_is_left_to_parse(run: Trajectory):
    assert run.runs["planner_model"].tolist() == ["generated"]
    assert run.settings.loc["silu-generated", "search.beam_width"] == 6
    counters = run.counters.set_index("evaluation_id")
    assert counters.loc["silu.i0.c0", "total_time"] == pytest.approx(2e-3)
    failed = run.evaluations[run.evaluations["outcome"].eq("incorrect")]["evaluation_id"]
    assert counters.loc[failed, "total_time"].isna().all()
    assert run.evaluations["latency_samples_ms"].iloc[0] == [2.0]


def test_frames_hold_every_row(run_folder: Path, run: Trajectory):
    for name in FRAMES:
        assert len(getattr(run, name)) == len(read_table(run_folder, name)), name
    assert len(run.counters) == len(run.evaluations)
    assert len(run.llm_texts) == len(run.llm_calls)
    assert run.llm_texts["system_prompt"].notna().all()


def test_a_sweep_a_pattern_a_parent_folder_and_several_paths_are_one_call(tmp_path: Path, sweep_folder: Path):
    for seed in range(2):
        generate_run(tmp_path / f"run-{seed}", evaluations=6, run_id=f"r{seed}")
    assert load(tmp_path / "run-0" / "trajectory").run_ids == ["r0"]
    assert load(str(tmp_path / "run-*")).run_ids == ["r0", "r1"]
    assert load(tmp_path).run_ids == ["r0", "r1"]
    assert len(load([tmp_path, sweep_folder]).run_ids) == 8


def test_named_runs_are_read_from_their_partitions_alone(sweep_folder: Path, tmp_path: Path):
    copy = tmp_path / "sweep"
    shutil.copytree(sweep_folder, copy)
    for part in copy.glob("trajectory/*/p_run=published-*/*.parquet"):
        part.write_bytes(b"not opened")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = load(copy, run_ids=["paper-1"])
        assert set(one.evaluations["run_id"]) == {"paper-1"}
        assert set(one.llm_calls["run_id"]) == {"paper-1"}


def test_a_damaged_part_is_named_and_the_rest_is_read(run_folder: Path, tmp_path: Path):
    copy = tmp_path / "run"
    shutil.copytree(run_folder, copy)
    part = max(copy.glob("trajectory/evaluations/*/part-*.parquet"))
    lost = pq.ParquetFile(part).metadata.num_rows
    part.write_bytes(part.read_bytes()[:-20])
    whole = len(load(run_folder).evaluations)
    with pytest.warns(DamagedPartWarning, match=part.name):
        assert len(load(copy).evaluations) == whole - lost


def test_a_newer_schema_is_refused_by_name(tmp_path: Path):
    folder = tmp_path / "trajectory" / "evaluations" / "p_run=r"
    folder.mkdir(parents=True)
    schema = pa.schema([("run_id", pa.string())], metadata={VERSION_KEY: b"999"})
    pq.write_table(pa.table({"run_id": ["r"]}, schema=schema), folder / "part-0.parquet")
    with pytest.raises(NewerSchemaError, match="999.*upgrade accelopt-ray"):
        _ = load(tmp_path).evaluations


@pytest.mark.parametrize(
    ("path", "said"),
    [("absent", "there is no folder"), ("empty", "holds no trajectory"), ("empty/*.x", "no folder that matches")],
)
def test_what_is_no_run_is_said_in_one_sentence(tmp_path: Path, path: str, said: str):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=said) as caught:
        load(tmp_path / path)
    assert "\n" not in str(caught.value)


def test_an_unknown_run_and_a_run_found_twice_are_refused(run_folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match="no run nobody"):
        load(run_folder, run_ids=["nobody"])
    shutil.copytree(run_folder, tmp_path / "copy")
    with pytest.raises(UserError, match="would count twice"):
        load([run_folder, tmp_path / "copy"])


def test_states_tell_finished_stopped_and_empty_runs(tmp_path: Path):
    generate_run(tmp_path, evaluations=8, run_id="finished")
    generate_run(tmp_path, evaluations=8, run_id="stopped", finished=False)
    TrajectoryWriter(tmp_path / "trajectory", "empty").write("runs", [{"seed": 1, "config_json": "{}"}])
    states = load(tmp_path).states().set_index("run_id")["state"]
    assert states.to_dict() == {"finished": "finished", "stopped": "stopped", "empty": "empty"}


def test_a_run_that_is_being_written_is_running(tmp_path: Path):
    from accelopt_ray.trajectory.lock import RunLock

    generate_run(tmp_path, evaluations=8, finished=False)
    lock = RunLock(tmp_path / "trajectory")
    lock.acquire()
    try:
        if not Path("/proc/locks").is_file():
            pytest.skip("this system has no table of locks")
        assert load(tmp_path).states()["state"].tolist() == ["running"]
    finally:
        lock.release()
    assert load(tmp_path).states()["state"].tolist() == ["stopped"]


def test_pandas_duckdb_and_pyarrow_read_a_sweep_with_one_call(sweep_folder: Path, sweep: Trajectory):
    import pyarrow.dataset as ds

    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    folder = sweep_folder / "trajectory" / "evaluations"
    expected = sweep.evaluations.groupby("run_id").size().to_dict()
    assert pd.read_parquet(folder).groupby("run_id").size().to_dict() == expected
    table = ds.dataset(folder, partitioning="hive").to_table(columns=["run_id"])
    assert table["run_id"].to_pandas().value_counts().to_dict() == expected
    found = duckdb.sql(f"SELECT run_id, count(*) FROM read_parquet('{folder}/**/*.parquet') GROUP BY run_id").fetchall()
    assert dict(found) == expected
