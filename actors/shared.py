"""What the runs of a sweep share: one pool of profilers for all, and one offline rewriter."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.elasticity import SlotDemand
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.outcome import UserError
from actors.pool import ProfilerPool
from actors.pool_state import PoolStatus
from actors.pools import findable
from actors.profiler import Compiled, DeviceEvaluator, EvaluatorFactory, device_evaluator, start_profiler

_CONCURRENT_CALLS = 100_000
"""Evaluations that may wait in the pool at once, those of all runs together."""


@dataclass(frozen=True)
class Shared:
    """What a run uses instead of starting its own.

    Attributes:
        pool: Handle of a :class:`PoolHost`.
        rewriter: The offline rewriter, for runs without models.
        hosted_urls: Where the hosted models answer, by their names.
    """

    pool: Any
    rewriter: ModelEndpoint | None = None
    hosted_urls: Mapping[str, Sequence[str]] = field(default_factory=dict)


class PoolHost:
    """An asynchronous Ray actor around a :class:`~actors.pool.ProfilerPool` that outlives the runs."""

    def __init__(
        self, make_evaluator: EvaluatorFactory, needs_core: bool, slots: int, first_slots: int, keep_s: float
    ) -> None:
        """Prepares; no profiler is started before a run asks for it.

        A profiler for which there is no place yet is what the autoscaler sees as demand. So their number follows the
        evaluations that wait, and nodes that none has needed for a while are left.

        Args:
            make_evaluator: Evaluates.
            needs_core: Whether each profiler takes a NeuronCore; otherwise a CPU.
            slots: Profilers at most.
            first_slots: Profilers to begin with.
            keep_s: Seconds that nothing needs a profiler before it is ended.
        """
        self._start_worker = partial(start_profiler, make_evaluator, needs_core)
        self._first_slots = first_slots
        self._demand = SlotDemand(slots, keep_s)
        self._pool: ProfilerPool | None = None
        self._started: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once one profiler is ready; may be called by every run."""
        if self._started is None:
            workers = [self._start_worker(slot) for slot in range(self._first_slots)]
            self._pool = ProfilerPool(workers, self._start_worker, demand=self._demand)
            self._started = asyncio.get_running_loop().create_task(self._pool.start())
        await asyncio.shield(self._started)

    async def evaluate(self, job: EvaluationJob, claimant: str) -> EvaluationResult:
        """Evaluates; claimants who wait take turns."""
        if self._pool is None:
            await self.start()
        assert self._pool is not None
        return await self._pool.evaluate(job, claimant)

    async def pool_status(self) -> PoolStatus | None:
        """What the pool is doing; None before the first run has asked for it."""
        return None if self._pool is None else self._pool.status()


class SharedPool:
    """One run's view of a :class:`PoolHost`."""

    def __init__(self, host: Any, run_id: str) -> None:
        """Takes the host's handle and the name under which the run takes its turns."""
        self._host = host
        self._run_id = run_id

    async def start(self) -> None:
        """Returns once one profiler of the pool is ready."""
        await self._host.start.remote()

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        """As :meth:`ProfilerPool.evaluate`; a run that ends takes what it waits for out of the pool.

        Raises:
            UserError: The evaluation found the user's set-up defective.
        """
        reference = self._host.evaluate.remote(job, f"{self._run_id}/{job.task_name}")
        try:
            result: EvaluationResult = await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from None
            raise
        return result

    async def close(self) -> None:
        """Leaves the pool to the other runs."""


def start_pool(
    devices: Sequence[str],
    slots: int,
    first_slots: int,
    keep_s: float,
    make_evaluator: EvaluatorFactory | None = None,
) -> Any:
    """Starts a pool for devices of one kind beside the caller and returns its handle at once.

    Args:
        devices: Simulated devices, or ``neuron`` alone.
        slots: Evaluations at once, at most.
        first_slots: Profilers to begin with.
        keep_s: Seconds that nothing needs a profiler before it is ended.
        make_evaluator: Evaluates instead of the devices.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": here, "max_concurrency": _CONCURRENT_CALLS}
    options |= findable(f"shared-{uuid.uuid4().hex[:8]}")
    evaluator, needs_core = make_evaluator or AnyDeviceEvaluator, "neuron" in devices
    return ray.remote(PoolHost).options(**options).remote(evaluator, needs_core, slots, first_slots, keep_s)


class AnyDeviceEvaluator:
    """Evaluates on whatever device a job names, each prepared with its first job."""

    def __init__(self) -> None:
        self._evaluators: dict[str, DeviceEvaluator] = {}

    def __call__(self, job: EvaluationJob, compiled: Compiled | None = None) -> EvaluationResult:
        """Evaluates one job."""
        return self._evaluator(job)(job, compiled)

    def compile(self, job: EvaluationJob) -> Compiled:
        """Compiles one job's kernel."""
        return self._evaluator(job).compile(job)

    def check_health(self) -> str:
        """What is wrong with the devices in use; nothing if all is well."""
        faults = (evaluator.check_health() for evaluator in self._evaluators.values())
        return next((fault for fault in faults if fault), "")

    def _evaluator(self, job: EvaluationJob) -> DeviceEvaluator:
        if job.device not in self._evaluators:
            self._evaluators[job.device] = device_evaluator(job.device)
        return self._evaluators[job.device]
