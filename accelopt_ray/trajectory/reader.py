"""Reading trajectories back: whole or by run, while a run is going on or years after it."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from accelopt_ray.outcome import UserError
from accelopt_ray.trajectory.schema import SCHEMA_VERSION, TABLES, VERSION_KEY, named_table
from accelopt_ray.trajectory.writer import PARTITION_KEY

REPLACES_KEY = b"accelopt_replaces"
"""Metadata key of a compacted part: a JSON list of the names of the parts whose rows it holds."""

_TRIES = 3
"""How often a table is read anew when its parts are compacted away under the reader's hands."""

_THREADS = min(8, 2 * (os.cpu_count() or 1))

_SMALL_PART_BYTES = 100_000
"""Below this the interpreter has more to do with a part than Arrow has: on a local disk threads only get in each
other's way."""

MANY_PARTS = 5_000
"""Part files of one table from which on reading them is worth a word."""


class DamagedPartWarning(UserWarning):
    """A part file could not be read and was left out; the message names it."""


class ManyPartsWarning(UserWarning):
    """A table is in so many small part files that merging them is worth while."""


class NewerSchemaError(UserError):
    """A part file was written by a newer version of accelopt-ray."""


def read_table(
    location: str | Path,
    table: str,
    run_id: str | Collection[str] | None = None,
    *,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Reads one table of a run or of a sweep.

    Args:
        location: A run's folder, its ``trajectory`` folder, or a URI of either.
        table: Table name.
        run_id: Reads the partitions of this run or of these runs alone; all runs by default.
        columns: Reads these columns alone; all by default.

    Returns:
        The rows in the order in which they were written, in the current schema: a column that an older version did
        not have is null. Empty when the run has written no such row yet.

    Raises:
        UserError: The folder holds no trajectory.
        NewerSchemaError: A part is of a newer schema version.
        ValueError: There is no such table or column.
    """
    schema = named_table(table).schema
    if columns is not None:
        unknown = sorted(set(columns) - set(schema.names))
        if unknown:
            raise ValueError(f"table {table!r} has no column {', '.join(map(repr, unknown))}")
        schema = pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)
    filesystem, root = trajectory_root(location)
    folders = [f"{root}/{table}"]
    if run_id is not None:
        chosen = [run_id] if isinstance(run_id, str) else sorted(set(run_id))
        folders = [f"{root}/{table}/{PARTITION_KEY}={each}" for each in chosen]
    for _ in range(_TRIES):
        infos = [info for folder in folders for info in _part_infos(filesystem, folder)]
        paths = [info.path for info in infos]
        with ThreadPoolExecutor(max_workers=_threads(filesystem, infos)) as pool:
            read = list(pool.map(lambda path: _read_part(filesystem, path, schema), paths))
        vanished = any(isinstance(part, FileNotFoundError) for part in read)
        if not vanished:
            break
    if len(paths) >= MANY_PARTS and _are_small(infos):
        warnings.warn(
            f"{table} of {location} is in {len(paths):,} small files, which are slow to read: "
            "`accelopt-ray compact` merges those of runs that have ended",
            ManyPartsWarning,
            stacklevel=2,
        )
    return pa.concat_tables([schema.empty_table(), *_whole_parts(paths, read)])


def part_paths(filesystem: pafs.FileSystem, folder: str) -> list[str]:
    """Lists the part files below a folder in the order of their names; none when there is no such folder."""
    return [info.path for info in _part_infos(filesystem, folder)]


def _part_infos(filesystem: pafs.FileSystem, folder: str) -> list[pafs.FileInfo]:
    found = filesystem.get_file_info(pafs.FileSelector(folder, allow_not_found=True, recursive=True))
    parts = [info for info in found if info.is_file and info.base_name.startswith("part-")]
    return sorted(parts, key=lambda info: str(info.path))


def _are_small(infos: Sequence[pafs.FileInfo]) -> bool:
    return sum(info.size or 0 for info in infos) < _SMALL_PART_BYTES * len(infos)


def _threads(filesystem: pafs.FileSystem, infos: Sequence[pafs.FileInfo]) -> int:
    """How many parts to read at once."""
    return 1 if isinstance(filesystem, pafs.LocalFileSystem) and _are_small(infos) else _THREADS


def run_ids(location: str | Path) -> list[str]:
    """Names the runs that a trajectory holds, in the order in which they started.

    Raises:
        UserError: The folder holds no trajectory.
    """
    runs = read_table(location, "runs")
    pairs = zip(runs["created_at"].to_pylist(), runs["run_id"].to_pylist(), strict=True)
    return [run_id for _, run_id in sorted(pairs, key=lambda pair: (pair[0] is not None, pair))]


def trajectory_root(location: str | Path) -> tuple[pafs.FileSystem, str]:
    """Finds the folder that holds the tables.

    Returns:
        A file system and the folder's path there.

    Raises:
        UserError: The folder holds no trajectory.
    """
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


def _read_part(filesystem: pafs.FileSystem, path: str, schema: pa.Schema) -> pa.Table | Exception:
    """Reads a part, brought to the schema; or returns why it could not be read."""
    try:
        with filesystem.open_input_file(path) as stream:
            file = pq.ParquetFile(stream)
            stored = file.schema_arrow  # built anew by each access
            _refuse_newer(stored, path)
            present = [name for name in schema.names if name in stored.names]
            return _upgrade(file.read(columns=present, use_threads=False), schema)
    except (OSError, pa.ArrowException) as error:
        return error


def _whole_parts(paths: Sequence[str], read: Sequence[pa.Table | Exception]) -> list[pa.Table]:
    """Leaves out damaged parts, with a warning, and parts whose rows stand in a compacted one already."""
    parts: dict[str, pa.Table] = {}
    replaced: set[str] = set()
    for path, part in zip(paths, read, strict=True):
        if isinstance(part, Exception):
            warnings.warn(f"left out damaged part {path}: {part}", DamagedPartWarning, stacklevel=4)
            continue
        parts[path] = part.replace_schema_metadata(None)
        folder = path.rpartition("/")[0]
        names = json.loads((part.schema.metadata or {}).get(REPLACES_KEY, b"[]"))
        replaced.update(f"{folder}/{name}" for name in names if not path.endswith(f"/{name}"))
    return [part for path, part in parts.items() if path not in replaced]


def _refuse_newer(schema: pa.Schema, path: str) -> None:
    version = int((schema.metadata or {}).get(VERSION_KEY, b"0"))
    if version > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"{path} has trajectory schema {version} and this accelopt-ray reads up to {SCHEMA_VERSION}: "
            "upgrade accelopt-ray to read it"
        )


def _upgrade(part: pa.Table, schema: pa.Schema) -> pa.Table:
    """Brings a part of this or an older version to the current schema; keeps the part's own metadata."""
    if part.schema.equals(schema):
        return part
    columns = [
        part[field.name].cast(field.type) if field.name in part.column_names else pa.nulls(len(part), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema.with_metadata(part.schema.metadata))
