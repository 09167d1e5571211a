"""Evaluations that are never made twice: results by what they depend on, shared by all runs on a machine.

One small file per result, named by the hash of its key, written beside and renamed: any number of processes may read
and write at once, also on a network file system, and of two that evaluate the same kernel at the same time either may
win. The key holds the kernel's canonical form, the task's files and shape, device and toolchain, the check, and the
version of this program, so that a change of any of them is a different evaluation.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from accelopt_ray.devices.protocol import Device
from accelopt_ray.evaluation.evaluate import fingerprint_sha256
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.outcome import EvaluationOutcome, UserError
from accelopt_ray.search.canonical import canonical_sha256
from accelopt_ray.verify.references import default_folder
from accelopt_ray.verify.registry import get_check
from accelopt_ray.version import code_version
from nkibench.task import Task, TaskError, load_task

STORE_VARIABLE = "ACCELOPT_RAY_STORE"
"""Names the store's folder; ``off`` switches it off."""

ANSWERED_FROM = "store:"
"""Begins ``answered_from`` of results that were not evaluated again; the id of the first evaluation follows."""

# Others follow from load and luck: the same kernel may fare better next time.
_LASTING = frozenset(
    {
        EvaluationOutcome.CORRECT,
        EvaluationOutcome.INCORRECT,
        EvaluationOutcome.COMPILE_ERROR,
        EvaluationOutcome.UNSUPPORTED,
        EvaluationOutcome.PRECISION_VIOLATION,
        EvaluationOutcome.REJECTED,
    }
)


class EvaluationStore:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        """Names the folder; it is made with the first result."""
        self.folder = folder

    @classmethod
    def from_environment(cls) -> EvaluationStore | None:
        """The store that the environment names, by default one in the cache folder; None when switched off."""
        named = os.environ.get(STORE_VARIABLE, "")
        if named == "off":
            return None
        return cls(Path(named) if named else default_folder() / "evaluations")

    def get(self, key: str) -> EvaluationResult | None:
        """Returns the result of a key; a file that cannot be read counts as none."""
        try:
            return EvaluationResult.from_json(self._path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, result: EvaluationResult) -> bool:
        """Keeps a result, if it is one that would come out the same again and the folder can be written.

        Returns:
            Whether it was kept.
        """
        if result.outcome not in _LASTING:
            return False
        path = self._path(key)
        unfinished = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(result.to_json(), encoding="utf-8")
            unfinished.replace(path)
        except OSError:  # a full or read-only disk costs evaluations, not the run
            return False
        return True

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


def evaluation_key(job: EvaluationJob, device: Device) -> str | None:
    """Returns the key of an evaluation, or None for a kernel that its very text disqualifies.

    Raises:
        UserError: The task or the check does not exist or is defective.
    """
    try:
        task = load_task(job.task.location, dict(job.task.parameters))
    except TaskError as error:
        raise UserError(str(error)) from error
    # What a check says of a text may depend on comments, which the canonical form leaves out.
    if get_check(job.check, job.precision).inspect_source(job.source, task.entry) is not None:
        return None
    content = {
        "source": canonical_sha256(job.source),
        "task": _task_identity(task),
        "device": fingerprint_sha256(device),
        "check": [job.check, str(job.stage), job.precision, list(job.seeds)],
        "parent": canonical_sha256(job.parent_source) if job.parent_source else "",
        "harness": code_version(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def evaluate_once(
    job: EvaluationJob,
    device: Device,
    store: EvaluationStore,
    evaluate: Callable[[EvaluationJob], EvaluationResult],
) -> EvaluationResult:
    """Answers from the store, or evaluates and keeps the result.

    Args:
        job: What to evaluate.
        device: Where ``evaluate`` does it.
        store: Where results are kept.
        evaluate: Evaluates a job that the store does not know.

    Raises:
        UserError: The task or the check of the job does not exist or is defective.
    """
    key = evaluation_key(job, device)
    known = None if key is None else store.get(key)
    if known is not None:
        first = known.answered_from or f"{ANSWERED_FROM}{known.evaluation_id}"
        return replace(known, evaluation_id=job.evaluation_id, answered_from=first, queue_s=0.0)
    result = evaluate(job)
    if key is not None:
        store.put(key, result)
    return result


def _task_identity(task: Task) -> list[object]:
    files = (task.reference_source(), repr(task.tolerance), task.entry)
    digest = hashlib.sha256("\0".join(files).encode("utf-8", "surrogatepass")).hexdigest()
    return [task.name, sorted(task.parameters.items()), digest]
