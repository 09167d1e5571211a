"""What is written comes back, and a crash at any point leaves what was acknowledged readable."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from datetime import datetime, timezone
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelopt_ray.outcome import UserError
from accelopt_ray.trajectory import (
    SCHEMA_VERSION,
    TABLES,
    DamagedPartWarning,
    ManyPartsWarning,
    NewerSchemaError,
    TrajectoryWriter,
    compact,
    read_table,
    run_ids,
    text_sha256,
)
from accelopt_ray.trajectory.schema import Table

KINDS = {
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.string(): st.text(max_size=20),
    pa.large_string(): st.text(max_size=200),
    pa.timestamp("us", tz="UTC"): st.datetimes(
        min_value=datetime(1970, 1, 2), max_value=datetime(2200, 1, 1), timezones=st.just(timezone.utc)
    ),
    pa.list_(pa.string()): st.lists(st.text(max_size=5), max_size=3),
    pa.list_(pa.float64()): st.lists(st.floats(allow_nan=False), max_size=3),
    pa.map_(pa.string(), pa.float64()): st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
    pa.map_(pa.string(), pa.string()): st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
}
# These the writer fills in or keeps once, which the tests further down state.
FILLED_IN = {"schema_version", "run_id", "system_prompt", "system_prompt_sha256", "source_sha256", "source"}


def rows_of(table: Table) -> st.SearchStrategy[list[dict[str, object]]]:
    columns = {c.name: st.none() | KINDS[c.type] for c in table.columns if c.name not in FILLED_IN}
    return st.lists(st.fixed_dictionaries({}, optional=columns), min_size=1, max_size=4)


@pytest.mark.parametrize("name", [name for name in TABLES if name != "sources"])
@given(data=st.data())
@settings(max_examples=15)
def test_rows_come_back_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject):
    root = tmp_path_factory.mktemp("run")
    first, second = data.draw(rows_of(TABLES[name])), data.draw(rows_of(TABLES[name]))
    writer = TrajectoryWriter(root / "trajectory", "r1")
    writer.write(name, first)
    writer.write(name, second)
    found = read_table(root, name).to_pylist()
    assert len(found) == len(first) + len(second)
    for row, expected in zip(found, [*first, *second], strict=True):
        assert row["run_id"] == "r1"
        assert row["schema_version"] == SCHEMA_VERSION
        for column in TABLES[name].columns:
            if column.name in FILLED_IN:
                continue
            value = expected.get(column.name)
            if isinstance(value, dict):
                assert dict(row[column.name]) == value
            else:
                assert row[column.name] == value


def test_plain_pandas_reads_a_table_and_several_runs_of_it(tmp_path: Path):
    for run in ("a", "b"):
        writer = TrajectoryWriter(tmp_path / "trajectory", run)
        writer.write("evaluations", [{"evaluation_id": "e1", "latency_ms": 1.5, "outcome": "correct"}])
        writer.write("evaluations", [{"evaluation_id": "e2"}])
    frame = pd.read_parquet(tmp_path / "trajectory" / "evaluations")
    assert sorted(frame["run_id"]) == ["a", "a", "b", "b"]
    assert frame["latency_ms"].dtype == "float64"
    assert len(pd.read_parquet(tmp_path / "trajectory" / "evaluations", filters=[("p_run", "==", "a")])) == 2


def test_all_null_columns_have_the_declared_type_in_the_file(tmp_path: Path):
    part = TrajectoryWriter(tmp_path, "r").write("evaluations", [{"evaluation_id": "e"}])
    assert part is not None
    assert pq.read_schema(part).equals(TABLES["evaluations"].schema)


def test_each_source_is_stored_once(tmp_path: Path):
    writer = TrajectoryWriter(tmp_path, "r")
    writer.write("sources", [{"source": "a"}, {"source": "b"}, {"source": "a"}])
    assert writer.write("sources", [{"source": "b"}]) is None
    table = read_table(tmp_path, "sources")
    assert table["source"].to_pylist() == ["a", "b"]
    assert table["source_sha256"].to_pylist() == [text_sha256("a"), text_sha256("b")]


def test_a_system_prompt_is_stored_in_the_first_row_that_uses_it(tmp_path: Path):
    writer = TrajectoryWriter(tmp_path, "r")
    writer.write("llm_calls", [{"call_id": "1", "system_prompt": "s"}, {"call_id": "2", "system_prompt": "s"}])
    writer.write("llm_calls", [{"call_id": "3", "system_prompt": "s"}, {"call_id": "4", "system_prompt": "t"}])
    table = read_table(tmp_path, "llm_calls")
    assert table["system_prompt"].to_pylist() == ["s", None, None, "t"]
    assert table["system_prompt_sha256"].to_pylist() == [text_sha256("s")] * 3 + [text_sha256("t")]


def test_a_failed_flush_does_not_lose_the_text_it_carried(tmp_path: Path):
    root = tmp_path / "trajectory"
    root.write_text("in the way")
    writer = TrajectoryWriter(root, "r")
    with pytest.raises(OSError):
        writer.write("sources", [{"source": "a"}])
    root.unlink()
    writer.write("sources", [{"source": "a"}])
    assert read_table(root, "sources")["source"].to_pylist() == ["a"]


@pytest.mark.parametrize(
    ("table", "row", "named"),
    [
        ("evaluation", {}, "evaluation"),
        ("evaluations", {"latency": 1.0}, "'latency'"),
        ("evaluations", {"latency_ms": "fast"}, "'latency_ms'"),
        ("evaluations", {"attempt_index": 2**40}, "'attempt_index'"),
        ("evaluations", {"ended_at": "yesterday"}, "'ended_at'"),
    ],
)
def test_a_row_that_does_not_fit_names_the_column_and_writes_nothing(
    tmp_path: Path, table: str, row: dict[str, object], named: str
):
    writer = TrajectoryWriter(tmp_path / "t", "r")
    with pytest.raises(ValueError, match=named):
        writer.write(table, [row])
    assert not (tmp_path / "t").exists()


def test_a_process_killed_while_it_writes_leaves_every_acknowledged_row(tmp_path: Path):
    script = textwrap.dedent(
        """
        import sys
        from accelopt_ray.trajectory import TrajectoryWriter
        writer = TrajectoryWriter(sys.argv[1], "r")
        for index in range(10**6):
            writer.write("llm_calls", [{"call_id": str(index), "reply_text": "x" * 200_000}])
            print(index, flush=True)
        """
    )
    acknowledged = -1
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            acknowledged = int(line)
            if acknowledged == 12:
                process.kill()
                break
    calls = [int(call) for call in read_table(tmp_path, "llm_calls")["call_id"].to_pylist()]
    assert calls == list(range(len(calls)))
    assert len(calls) >= acknowledged + 1
    assert len(pd.read_parquet(tmp_path / "llm_calls")) == len(calls)


def test_a_left_over_temporary_file_is_no_part(tmp_path: Path):
    part = TrajectoryWriter(tmp_path, "r").write("plans", [{"plan_id": "p"}])
    assert part is not None
    (Path(part).parent / ".part-000001-abc.parquet.tmp").write_bytes(b"PAR1 half of a file")
    assert read_table(tmp_path, "plans").num_rows == 1
    assert len(pd.read_parquet(tmp_path / "plans")) == 1


def test_a_damaged_part_is_named_and_the_rest_is_read(tmp_path: Path):
    writer = TrajectoryWriter(tmp_path, "r")
    parts = [writer.write("plans", [{"plan_id": str(index)}]) for index in range(3)]
    os.truncate(str(parts[1]), 40)
    with pytest.warns(DamagedPartWarning, match=Path(str(parts[1])).name):
        table = read_table(tmp_path, "plans")
    assert table["plan_id"].to_pylist() == ["0", "2"]


def test_a_newer_schema_is_refused_by_name_and_an_older_one_gets_null_columns(tmp_path: Path):
    folder = tmp_path / "plans" / "p_run=old"
    folder.mkdir(parents=True)
    old = pa.table({"run_id": ["old"], "plan_id": ["p"]}).replace_schema_metadata({"accelopt_schema_version": "0"})
    pq.write_table(old, folder / "part-1.parquet")
    assert read_table(tmp_path, "plans").to_pylist()[0]["plan_text"] is None
    newer = old.replace_schema_metadata({"accelopt_schema_version": str(SCHEMA_VERSION + 1)})
    pq.write_table(newer, folder / "part-2.parquet")
    with pytest.raises(NewerSchemaError, match=rf"part-2.parquet has trajectory schema {SCHEMA_VERSION + 1}"):
        read_table(tmp_path, "plans")


def test_reading_one_run_reads_that_partition_alone(tmp_path: Path):
    for run in ("a", "b"):
        TrajectoryWriter(tmp_path, run).write("plans", [{"plan_id": run}])
    assert read_table(tmp_path, "plans", run_id="b")["plan_id"].to_pylist() == ["b"]


def test_run_ids_are_in_order_of_their_start(tmp_path: Path):
    for run, day in (("b", 1), ("a", 2)):
        row = {"created_at": datetime(2026, 1, day, tzinfo=timezone.utc)}
        TrajectoryWriter(tmp_path, run).write("runs", [row])
    assert run_ids(tmp_path) == ["b", "a"]


def test_a_table_without_rows_yet_is_empty_and_a_folder_without_a_trajectory_is_the_users_mistake(tmp_path: Path):
    TrajectoryWriter(tmp_path, "r").write("plans", [{"plan_id": "p"}])
    assert read_table(tmp_path, "evaluations").num_rows == 0
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(UserError, match="holds no trajectory"):
        read_table(tmp_path / "elsewhere", "evaluations")


def test_very_many_small_parts_are_worth_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    writer = TrajectoryWriter(tmp_path, "r")
    for number in range(3):
        writer.write("plans", [{"plan_id": str(number)}])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_table(tmp_path, "plans")) == 3
    monkeypatch.setattr("accelopt_ray.trajectory.reader.MANY_PARTS", 3)
    with pytest.warns(ManyPartsWarning, match="plans of .* is in 3 small files.*accelopt-ray compact"):
        assert read_table(tmp_path, "plans")["plan_id"].to_pylist() == ["0", "1", "2"]
    compact(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_table(tmp_path, "plans")) == 3
