"""Starting a run: all its actors at once, since each takes most of a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from accelopt_ray.config import RunConfig
from accelopt_ray.outcome import UserError
from accelopt_ray.tally import Tally
from actors.cluster import NEURON_RESOURCE, Cluster, places_of
from actors.compile_pool import CompilePool, start_compiler
from actors.driver import Edits, Outcome, SearchDriver
from actors.events import Event
from actors.memory import Memory
from actors.pool import Pool, ProfilerPool
from actors.pools import findable
from actors.profiler import EvaluatorFactory, device_evaluator, start_profiler
from actors.recorder import Recorder

_POLL_S = 0.5
_STOP_TIMEOUT_S = 10.0
_CONCURRENT_CALLS = 10_000
"""Of an asynchronous actor; Ray's default of 1000 would stall a search that has more items in flight."""


class RunFailedError(Exception):
    """The run ended by a fault of the program or the cluster; the message is for people, the details are in the log."""


@dataclass(frozen=True)
class Run:
    """A run that is going on."""

    driver: Any
    recorder: Any
    finished: Any

    def events(self) -> Iterator[list[Event]]:
        """Yields what has happened since the last time, perhaps nothing, about twice a second until the run ends.

        Raises:
            RunFailedError: The driver was lost.
        """
        position = 0
        ended = False
        while not ended:
            ended = bool(ray.wait([self.finished], timeout=0)[0])
            try:
                events = ray.get(self.driver.events.remote(position, 0.0 if ended else _POLL_S))
            except RayError as error:
                raise RunFailedError(f"the driver of the run was lost: {error}") from None
            position += len(events)
            yield events

    def result(self) -> dict[str, Outcome]:
        """Waits for the end and returns how each task's search ended, by the task's name.

        Raises:
            UserError: The user's set-up proved wrong.
            RunFailedError: Anything else that ended the run.
        """
        return outcomes_of(self.finished)

    def stop(self) -> dict[str, Tally] | None:
        """Ends the run early; returns where each task stands, or None if its driver does not answer in time."""
        try:
            tallies: dict[str, Tally] = ray.get(self.driver.stop.remote(), timeout=_STOP_TIMEOUT_S)
        except RayError:
            return None
        return tallies


def outcomes_of(finished: Any) -> dict[str, Outcome]:
    """Waits for the end of a driver's ``run`` and returns how each task's search ended, by the task's name.

    Raises:
        UserError: The user's set-up proved wrong.
        RunFailedError: Anything else that ended the run.
    """
    try:
        outcomes: dict[str, Outcome] = ray.get(finished)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise RunFailedError(f"{type(error.cause).__name__}: {error.cause}") from None
    except RayError as error:
        raise RunFailedError(f"the driver of the run was lost: {error}") from None
    return outcomes


def start_run(
    config: RunConfig,
    run_id: str,
    cluster: Cluster,
    make_evaluator: EvaluatorFactory | None = None,
    edits: Edits | None = None,
) -> Run:
    """Starts the actors of a run and the search.

    Args:
        config: The resolved configuration.
        run_id: Names the run.
        cluster: The cluster this process is connected to.
        make_evaluator: Evaluates instead of the configured device.
        edits: Takes the run in ``config.output`` up again, after these changes; None starts a new one.

    Raises:
        UserError: The cluster does not have what the device needs.
    """
    make_pool = _own_pool(config, cluster, make_evaluator)
    # Driver and recorder write the run's folder, so they stay on the machine where it was named.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    beside_us = {"num_cpus": 0, "scheduling_strategy": here, "max_concurrency": _CONCURRENT_CALLS}
    recorder = ray.remote(Recorder).options(**beside_us).remote(str(config.output / "trajectory"), run_id)
    settings = config.search_settings()
    memory = ray.remote(Memory).options(**beside_us).remote(settings.memory_rule, settings.memory_capacity)
    driver: Any = (
        ray.remote(SearchDriver)
        .options(**beside_us, **findable(run_id))
        .remote(config, run_id, recorder, memory, make_pool, edits)
    )
    return Run(driver, recorder, driver.run.remote())


def _own_pool(config: RunConfig, cluster: Cluster, make_evaluator: EvaluatorFactory | None) -> Callable[[], Pool]:
    """Starts the run's own profilers; returns what makes a pool of them in the driver."""
    needs_core = config.device == "neuron"
    offered = cluster.neuron_cores if needs_core else cluster.cpus
    ahead = config.compile_slots
    if ahead and needs_core:
        raise UserError("device neuron has no documented way to compile without a core: leave out --compile-slots")
    slots = config.slots or offered - ahead
    if slots < 1 or slots + ahead > offered:
        what = "NeuronCores" if needs_core else "CPUs"
        wanted = f"{max(slots, 1)} slots" + (f" and {ahead} compile slots" if ahead else "")
        raise UserError(f"the cluster has {offered} {what} and the run wants {wanted}: give fewer --slots")
    evaluator = make_evaluator or partial(device_evaluator, config.device)
    start = partial(start_profiler, evaluator, needs_core)
    # A size that was asked for is kept; otherwise the cluster's is the pool's.
    places = None if config.slots else partial(_places_left, NEURON_RESOURCE if needs_core else "CPU", ahead)
    workers = [start(slot) for slot in range(slots)]
    if not ahead:
        return partial(ProfilerPool, workers, start, places=places)
    start_ahead = partial(start_compiler, evaluator)
    return partial(_two_pools, workers, start, [start_ahead() for _ in range(ahead)], start_ahead, places)


def _places_left(resource: str, taken: int) -> int:
    return places_of(resource) - taken


def _two_pools(
    workers: Sequence[Any],
    start: Callable[[int], Any],
    compilers: Sequence[Any],
    start_ahead: Callable[[], Any],
    places: Callable[[], int] | None,
) -> Pool:
    """Slots that only run what compile workers made."""
    return ProfilerPool(workers, start, compilers=CompilePool(compilers, start_ahead), places=places)
