"""Reading trajectories back: whole or by run, while a run is going on or years after it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from accelopt_ray.outcome import UserError
from accelopt_ray.trajectory.schema import SCHEMA_VERSION, TABLES, VERSION_KEY, named_table
from accelopt_ray.trajectory.writer import PARTITION_KEY


class DamagedPartWarning(UserWarning):
    """A part file could not be read and was left out; the message names it."""


class NewerSchemaError(UserError):
    """A part file was written by a newer version of accelopt-ray."""


def read_table(location: str | Path, table: str, run_id: str | None = None) -> pa.Table:
    """Reads one table of a run or of a sweep.

    Args:
        location: A run's folder, its ``trajectory`` folder, or a URI of either.
        table: Table name.
        run_id: Reads this run's partition alone; all runs by default.

    Returns:
        The rows in the order in which they were written, in the current schema: a column that an older version did
        not have is null. Empty when the run has written no such row yet.

    Raises:
        UserError: The folder holds no trajectory.
        NewerSchemaError: A part is of a newer schema version.
        ValueError: There is no such table.
    """
    schema = named_table(table).schema
    filesystem, root = _trajectory_root(location)
    folder = f"{root}/{table}" if run_id is None else f"{root}/{table}/{PARTITION_KEY}={run_id}"
    found = filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True, recursive=True))
    parts = []
    for path in sorted(info.path for info in found if info.is_file and info.base_name.startswith("part-")):
        try:
            with filesystem.open_input_file(path) as stream:
                part = pq.ParquetFile(stream).read()
        except (OSError, pa.ArrowException) as error:
            warnings.warn(f"left out damaged part {path}: {error}", DamagedPartWarning, stacklevel=2)
            continue
        parts.append(_upgrade(part, schema, path))
    return pa.concat_tables([schema.empty_table(), *parts])


def run_ids(location: str | Path) -> list[str]:
    """Names the runs that a trajectory holds, in the order in which they started.

    Raises:
        UserError: The folder holds no trajectory.
    """
    runs = read_table(location, "runs")
    pairs = zip(runs["created_at"].to_pylist(), runs["run_id"].to_pylist(), strict=True)
    return [run_id for _, run_id in sorted(pairs, key=lambda pair: (pair[0] is not None, pair))]


def _trajectory_root(location: str | Path) -> tuple[pafs.FileSystem, str]:
    if isinstance(location, Path) or "://" not in location:
        filesystem: pafs.FileSystem = pafs.LocalFileSystem()
        root = str(Path(location).absolute())
    else:
        filesystem, root = pafs.FileSystem.from_uri(location)
    for candidate in (f"{root}/trajectory", root):
        kinds = filesystem.get_file_info([f"{candidate}/{table}" for table in TABLES])
        if any(kind.type == pafs.FileType.Directory for kind in kinds):
            return filesystem, candidate
    raise UserError(f"{location} holds no trajectory: give the output folder of a run")


def _upgrade(part: pa.Table, schema: pa.Schema, path: str) -> pa.Table:
    """Brings a part of this or an older version to the current schema."""
    version = int((part.schema.metadata or {}).get(VERSION_KEY, b"0"))
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"{path} has trajectory schema {version} and this accelopt-ray reads up to {SCHEMA_VERSION}: "
            "upgrade accelopt-ray to read it"
        )
    columns = [
        part[field.name].cast(field.type) if field.name in part.column_names else pa.nulls(len(part), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
