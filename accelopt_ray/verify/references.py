"""Inputs and reference outputs of tasks, computed once per machine and shared by all evaluations on it.

The cache is a folder of entries of ``.npy`` files, which users map instead of loading them: one with the ordinary
inputs of a task, shape and seed, and one with the reference's outputs for each distribution of them. The inputs of the
other distributions differ from the ordinary ones in little or by a factor; they are derived for each use and not kept.
Entries are built in a child process under a file lock and appear by an atomic rename: whoever comes second waits and
then uses the first one's work, and nobody ever sees half an entry. Entries beyond the size cap are removed, the least
recently used first and never one that is in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import numpy as np
import numpy.typing as npt
import platformdirs

from accelopt_ray.devices.child import ChildEnd, ChildTask, run_child
from accelopt_ray.devices.protocol import Limits
from accelopt_ray.outcome import UserError
from accelopt_ray.scratch import scratch_folder
from accelopt_ray.verify import reference_worker
from accelopt_ray.verify.accuracy import Accuracy
from nkibench.distributions import ORDINARY
from nkibench.reference import load_reference
from nkibench.task import Task

CACHE_VARIABLE = "ACCELOPT_RAY_CACHE"
DEFAULT_CAP_BYTES = 8 << 30
# A change of the entries' content or meaning makes a new number, and old entries age out.
_FORMAT = 4
_WORKER_LIMITS = Limits(timeout_s=1800.0, memory_bytes=64 << 30)


@dataclass(frozen=True)
class ReferenceOutput:
    """One reference output.

    Attributes:
        path: ``.npy`` file with its values, or with the sampled rows of them.
        shape: Its full shape.
        dtype: Its NumPy type.
        norm: L2 norm of what the file holds.
        rows_path: ``.npy`` file with the indices of the sampled rows (all axes but the last, flattened); None when the
            file holds everything.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: str
    norm: float
    rows_path: Path | None = None

    def values(self) -> npt.NDArray[Any]:
        """Maps the values, of the full shape or ``(sampled rows, last axis)``."""
        values: npt.NDArray[Any] = np.load(self.path, mmap_mode="r")
        return values

    def rows(self) -> npt.NDArray[Any] | None:
        """Loads the indices of the sampled rows."""
        if self.rows_path is None:
            return None
        rows: npt.NDArray[Any] = np.load(self.rows_path)
        return rows


@dataclass(frozen=True)
class ReferenceSet:
    """Inputs and reference outputs of one seed and distribution, valid while its ``use`` block is open.

    Attributes:
        seed: Seed of the inputs.
        distribution: Name of the input distribution.
        kernel_inputs: Arguments of the kernel: ``.npy`` files and numbers.
        outputs: Reference outputs, in the reference's layout.
        finite: Whether every reference output is finite throughout; what is not finite proves nothing.
        reference_s: How long the reference took when the entry was built.
        accuracy: The reference's own accuracy with such inputs.
    """

    seed: int
    distribution: str
    kernel_inputs: tuple[Union[Path, float, int], ...]
    outputs: tuple[ReferenceOutput, ...]
    finite: bool
    reference_s: float
    accuracy: Accuracy

    def layout(self) -> list[npt.NDArray[Any]]:
        """Arrays with the shapes and types of the reference outputs, which take no memory and hold no values."""
        return [np.broadcast_to(np.zeros((), output.dtype), output.shape) for output in self.outputs]


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
    def use(
        self, task: Task, seed: int, distribution: str = ORDINARY, whole: bool = True, accuracy: bool = False
    ) -> Iterator[ReferenceSet]:
        """Provides reference data, built first if need be, and keeps them from being removed until the block ends.

        Args:
            task: The task.
            seed: Seed of its inputs.
            distribution: Distribution of its inputs.
            whole: Whether outputs are wanted whole even if they are large; otherwise a sample of rows that is secret
                to this machine and depends on seed and distribution.
            accuracy: Whether the reference's own accuracy is wanted as well.

        Raises:
            UserError: The task's reference fails, or the cache folder cannot be written.
        """
        request = {**_located(task), "seed": seed}
        with contextlib.ExitStack() as stack:
            inputs = stack.enter_context(self._held(task, "build_inputs", request))
            request |= {"distribution": distribution, "inputs": str(inputs)}
            outputs = stack.enter_context(
                self._held(
                    task,
                    "build_outputs",
                    {
                        **request,
                        "whole": whole,
                        "accuracy": accuracy,
                        "sample_seed": self.secret_seed(task, f"rows {seed} {distribution}"),
                    },
                )
            )
            if distribution == ORDINARY:
                folder, values = inputs, _read_meta(inputs)["kernel_inputs"]
            else:
                folder = stack.enter_context(scratch_folder(_size_bytes(inputs)))
                values = _run_worker(task, "derive_inputs", {**request, "folder": str(folder)})["kernel_inputs"]
            kernel_inputs = tuple(folder / value if isinstance(value, str) else value for value in values)
            yield _read_outputs(outputs, seed, distribution, kernel_inputs)

    @contextlib.contextmanager
    def _held(self, task: Task, work: str, request: Mapping[str, Any]) -> Iterator[Path]:
        """Provides an entry's folder, filled by a function of the worker if need be, and keeps it until the end."""
        key = _key(task, work, request)
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
                    self._build(task, work, request, key)
                fcntl.flock(lock, fcntl.LOCK_SH)
            os.utime(self._entry(key) / reference_worker.META_NAME)
            yield self._entry(key)
        finally:
            os.close(lock)

    def secret_seed(self, task: Task, purpose: str) -> int:
        """Returns a seed that is always the same on this machine and that no kernel can know."""
        path = self.folder / "secret"
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished = self.folder / f".secret-{uuid.uuid4().hex}"
            unfinished.write_bytes(secrets.token_bytes(32))
            unfinished.chmod(0o600)
            # The first of several processes wins, and all use its secret.
            with contextlib.suppress(FileExistsError):
                os.link(unfinished, path)
            unfinished.unlink()
        text = f"{task.name} {sorted(task.parameters.items())} {purpose}".encode()
        return int.from_bytes(hashlib.sha256(path.read_bytes() + text).digest()[:4], "big") >> 1

    def size_bytes(self) -> int:
        """Returns how much all entries take."""
        return sum(size for _, size, _ in self._entries())

    @property
    def _locks(self) -> Path:
        return self.folder / "locks"

    def _entry(self, key: str) -> Path:
        return self.folder / "references" / key

    def _build(self, task: Task, work: str, request: Mapping[str, Any], key: str) -> None:
        entry = self._entry(key)
        entry.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{key[:16]}-{uuid.uuid4().hex[:8]}-", dir=entry.parent))
        try:
            _run_worker(task, work, {**request, "folder": str(unfinished)})
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
                found.append((meta.stat().st_mtime, _size_bytes(meta.parent), meta.parent))
        return found


def default_folder() -> Path:
    """Returns the cache folder: ``ACCELOPT_RAY_CACHE``, or the user's cache folder for this program."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else Path(platformdirs.user_cache_dir("accelopt-ray"))


def _run_worker(task: Task, work: str, request: Mapping[str, Any]) -> dict[str, Any]:
    result = run_child(
        ChildTask(f"accelopt_ray.verify.reference_worker:{work}", json.dumps(request).encode()), _WORKER_LIMITS
    )
    if result.end is not ChildEnd.ANSWERED:
        cause = result.detail.strip().splitlines()[-1]
        raise UserError(f"{task.reference_path}: the reference could not be computed: {cause}")
    answer: dict[str, Any] = json.loads(result.answer)
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def _read_meta(folder: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((folder / reference_worker.META_NAME).read_text())
    return meta


def _read_outputs(
    folder: Path, seed: int, distribution: str, kernel_inputs: tuple[Union[Path, float, int], ...]
) -> ReferenceSet:
    meta = _read_meta(folder)
    return ReferenceSet(
        seed=seed,
        distribution=distribution,
        kernel_inputs=kernel_inputs,
        outputs=tuple(
            ReferenceOutput(
                path=folder / output["file"],
                shape=tuple(output["shape"]),
                dtype=output["dtype"],
                norm=float(output["norm"]),
                rows_path=folder / output["rows"] if output["rows"] else None,
            )
            for output in meta["outputs"]
        ),
        finite=bool(meta["finite"]),
        reference_s=float(meta["reference_s"]),
        accuracy=Accuracy(**meta["accuracy"]),
    )


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _key(task: Task, work: str, request: Mapping[str, Any]) -> str:
    identity = {
        "format": _FORMAT,
        "work": work,
        "reference": hashlib.sha256(task.reference_path.read_bytes()).hexdigest(),
        "declarations": repr(task.input_declarations),
        "parameters": sorted(task.parameters.items()),
        "request": {name: value for name, value in request.items() if name not in {"location", "parameters", "inputs"}},
        "numpy": np.__version__,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def _located(task: Task) -> dict[str, Any]:
    return {
        "location": _absolute_location(task),
        "parameters": dict(task.parameters) if _takes_parameters(task) else {},
    }


def _absolute_location(task: Task) -> str:
    path, separator, name = task.location.partition("#")
    if separator:
        return f"{Path(path).resolve()}#{name}"
    return task.location


def _takes_parameters(task: Task) -> bool:
    return load_reference(task.reference_path).takes_parameters()
