"""Compile workers: CPUs that compile ahead, so that a core is only held for running what was compiled.

For devices whose toolchain has a documented way to compile without a core. Such workers take CPUs and no NeuronCore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from accelopt_ray.devices.protocol import Failure
from accelopt_ray.evaluation.records import EvaluationJob
from accelopt_ray.outcome import EvaluationOutcome, UserError
from accelopt_ray.sharing import FairQueue
from actors.profiler import Compiled, EvaluatorFactory

_ATTEMPTS = 2
"""A job that ends this many compile workers is held to have done it."""


class Compiler:
    """A Ray actor that compiles. Candidate code runs in child processes of the device, never in this one."""

    def __init__(self, make_evaluator: EvaluatorFactory) -> None:
        """Prepares the device; what is made needs a method ``compile(job)``."""
        self._device: Any = make_evaluator()

    def compile(self, job: EvaluationJob) -> Compiled:
        """Compiles one job's kernel."""
        compiled: Compiled = self._device.compile(job)
        return compiled


class CompilePool:
    """Dispatches compilations to :class:`Compiler` actors. All methods belong to one event loop."""

    def __init__(self, workers: Sequence[Any], start_worker: Callable[[], Any]) -> None:
        """Takes workers over.

        Args:
            workers: Handles of compilers, perhaps still starting: what they are given waits until they are ready.
            start_worker: Starts another in place of one that was lost.

        Raises:
            ValueError: There is no worker.
        """
        if not workers:
            raise ValueError("a pool needs at least one worker")
        self._start_worker = start_worker
        self._workers = dict(enumerate(workers))
        self._idle: FairQueue[int] = FairQueue()
        for number in self._workers:
            self._idle.put_nowait(number)

    async def compile(self, job: EvaluationJob, claimant: str) -> Compiled:
        """Returns the artefact or why there is none; claimants who wait take turns.

        Raises:
            UserError: The compilation found the user's set-up defective.
        """
        fault = ""
        for _ in range(_ATTEMPTS):
            number = await self._idle.get(claimant)
            try:
                compiled: Compiled = await self._workers[number].compile.remote(job)
                return compiled
            except RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise UserError(str(error.cause)) from None
                fault = str(error)
            except RayError as error:
                fault = str(error)
                self._workers[number] = self._start_worker()
            finally:
                self._idle.put_nowait(number)
        return Failure(EvaluationOutcome.CRASHED, fault[-4000:], "worker_lost")

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers.values():
            ray.kill(worker)


def start_compiler(make_evaluator: EvaluatorFactory, cpus: float = 1) -> Any:
    """Starts a compiler somewhere in the cluster, on CPUs alone, and returns its actor handle at once."""
    options: dict[str, Any] = {"num_cpus": cpus, "max_restarts": 0, "max_task_retries": 0}
    return ray.remote(Compiler).options(**options).remote(make_evaluator)
