"""A sweep on a cluster: some runs at a time over one pool, one run's end or fault no other's."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.outcome import UserError
from accelopt_ray.rewrite.server import start_background
from accelopt_ray.search.restore import stored_run_id
from accelopt_ray.serving.model import HostedModel
from accelopt_ray.sweep.budget import SweepBudget, bounded
from accelopt_ray.sweep.demand import most_evaluations_at_once
from accelopt_ray.sweep.file import Sweep, SweepRun
from accelopt_ray.sweep.folder import RunState, RunStatus, SweepFolder, TaskOutcome
from accelopt_ray.sweep.order import next_run
from actors.cluster import Cluster
from actors.driver import Outcome
from actors.host import RunHost
from actors.models import bring_up
from actors.pools import NAMESPACE
from actors.profiler import EvaluatorFactory
from actors.run import RunFailedError, outcomes_of
from actors.shared import Shared, start_pool

MOST_ATTEMPTS = 3
"""Starts of a run in one session. A driver that is lost, to memory for instance, is tried again; a defective set-up is
not."""

RUNS_PER_HOST = 4
"""Runs that share a process: most of their time they wait for models and profilers."""

_POLL_S = 1.0
_STOP_TIMEOUT_S = 30.0
_SECONDS_BETWEEN_SIGNS_OF_LIFE = 60.0
_ERROR_KEPT = 1000


class Keeper(Protocol):
    """Whoever keeps a copy of the folder elsewhere."""

    def push(self) -> None:
        """Brings the copy up to date."""


@dataclass
class _Active:
    run: SweepRun
    host: Any
    finished: Any
    state: RunState
    started: float


class SweepSession:
    """One session of a sweep: runs what is not finished yet."""

    def __init__(
        self,
        sweep: Sweep,
        runs: tuple[SweepRun, ...],
        folder: SweepFolder,
        cluster: Cluster,
        say: Callable[[str], None],
        *,
        make_evaluator: EvaluatorFactory | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        """Prepares the session; nothing is started yet.

        Args:
            sweep: The sweep.
            runs: Its runs with their tasks where every process finds them.
            folder: Its folder, claimed.
            cluster: The cluster this process is connected to.
            say: Prints a line.
            make_evaluator: Evaluates instead of the configured devices.
            keeper: Told to copy the folder from time to time and at the end.

        Raises:
            UserError: The budget is too small for so many runs.
        """
        self._sweep = sweep
        self._budget = SweepBudget(sweep)
        self._runs = runs
        self._folder = folder
        self._cluster = cluster
        self._say = say
        self._make_evaluator = make_evaluator
        self._keeper = keeper
        self._states: dict[str, RunState | None] = {run.name: folder.state(run.name) for run in runs}
        self._active: list[_Active] = []
        self._hosts: list[Any] = []

    @property
    def states(self) -> Mapping[str, RunState | None]:
        """How each run stands; None if it has not begun."""
        return self._states

    def run(self) -> None:
        """Runs to the end of the last run, or of the budget of hours.

        Raises:
            UserError: A model that the sweep wants hosted does not come up.
            KeyboardInterrupt: The session was stopped; what was recorded is on disk and the sweep can be taken up.
        """
        waiting = [run for run in self._runs if not self._is_finished(run)]
        if len(waiting) < len(self._runs):
            self._say(f"{len(self._runs) - len(waiting)} runs are finished already")
        if not waiting:
            return
        deadline = time.monotonic() + 3600 * (self._sweep.budget.hours or float("inf"))
        attempts: dict[str, int] = {}
        last_sign = time.monotonic()
        pools = self._start_pools(waiting)
        self._hosts = [
            _start_host() for _ in range(-(-min(self._sweep.concurrent_runs, len(waiting)) // RUNS_PER_HOST))
        ]
        try:
            offline = any(not run.config.models for run in waiting)
            with _rewriter(offline) as rewriter, self._hosted(waiting) as hosted_urls:
                while waiting or self._active:
                    while len(self._active) < self._sweep.concurrent_runs:
                        run = next_run(waiting, [active.run for active in self._active])
                        if run is None:
                            break
                        waiting.remove(run)
                        attempts[run.name] = attempts.get(run.name, 0) + 1
                        self._begin(run, Shared(pools[_kind(run)], rewriter, hosted_urls))
                    for ended in self._ended():
                        if self._conclude(ended) and attempts[ended.run.name] < MOST_ATTEMPTS:
                            waiting.append(ended.run)
                    if time.monotonic() > deadline:
                        self._stop("the sweep's budget of hours is used up")
                        self._say(
                            f"budget of {self._sweep.budget.hours:g} hours used up, {len(waiting)} runs not begun"
                        )
                        return
                    if time.monotonic() - last_sign > _SECONDS_BETWEEN_SIGNS_OF_LIFE:
                        last_sign = time.monotonic()
                        self._sign_of_life(len(waiting))
        except BaseException:
            self._stop("the sweep was stopped")
            raise
        finally:
            for actor in (*pools.values(), *self._hosts):
                ray.kill(actor)
            self._copy()

    def _least_busy_host(self) -> Any:
        busy = [sum(active.host is host for active in self._active) for host in self._hosts]
        return self._hosts[busy.index(min(busy))]

    def _replace_if_lost(self, host: Any) -> None:
        """A fault of the run leaves its host alive; the other runs in it go on."""
        if host not in self._hosts:
            return
        try:
            ray.get(host.__ray_ready__.remote(), timeout=_STOP_TIMEOUT_S)
        except RayError:
            ray.kill(host)
            self._hosts[self._hosts.index(host)] = _start_host()

    def _is_finished(self, run: SweepRun) -> bool:
        state = self._states[run.name]
        return state is not None and state.status is RunStatus.FINISHED

    def _start_pools(self, runs: list[SweepRun]) -> dict[str, Any]:
        """One pool for each kind of place that profilers need."""
        pools = {}
        for kind in sorted({_kind(run) for run in runs}):
            offered = self._cluster.neuron_cores if kind == "neuron" else self._cluster.cpus
            devices = sorted({run.config.device for run in runs if _kind(run) == kind})
            # A cluster that starts at zero is asked for as much as the runs can use.
            slots = self._sweep.slots or offered or most_evaluations_at_once(self._sweep, devices)
            what = "NeuronCores" if kind == "neuron" else "CPUs"
            if slots > offered:
                self._say(f"up to {slots} slots, {offered} {what} there: the cluster is to grow, or fewer will do")
            # The first ones go where there is room; further ones come with the evaluations that wait for them.
            first = min(slots, max(1, offered))
            pools[kind] = start_pool(devices, slots, first, self._sweep.keep_slots_s, self._make_evaluator)
        return pools

    @contextmanager
    def _hosted(self, runs: list[SweepRun]) -> Iterator[Mapping[str, Sequence[str]]]:
        """Brings up every model that some run wants hosted, once for all, and ends them with the session."""
        wanted: dict[str, HostedModel] = {}
        for run in runs:
            for model in run.config.hosted_models():
                if wanted.setdefault(model.name, model) != model:
                    raise UserError(f"the runs want {model.name} hosted in different ways: give each way its own name")
        if not wanted:
            yield {}
            return
        logs = self._folder.path / "logs"
        logs.mkdir(exist_ok=True)
        loop = asyncio.new_event_loop()
        try:
            hosting = bring_up(list(wanted.values()), runs[0].config.hosting, logs, self._say)
            hosts = loop.run_until_complete(hosting)
            try:
                yield hosts.urls
            finally:
                loop.run_until_complete(hosts.stop())
        finally:
            loop.close()

    def _begin(self, run: SweepRun, shared: Shared) -> None:
        before = self._states[run.name]
        output = self._folder.path / run.name
        stored = stored_run_id(output)
        run_id = stored or f"{self._sweep.name}-{run.name}-{uuid.uuid4().hex[:8]}"
        state = RunState(
            run.name,
            run_id,
            RunStatus.RUNNING,
            attempts=1 + (before.attempts if before else 0),
            elapsed_s=before.elapsed_s if before else 0.0,
            grant=self._budget.grant(run.name, self._states),
        )
        config = bounded(run.config.model_copy(update={"output": output}), state.grant)
        self._keep(state)
        self._folder.write_config(run.name, config)
        host = self._least_busy_host()
        finished = host.run.remote(config, run_id, shared, None if stored is None else {})
        self._say(f"{run.name}: {'started' if stored is None else 'taken up again'} ({run_id})")
        self._active.append(_Active(run, host, finished, state, time.monotonic()))

    def _ended(self) -> list[_Active]:
        """Waits a moment for runs to end and takes them out of the active ones."""
        by_reference = {active.finished: active for active in self._active}
        references, _ = ray.wait(list(by_reference), num_returns=1, timeout=_POLL_S)
        ended = [by_reference[reference] for reference in references]
        self._active = [active for active in self._active if active not in ended]
        return ended

    def _conclude(self, active: _Active) -> bool:
        """Writes down how a run ended; returns whether it may be worth another attempt."""
        again = False
        state = replace(active.state, elapsed_s=active.state.elapsed_s + time.monotonic() - active.started)
        try:
            outcomes = outcomes_of(active.finished)
        except UserError as error:
            state = replace(state, status=RunStatus.FAILED, error=str(error))
        except RunFailedError as error:
            state = replace(state, status=RunStatus.FAILED, error=" ".join(str(error).split())[:_ERROR_KEPT])
            again = True
            self._replace_if_lost(active.host)
        else:
            told = tuple(_task_outcome(task, outcome) for task, outcome in outcomes.items())
            state = replace(state, status=RunStatus.FINISHED, outcomes=told)
        self._keep(state)
        speedups = ", ".join(
            f"{each.speedup:.3f}x{' (simulated)' if each.simulated else ''}"
            for each in state.outcomes
            if each.speedup is not None
        )
        self._say(
            f"{state.name}: {state.status}{f' after {state.elapsed_s:.0f} s' if speedups else ''} "
            f"{speedups or state.error or 'without a result'}"
        )
        return again

    def _stop(self, why: str) -> None:
        """Ends what goes on in order, so that it can be taken up again."""
        active, self._active = self._active, []
        stopping = [host.stop.remote() for host in self._hosts]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_TIMEOUT_S)
        for each in active:
            elapsed_s = each.state.elapsed_s + time.monotonic() - each.started
            self._keep(replace(each.state, status=RunStatus.STOPPED, elapsed_s=elapsed_s, error=why))

    def _keep(self, state: RunState) -> None:
        self._states[state.name] = state
        self._folder.write_state(state)

    def _sign_of_life(self, waiting: int) -> None:
        done = sum(state is not None and state.status is RunStatus.FINISHED for state in self._states.values())
        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        self._say(
            f"{done}/{len(self._runs)} finished, {len(self._active)} going on, {waiting} waiting; cluster: "
            f"{int(resources.get('CPU', 0))} CPUs, {int(resources.get('neuron_cores', 0))} NeuronCores"
        )
        self._copy()

    def _copy(self) -> None:
        """A copy that cannot be written is told and tried again later; it ends no run."""
        if self._keeper is None:
            return
        try:
            self._keeper.push()
        except OSError as error:
            self._say(f"the copy could not be brought up to date: {str(error).strip().splitlines()[0]}")


def _start_host() -> Any:
    """Starts a host beside the sweep, whose folder its runs write."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    name = {"name": f"runs:{uuid.uuid4().hex[:8]}", "namespace": NAMESPACE}
    return ray.remote(RunHost).options(num_cpus=0, scheduling_strategy=here, max_concurrency=1000, **name).remote()


def _kind(run: SweepRun) -> str:
    return "neuron" if run.config.device == "neuron" else "simulator"


def _task_outcome(task: str, outcome: Outcome) -> TaskOutcome:
    tally = outcome.tally
    return TaskOutcome(
        task=task,
        status=outcome.status,
        reason=outcome.reason,
        baseline_latency_ms=tally.baseline.latency_ms if tally.baseline else None,
        best_latency_ms=tally.best.latency_ms if tally.best else None,
        simulated=bool(tally.best and tally.best.simulated),
        evaluations=tally.evaluations,
        calls=sum(tally.calls.values()),
        cost_usd=tally.cost_usd,
        tokens=tally.tokens,
    )


@contextmanager
def _rewriter(wanted: bool) -> Iterator[ModelEndpoint | None]:
    """Serves the offline rewriter for all runs of the session, if any needs it."""
    if not wanted:
        yield None
        return
    with start_background() as server:
        yield ModelEndpoint(server.base_url, server.model, max_in_flight=16)
