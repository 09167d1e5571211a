"""Inputs and reference outputs of tasks, computed once per machine and shared by all evaluations on it.

The cache is a folder of entries, one per task, shape, seed and distribution. An entry holds the kernel's inputs and the
reference's outputs as ``.npy`` files, so that users map them instead of loading them. Entries are built in a child
process under a file lock and appear by an atomic rename: whoever comes second waits and then uses the first one's work,
and nobody ever sees half an entry. Entries beyond the size cap are removed, the least recently used first and never one
that is in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import numpy as np
import numpy.typing as npt
import platformdirs

from accelopt_ray.devices.child import ChildEnd, ChildTask, run_child
from accelopt_ray.devices.protocol import Limits
from accelopt_ray.outcome import UserError
from accelopt_ray.verify import reference_worker
from nkibench.distributions import ORDINARY
from nkibench.reference import load_reference
from nkibench.task import Task

CACHE_VARIABLE = "ACCELOPT_RAY_CACHE"
DEFAULT_CAP_BYTES = 8 << 30
# A change of the entries' content or meaning makes a new number, and old entries age out.
_FORMAT = 1
_BUILD_LIMITS = Limits(timeout_s=1800.0, memory_bytes=64 << 30)


@dataclass(frozen=True)
class ReferenceSet:
    """One entry of the cache, valid while its ``use`` block is open.

    Attributes:
        seed: Seed of the inputs.
        distribution: Name of the input distribution.
        kernel_inputs: Arguments of the kernel: ``.npy`` files and numbers.
        outputs: Reference outputs as ``.npy`` files, in the reference's layout.
        output_norms: Their L2 norms.
        finite: Whether every reference output is finite throughout; what is not finite proves nothing.
        reference_s: How long the reference took when the entry was built.
    """

    seed: int
    distribution: str
    kernel_inputs: tuple[Union[Path, float, int], ...]
    outputs: tuple[Path, ...]
    output_norms: tuple[float, ...]
    finite: bool
    reference_s: float

    def output_arrays(self) -> list[npt.NDArray[Any]]:
        """Maps the reference outputs."""
        return [np.load(path, mmap_mode="r") for path in self.outputs]


class ReferenceCache:
    """Reference data below one folder; any number of processes may use it at once."""

    def __init__(self, folder: Path | None = None, cap_bytes: int = DEFAULT_CAP_BYTES) -> None:
        """Opens a cache.

        Args:
            folder: Where it lies; None for ``ACCELOPT_RAY_CACHE`` or the user's cache folder.
            cap_bytes: Bytes to keep at most. Entries in use may exceed it.
        """
        self.folder = folder or default_folder()
        self.cap_bytes = cap_bytes

    @contextlib.contextmanager
    def use(self, task: Task, seed: int, distribution: str = ORDINARY) -> Iterator[ReferenceSet]:
        """Provides an entry, built first if need be, and keeps it from being removed until the block ends.

        Raises:
            UserError: The task's reference fails, or the cache folder cannot be written.
        """
        key = _key(task, seed, distribution)
        try:
            self._locks.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._locks / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            text = f"the cache folder {self.folder} cannot be written ({error.strerror})"
            raise UserError(f"{text}; set {CACHE_VARIABLE} to one that can") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            while not (self._entry(key) / reference_worker.META_NAME).is_file():
                # Not an upgrade of the shared lock: flock gives that up first, so another builder may come in between,
                # which is why the loop looks again.
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (self._entry(key) / reference_worker.META_NAME).is_file():
                    self._build(task, seed, distribution, key)
                fcntl.flock(lock, fcntl.LOCK_SH)
            os.utime(self._entry(key) / reference_worker.META_NAME)
            yield _read_entry(self._entry(key), seed, distribution)
        finally:
            os.close(lock)

    def size_bytes(self) -> int:
        """Returns how much all entries take."""
        return sum(size for _, size, _ in self._entries())

    @property
    def _locks(self) -> Path:
        return self.folder / "locks"

    def _entry(self, key: str) -> Path:
        return self.folder / "references" / key

    def _build(self, task: Task, seed: int, distribution: str, key: str) -> None:
        entry = self._entry(key)
        entry.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{key[:16]}-{uuid.uuid4().hex[:8]}-", dir=entry.parent))
        try:
            request = {
                "location": _absolute_location(task),
                "parameters": dict(task.parameters) if _takes_parameters(task) else {},
                "seed": seed,
                "distribution": distribution,
                "folder": str(unfinished),
            }
            result = run_child(
                ChildTask("accelopt_ray.verify.reference_worker:build", json.dumps(request).encode()), _BUILD_LIMITS
            )
            if result.end is not ChildEnd.ANSWERED:
                cause = result.detail.strip().splitlines()[-1]
                raise UserError(f"{task.reference_path}: the reference could not be computed: {cause}")
            answer = json.loads(result.answer)
            if "error" in answer:
                raise UserError(answer["error"])
            os.rename(unfinished, entry)
        except OSError as error:
            raise UserError(f"the cache folder {self.folder} cannot be written ({error})") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        self._evict(keep=key)

    def _evict(self, keep: str) -> None:
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self.cap_bytes:
                return
            if path.name != keep and self._remove_unused(path):
                total -= size

    def _remove_unused(self, path: Path) -> bool:
        lock = os.open(self._locks / path.name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        else:
            # Renamed first: a reader that was faster than the lock never sees an entry without some of its files.
            doomed = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)
            return True
        finally:
            os.close(lock)

    def _entries(self) -> list[tuple[float, int, Path]]:
        """Last use, bytes and folder of each entry."""
        found = []
        for meta in (self.folder / "references").glob(f"*/{reference_worker.META_NAME}"):
            with contextlib.suppress(FileNotFoundError):
                size = sum(path.stat().st_size for path in meta.parent.iterdir())
                found.append((meta.stat().st_mtime, size, meta.parent))
        return found


def default_folder() -> Path:
    """Returns the cache folder: ``ACCELOPT_RAY_CACHE``, or the user's cache folder for this program."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else Path(platformdirs.user_cache_dir("accelopt-ray"))


def _read_entry(folder: Path, seed: int, distribution: str) -> ReferenceSet:
    meta = json.loads((folder / reference_worker.META_NAME).read_text())
    return ReferenceSet(
        seed=seed,
        distribution=distribution,
        kernel_inputs=tuple(folder / value if isinstance(value, str) else value for value in meta["kernel_inputs"]),
        outputs=tuple(folder / name for name in meta["outputs"]),
        output_norms=tuple(float(value) for value in meta["output_norms"]),
        finite=bool(meta["finite"]),
        reference_s=float(meta["reference_s"]),
    )


def _key(task: Task, seed: int, distribution: str) -> str:
    identity = {
        "format": _FORMAT,
        "reference": hashlib.sha256(task.reference_path.read_bytes()).hexdigest(),
        "inputs": repr(task.input_declarations),
        "parameters": sorted(task.parameters.items()),
        "seed": seed,
        "distribution": distribution,
        "numpy": np.__version__,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _absolute_location(task: Task) -> str:
    path, separator, name = task.location.partition("#")
    if separator:
        return f"{Path(path).resolve()}#{name}"
    return task.location


def _takes_parameters(task: Task) -> bool:
    return load_reference(task.reference_path).takes_parameters()
