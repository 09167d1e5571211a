"""The profiler pool: each job to a free worker, each lost worker replaced, no candidate blamed for a worker's death."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.outcome import EvaluationOutcome, UserError
from accelopt_ray.sharing import FairQueue

MAX_DISPATCHES = 3
"""A job whose workers die or fail this often is given up: by then it is more likely the cause than the victim."""

_STAGES_PER_EVALUATION = 30
"""More stages than any check has. Each stage has its own deadline inside the worker; beyond all of them together the
worker itself is stuck."""

_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Ray colours its error texts, also where they end in a table."""


@dataclass
class PoolStatistics:
    """Counts since the pool's start."""

    evaluated: int = 0
    workers_lost: int = 0
    retried: int = 0


class Pool(Protocol):
    """Where a run's evaluations go."""

    async def start(self) -> None:
        """Returns once something can be evaluated."""

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        """Returns the job's final result."""

    async def close(self) -> None:
        """Lets go of what belongs to the run alone."""


class ProfilerPool:
    """Dispatches evaluations to profiler actors. All methods belong to one event loop."""

    def __init__(self, workers: Sequence[Any], start_worker: Callable[[int], Any]) -> None:
        """Takes workers over.

        Args:
            workers: Handles of :class:`~actors.profiler.Profiler` actors, perhaps still starting.
            start_worker: Starts a replacement for the worker of a slot.

        Raises:
            ValueError: There is no worker.
        """
        if not workers:
            raise ValueError("a pool needs at least one worker")
        self.statistics = PoolStatistics()
        self._start_worker = start_worker
        self._workers = dict(enumerate(workers))
        self._idle: FairQueue[int] = FairQueue()
        self._preparing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Returns once one worker is ready; the others join when they are.

        Raises:
            RuntimeError: Not one of the workers could start; the message is the last one's.
        """
        answers = [asyncio.ensure_future(_answer(worker.core.remote())) for worker in self._workers.values()]
        for slot, answer in enumerate(answers):
            self._prepare(self._admit(slot, answer))
        fault = ""
        for next_answer in asyncio.as_completed(answers):
            try:
                await next_answer
            except RayError as error:
                fault = str(error)
            else:
                return
        raise RuntimeError(f"no profiler could start: {_ANSI_COLOUR.sub('', fault)}")

    async def evaluate(self, job: EvaluationJob, claimant: str | None = None) -> EvaluationResult:
        """Returns the job's final result.

        Claimants who wait take turns; each of a run's tasks is one unless the caller names another. The result's
        ``queue_s`` is the time before the last dispatch. A job that outlives several workers ends as ``crashed`` with
        reason ``worker_lost``; one whose worker stops answering as ``timeout`` with reason ``worker_stuck``.

        Raises:
            UserError: The evaluation found the user's set-up defective.
        """
        arrived = time.monotonic()
        fault = ""
        for dispatch in range(MAX_DISPATCHES):
            slot = await self._idle.get(claimant or job.task_name)
            queue_s = time.monotonic() - arrived
            if dispatch:
                self.statistics.retried += 1
            try:
                result = await self._on_worker(slot, job)
            except asyncio.TimeoutError:
                return self._given_up(job, EvaluationOutcome.TIMEOUT, "worker_stuck", "its worker stopped answering")
            except UserError:
                raise  # as plain as it was in the worker: another worker would say the same
            except RayError as error:
                fault = str(error)
                continue
            self.statistics.evaluated += 1
            return replace(result, queue_s=queue_s)
        return self._given_up(job, EvaluationOutcome.CRASHED, "worker_lost", fault)

    async def close(self) -> None:
        """Stops replacing and ends the workers; what they evaluate is abandoned."""
        for task in list(self._preparing):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for worker in self._workers.values():
            ray.kill(worker)

    async def _on_worker(self, slot: int, job: EvaluationJob) -> EvaluationResult:
        """Runs a job on a slot and gives the slot back, or replaces its worker."""
        deadline_s = job.limits.timeout_s * _STAGES_PER_EVALUATION
        healthy = False
        try:
            result: EvaluationResult = await asyncio.wait_for(
                _answer(self._workers[slot].evaluate.remote(job)), deadline_s
            )
            healthy = True
            return result
        except RayTaskError as error:
            healthy = True  # the harness raised, the worker lives
            if isinstance(error.cause, UserError):
                raise UserError(str(error.cause)) from None
            raise
        finally:
            if healthy:
                self._idle.put_nowait(slot)
            else:
                self._replace(slot)

    def _replace(self, slot: int) -> None:
        self.statistics.workers_lost += 1
        self._idle.forget(slot)
        ray.kill(self._workers[slot])
        self._prepare(self._bring_back(slot))

    async def _admit(self, slot: int, ready: asyncio.Future[Any]) -> None:
        """Opens a slot once its first worker is ready."""
        try:
            await ready
        except RayError:
            await self._bring_back(slot)
        else:
            self._idle.put_nowait(slot)

    async def _bring_back(self, slot: int) -> None:
        """Starts workers for a slot until one is ready; a node that is going down may take several with it."""
        delay_s = 0.1
        while True:
            self._workers[slot] = self._start_worker(slot)
            try:
                await _answer(self._workers[slot].core.remote())
            except RayError:
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 30.0)
            else:
                self._idle.put_nowait(slot)
                return

    def _prepare(self, preparation: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(preparation)
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    @staticmethod
    def _given_up(job: EvaluationJob, outcome: EvaluationOutcome, reason: str, text: str) -> EvaluationResult:
        return EvaluationResult(
            evaluation_id=job.evaluation_id,
            outcome=outcome,
            reason=reason,
            error_text=_ANSI_COLOUR.sub("", text)[-4000:],
            check=job.check,
            device=job.device,
        )


async def _answer(reference: Any) -> Any:
    return await reference
