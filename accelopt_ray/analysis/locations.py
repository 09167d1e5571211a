"""Where trajectories are: from paths and patterns to folders that hold tables, and the runs in each."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.fs as pafs

from accelopt_ray.outcome import UserError
from accelopt_ray.trajectory.reader import trajectory_root
from accelopt_ray.trajectory.schema import TABLES
from accelopt_ray.trajectory.writer import PARTITION_KEY


@dataclass(frozen=True)
class Store:
    """A folder with tables.

    Attributes:
        location: As :func:`accelopt_ray.trajectory.read_table` takes it.
        run_ids: Runs that have a partition there.
    """

    location: str
    run_ids: frozenset[str]


def find_stores(paths: Iterable[str | Path]) -> list[Store]:
    """Finds all trajectories that the paths lead to.

    Args:
        paths: Run or sweep folders, folders of such folders, URIs, or patterns with ``*``.

    Raises:
        UserError: A path leads to no trajectory, or a run is found in two places.
    """
    locations = list(dict.fromkeys(location for path in paths for location in _locations(str(path))))
    stores = [Store(location, _partitions(location)) for location in locations]
    owner: dict[str, str] = {}
    for store in stores:
        for run_id in store.run_ids:
            if run_id in owner:
                raise UserError(
                    f"run {run_id} is in {owner[run_id]} and in {store.location}: give one of them, "
                    "or its rows would count twice"
                )
            owner[run_id] = store.location
    return stores


def leads_somewhere(path: str) -> bool:
    """Whether a path is a URI, a pattern or something that exists here, as opposed to a mere name."""
    return "://" in path or any(sign in path for sign in "*?[") or Path(path).exists()


def _locations(path: str) -> list[str]:
    if "://" in path:
        trajectory_root(path)
        return [path]
    if any(sign in path for sign in "*?[") and not Path(path).exists():
        matches = [match for match in sorted(glob.glob(path, recursive=True)) if Path(match).is_dir()]
        found = [location for match in matches for location in _below(Path(match))]
        if not found:
            raise UserError(f"no folder that matches {path} holds a trajectory: check the pattern")
        return found
    if not Path(path).exists():
        raise UserError(f"there is no folder {path}: give the output folder of a run or sweep")
    found = _below(Path(path))
    if not found:
        trajectory_root(path)  # says so in its own words
    return found


def _below(folder: Path) -> list[str]:
    """The folder itself if it holds a trajectory, else those directly in it that do."""
    if _holds_tables(folder):
        return [str(folder.absolute())]
    if not folder.is_dir():
        return []
    return [str(child.absolute()) for child in sorted(folder.iterdir()) if _holds_tables(child)]


def _holds_tables(folder: Path) -> bool:
    if folder.name == "trajectory" and any((folder / table).is_dir() for table in TABLES):
        return True
    return any((folder / "trajectory" / table).is_dir() or (folder / table).is_dir() for table in TABLES)


def _partitions(location: str) -> frozenset[str]:
    filesystem, root = trajectory_root(location)
    found = []
    for table in TABLES:
        found += filesystem.get_file_info(pafs.FileSelector(f"{root}/{table}", allow_not_found=True))
    names = [info.base_name for info in found if info.type == pafs.FileType.Directory]
    return frozenset(name.split("=", 1)[1] for name in names if name.startswith(f"{PARTITION_KEY}="))
