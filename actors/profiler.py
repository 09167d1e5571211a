"""The profiler: a worker that owns one NeuronCore or one simulator slot and evaluates kernels on it, one at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Union

import ray

from accelopt_ray.devices.health import check_health
from accelopt_ray.devices.protocol import Artifact, Device, Failure
from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import compile_job, evaluate
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.evaluation.store import EvaluationStore, evaluate_once
from accelopt_ray.verify.references import ReferenceCache
from actors.cluster import NEURON_RESOURCE

CORES_VARIABLE = "NEURON_RT_VISIBLE_CORES"
"""Tells the Neuron runtime which cores are ours. Without it the runtime takes all of them, other actors' included."""

Compiled = Union[Artifact, Failure]
Evaluator = Callable[..., EvaluationResult]
EvaluatorFactory = Callable[[], Evaluator]
"""Made in the driver, called in the worker, where the device and its caches are to live. What it makes takes a job, and
what a compile worker made of it where there are such; it may also have methods ``check_health() -> str`` and
``compile(job)``."""


class Profiler:
    """A Ray actor that evaluates. Candidate code runs in child processes of the device, never in this one."""

    def __init__(self, make_evaluator: EvaluatorFactory, needs_core: bool, slot: int) -> None:
        """Prepares the device.

        Args:
            make_evaluator: Gives the function that evaluates.
            needs_core: Whether the device runs on a NeuronCore of this machine.
            slot: Number of the simulator slot, where no core names the worker.

        Raises:
            RuntimeError: No core was assigned to this process.
        """
        cores = os.environ.get(CORES_VARIABLE, "")
        if needs_core and not cores:
            raise RuntimeError(
                f"{CORES_VARIABLE} is not set in the profiler's process: it would take every core of this machine; "
                f"start it with the Ray resource {NEURON_RESOURCE}: 1"
            )
        self._node = str(ray.get_runtime_context().get_node_id())
        # Every node has a core 0.
        self._core = f"core {cores} of {self._node[-8:]}" if needs_core else f"slot {slot}"
        self._evaluate = make_evaluator()

    def core(self) -> str:
        """What this worker owns; answered once it is ready."""
        return self._core

    def node(self) -> str:
        """Id of the Ray node where this worker is."""
        return self._node

    def check_health(self) -> str:
        """What is wrong with the core, as its evaluator finds by a known kernel; nothing if all is well."""
        check = getattr(self._evaluate, "check_health", None)
        return str(check()) if check is not None else ""

    def evaluate(self, job: EvaluationJob, compiled: Compiled | None = None) -> EvaluationResult:
        """Evaluates one kernel to its final result.

        Args:
            job: The kernel.
            compiled: What a compile worker made of it; None to compile here.
        """
        result = self._evaluate(job) if compiled is None else self._evaluate(job, compiled)
        return result if result.core else replace(result, core=self._core)


def start_profiler(make_evaluator: EvaluatorFactory, needs_core: bool, slot: int) -> Any:
    """Starts a profiler somewhere in the cluster and returns its actor handle at once.

    It never restarts by itself and no call of it is replayed: the pool replaces a lost worker and decides what becomes
    of the candidate.
    """
    resources = {"resources": {NEURON_RESOURCE: 1}, "num_cpus": 0} if needs_core else {"num_cpus": 1}
    actor = ray.remote(Profiler).options(max_restarts=0, max_task_retries=0, **resources)
    return actor.remote(make_evaluator, needs_core, slot)


class DeviceEvaluator:
    """Evaluates on one device, nothing twice."""

    def __init__(self, device: Device) -> None:
        """Takes the device, on the core of this process."""
        self._device = device
        self._references = ReferenceCache()
        self._store = EvaluationStore.from_environment()

    def __call__(self, job: EvaluationJob, compiled: Compiled | None = None) -> EvaluationResult:
        """Evaluates one job, or answers it from the store."""

        def evaluate_here(job: EvaluationJob) -> EvaluationResult:
            return evaluate(job, self._device, self._references, compiled)

        if self._store is None:
            return evaluate_here(job)
        return evaluate_once(job, self._device, self._store, evaluate_here)

    def compile(self, job: EvaluationJob) -> Compiled:
        """Compiles one job's kernel; needs no core where the device needs none for that."""
        return compile_job(job, self._device)

    def check_health(self) -> str:
        """What is wrong with the device; nothing if all is well."""
        return check_health(self._device)


def device_evaluator(device_name: str) -> DeviceEvaluator:
    """Prepares a device in this process."""
    return DeviceEvaluator(get_device(device_name))
