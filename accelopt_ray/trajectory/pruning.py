"""Taking rows back: a resumed run withdraws what followed from a call that it is about to ask again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from accelopt_ray.trajectory.schema import named_table
from accelopt_ray.trajectory.writer import PART_NAME, PARTITION_KEY

Row = Mapping[str, object]


def drop_rows(root: Path, run_id: str, table: str, columns: Sequence[str], dropped: Callable[[Row], bool]) -> int:
    """Rewrites the parts of a run's table that hold certain rows, each in one rename.

    Killed in between, some parts still hold such rows; called again, it drops the rest.

    Args:
        root: The trajectory's folder.
        run_id: The run.
        table: The table.
        columns: Columns that ``dropped`` looks at.
        dropped: Whether a row is to go.

    Returns:
        Rows dropped. Damaged parts are left as they are.

    Raises:
        OSError: The file system refused.
    """
    folder = root / table / f"{PARTITION_KEY}={run_id}"
    named_table(table)
    count = 0
    for path in sorted(folder.glob("part-*")) if folder.is_dir() else []:
        if PART_NAME.match(path.name) is None:
            continue
        try:
            part = pq.ParquetFile(path).read()
        except (OSError, pa.ArrowException):
            continue
        present = [column for column in columns if column in part.column_names]
        kept = [not dropped(row) for row in part.select(present).to_pylist()]
        if all(kept):
            continue
        count += kept.count(False)
        _replace(path, part.filter(pa.array(kept)))
    return count


def remove_leftovers(root: Path, run_id: str) -> None:
    """Removes temporary files of writes that a kill has interrupted."""
    for path in root.glob(f"*/{PARTITION_KEY}={run_id}/.*.tmp"):
        path.unlink(missing_ok=True)


def _replace(path: Path, part: pa.Table) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        pq.write_table(part, temporary, compression="zstd")
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
