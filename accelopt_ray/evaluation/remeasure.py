"""Measuring a candidate against its parent on one core, so that a small gain can be believed.

Two latencies that were measured at different times on different cores differ by drift and by the cores. A candidate
that is about to enter the beam is therefore measured again in turns with its parent (A, B, A, B), and promoted only if
it is faster by a margin above what the turns differ among themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from accelopt_ray.devices.noise import Comparison, compare_interleaved
from accelopt_ray.devices.protocol import Artifact, Device, Failure, KernelRequest, Measurement, TensorSpec
from accelopt_ray.evaluation.records import EvaluationJob
from accelopt_ray.outcome import UserError
from accelopt_ray.verify.references import ReferenceCache
from nkibench.task import Task, TaskError, load_task

DEFAULT_TURNS = 3
_SEED = 0


@dataclass(frozen=True)
class RemeasureJob:
    """Two kernels of one task to tell apart.

    Attributes:
        child: The candidate, as it was evaluated.
        parent_source: Text of the kernel it came from.
        turns: How often each is measured.
    """

    child: EvaluationJob
    parent_source: str
    turns: int = DEFAULT_TURNS


def remeasure(job: RemeasureJob, device: Device, references: ReferenceCache) -> Union[Comparison, Failure]:
    """Measures both kernels in turns.

    A device that predicts has no noise and would only repeat itself; it measures each once.

    Args:
        job: The kernels.
        device: The core to measure both on.
        references: Where the inputs come from.

    Returns:
        All latencies, or the first failure of either kernel.

    Raises:
        UserError: The task does not exist or is defective.
    """
    try:
        task = load_task(job.child.task.location, dict(job.child.task.parameters))
        specs = task.input_specs()
    except TaskError as error:
        raise UserError(str(error)) from error
    inputs = tuple(TensorSpec(*spec) if isinstance(spec, tuple) else spec for spec in specs)
    artifacts = []
    for source in (job.parent_source, job.child.source):
        artifact = device.compile(KernelRequest(source, inputs, task.entry), job.child.limits)
        if isinstance(artifact, Failure):
            return artifact
        artifacts.append(artifact)
    try:
        if device.predicts_latency:
            once = [_latency_ms(device, artifact, (), job) for artifact in artifacts]
            return Comparison((once[0],), (once[1],))
        return _in_turns(job, device, references, task, artifacts)
    except _KernelFailed as failed:
        return failed.failure


class _KernelFailed(Exception):
    """Carries a failure out of the turns."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error_text)
        self.failure = failure


def _in_turns(
    job: RemeasureJob, device: Device, references: ReferenceCache, task: Task, artifacts: Sequence[Artifact]
) -> Comparison:
    parent, child = artifacts
    with references.use(task, _SEED) as reference:
        given = reference.kernel_inputs
        return compare_interleaved(
            lambda: _latency_ms(device, parent, given, job), lambda: _latency_ms(device, child, given, job), job.turns
        )


def _latency_ms(
    device: Device, artifact: Artifact, inputs: Sequence[Union[Path, float, int]], job: RemeasureJob
) -> float:
    measured = device.measure(artifact, inputs, job.child.limits)
    if isinstance(measured, Measurement):
        return measured.latency_ms
    raise _KernelFailed(measured)
