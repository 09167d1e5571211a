"""A run's data on disk: versioned Parquet tables that are readable at any moment."""

from __future__ import annotations

from accelopt_ray.trajectory.compaction import Compaction, compact
from accelopt_ray.trajectory.digest import DIGEST_COLUMNS, trajectory_digest
from accelopt_ray.trajectory.journal import Journal
from accelopt_ray.trajectory.lock import RunLock
from accelopt_ray.trajectory.reader import DamagedPartWarning, ManyPartsWarning, NewerSchemaError, read_table, run_ids
from accelopt_ray.trajectory.schema import SCHEMA_VERSION, TABLES
from accelopt_ray.trajectory.writer import TrajectoryWriter, text_sha256

__all__ = [
    "DIGEST_COLUMNS",
    "SCHEMA_VERSION",
    "TABLES",
    "Compaction",
    "DamagedPartWarning",
    "Journal",
    "ManyPartsWarning",
    "NewerSchemaError",
    "RunLock",
    "TrajectoryWriter",
    "compact",
    "read_table",
    "run_ids",
    "text_sha256",
    "trajectory_digest",
]
