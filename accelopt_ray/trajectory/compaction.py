"""Compaction: the many small parts of a run's tables become one part each, without a moment of missing rows.

The merged part takes the name of the first part that it replaces, in one rename, and names all of them in its metadata;
then the others are removed. A crash in between leaves parts whose rows stand twice on disk; the reader of this package
leaves such parts out, and the next compaction removes them. A run that is going on is left alone.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from accelopt_ray.outcome import UserError
from accelopt_ray.trajectory.lock import RunLock
from accelopt_ray.trajectory.reader import REPLACES_KEY, NewerSchemaError, part_paths, trajectory_root
from accelopt_ray.trajectory.schema import SCHEMA_VERSION, TABLES, VERSION_KEY, named_table

ROW_GROUP_ROWS = 16_384
"""Rows of a merged part that are held in memory at once; wide enough to read well, narrow enough for prompts."""


@dataclass(frozen=True)
class Compaction:
    """What a compaction did.

    Attributes:
        parts_before: Part files found.
        parts_after: Part files left.
        bytes_before: Their size.
        bytes_after: Size of those left.
        damaged: Parts that could not be read; they were left as they are.
    """

    parts_before: int
    parts_after: int
    bytes_before: int
    bytes_after: int
    damaged: tuple[str, ...]


def compact(location: str | Path) -> Compaction:
    """Merges each run's parts of each table into one.

    Raises:
        UserError: The folder holds no trajectory, is not on this machine's file system, or is being written by a run.
        NewerSchemaError: A part is of a newer schema version; nothing of its partition was changed.
        OSError: The file system refused.
    """
    filesystem, root = trajectory_root(location)
    if not isinstance(filesystem, pafs.LocalFileSystem):
        raise UserError(f"{location} is not a local folder: copy the trajectory here to compact it")
    lock = RunLock(Path(root))
    lock.acquire()
    try:
        return _compact_all(root)
    finally:
        lock.release()


def _compact_all(root: str) -> Compaction:
    filesystem = pafs.LocalFileSystem()
    before = _parts_below(root)
    bytes_before = sum(path.stat().st_size for path in before)
    damaged: list[str] = []
    for table in TABLES:
        for folder in sorted({path.parent for path in before if path.parent.parent.name == table}):
            damaged += _compact_partition(filesystem, table, folder)
    after = _parts_below(root)
    return Compaction(
        parts_before=len(before),
        parts_after=len(after),
        bytes_before=bytes_before,
        bytes_after=sum(path.stat().st_size for path in after),
        damaged=tuple(damaged),
    )


def _parts_below(root: str) -> list[Path]:
    filesystem = pafs.LocalFileSystem()
    return [Path(path) for table in TABLES for path in part_paths(filesystem, f"{root}/{table}")]


def _compact_partition(filesystem: pafs.FileSystem, table: str, folder: Path) -> list[str]:
    """Merges one partition and returns its damaged parts."""
    readable: list[Path] = []
    replaced: set[str] = set()
    damaged: list[str] = []
    for path in map(Path, part_paths(filesystem, str(folder))):
        try:
            metadata = pq.read_schema(path).metadata or {}
        except (OSError, pa.ArrowException):
            damaged.append(str(path))
            continue
        if int(metadata.get(VERSION_KEY, b"0")) > SCHEMA_VERSION:
            raise NewerSchemaError(f"{path} is of a newer trajectory schema: upgrade accelopt-ray to compact it")
        replaced.update(name for name in json.loads(metadata.get(REPLACES_KEY, b"[]")) if name != path.name)
        readable.append(path)
    leftovers = [path for path in readable if path.name in replaced]
    current = [path for path in readable if path.name not in replaced]
    if len(current) > 1:
        failed = _merge(table, folder, current)
        if failed is not None:
            return [*damaged, failed]
        leftovers += current[1:]
    for path in leftovers:
        path.unlink()
    _sync_folder(folder)
    return damaged


def _merge(table: str, folder: Path, parts: Sequence[Path]) -> str | None:
    """Writes the merged part over the first of the parts.

    Returns:
        None; or the part whose content proved damaged, in which case nothing was changed.
    """
    schema = named_table(table).schema
    names = json.dumps([path.name for path in parts]).encode()
    merged = schema.with_metadata({**(schema.metadata or {}), REPLACES_KEY: names})
    temporary = folder / f".compacted-{uuid.uuid4().hex[:12]}.tmp"
    try:
        with pq.ParquetWriter(temporary, merged, compression="zstd") as writer:
            waiting: list[pa.Table] = []
            for path in parts:
                try:
                    part = pq.ParquetFile(path).read()
                except (OSError, pa.ArrowException):
                    return str(path)
                waiting.append(_in_schema(part, merged))
                if sum(map(len, waiting)) >= ROW_GROUP_ROWS:
                    writer.write_table(pa.concat_tables(waiting), row_group_size=ROW_GROUP_ROWS)
                    waiting = []
            if waiting:
                writer.write_table(pa.concat_tables(waiting), row_group_size=ROW_GROUP_ROWS)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(parts[0])
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(folder)
    return None


def _in_schema(part: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        part[field.name].cast(field.type) if field.name in part.column_names else pa.nulls(len(part), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
