"""The profiler pool: each job to a free slot, each lost worker replaced, no candidate blamed for a worker's death.

Slots are opened as nodes join and closed as they leave. They are served in turn, so that an evaluation and its
repetition seldom meet the same core. After an evaluation that had to be killed, and after a worker's replacement, a
known kernel shows whether the core still computes; a core that fails it rests and is tried again, longer each time, and
is retired in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError

from accelopt_ray.devices.faults import DeviceFault
from accelopt_ray.elasticity import SlotDemand, dispensable
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.outcome import EvaluationOutcome, UserError
from accelopt_ray.sharing import FairQueue
from actors.compile_pool import CompilePool
from actors.logs import fields
from actors.pool_state import PoolMetrics, PoolStatistics, PoolStatus, Slot, SlotState
from actors.profiler import Compiled

MAX_DISPATCHES = 3
"""A job whose workers fail this often is given up: by then it is more likely the cause than the victim."""

MAX_WORKERS_KILLED = 2
"""A job whose workers die this often, on nodes that live on, is held to have killed them."""

MAX_RESTS = 3
"""A core that still fails the known kernel after so many rests is retired."""

REST_S = 30.0
"""First rest of a core; each further one is twice as long."""

_STAGES_PER_EVALUATION = 30
"""More stages than any check has. Each stage has its own deadline inside the worker; beyond all of them together the
worker itself is stuck."""

_NODE_LOSS_S = 60.0
"""Longest time that Ray, left as it is, takes to declare a node dead."""

_PROBE_TIMEOUT_S = 180.0
_FOLLOW_S = 2.0
_KILLED = frozenset({EvaluationOutcome.TIMEOUT, EvaluationOutcome.MEMORY_LIMIT, EvaluationOutcome.CRASHED})
_LOG = logging.getLogger("accelopt_ray.pool")

_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Ray colours its error texts, also where they end in a table."""


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

    def __init__(
        self,
        workers: Sequence[Any],
        start_worker: Callable[[int], Any],
        rest_s: float = REST_S,
        compilers: CompilePool | None = None,
        places: Callable[[], int] | None = None,
        demand: SlotDemand | None = None,
    ) -> None:
        """Takes workers over.

        Args:
            workers: Handles of :class:`~actors.profiler.Profiler` actors, perhaps still starting.
            start_worker: Starts a replacement for the worker of a slot.
            rest_s: First rest of a core that failed the known kernel.
            compilers: Compiles before a slot is asked for; None where the slots' workers do it themselves.
            places: How many workers the cluster has room for now; the pool then grows and shrinks with it. None for a
                pool that keeps its size.
            demand: Opens slots as they are wanted, whether the cluster has room for them yet or is to grow, and gives
                back those that are not. Instead of ``places``.

        Raises:
            ValueError: There is no worker.
        """
        if not workers:
            raise ValueError("a pool needs at least one worker")
        self.statistics = PoolStatistics()
        self._metrics = PoolMetrics()
        self._start_worker = start_worker
        self._rest_s = rest_s
        self._compilers = compilers
        self._places = places
        self._demand = demand
        self._workers = dict(enumerate(workers))
        self._slots = {number: Slot(number) for number in self._workers}
        self._waiting = 0
        self._idle: FairQueue[int] = FairQueue()
        self._all_retired = asyncio.Event()
        self._preparing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Returns once one worker is ready; the others join when they are.

        Raises:
            RuntimeError: Not one of the workers could start; the message is the last one's.
        """
        answers = [asyncio.ensure_future(self._introduce(slot)) for slot in self._workers]
        for slot, answer in enumerate(answers):
            self._prepare(self._admit(slot, answer))
        if self._places is not None:
            self._prepare(self._follow(self._places))
        fault = ""
        for next_answer in asyncio.as_completed(answers):
            try:
                await next_answer
            except RayError as error:
                fault = str(error)
            else:
                break
        else:
            raise RuntimeError(f"no profiler could start: {_ANSI_COLOUR.sub('', fault)}")
        if self._demand is not None:
            # Only now, since nobody asks for an evaluation while the first node comes up.
            self._demand.note(len(self._workers), time.monotonic())
            self._prepare(self._follow_demand(self._demand))

    def status(self) -> PoolStatus:
        """What the pool is doing."""
        return self.statistics.status(self._slots, self._waiting)

    async def evaluate(self, job: EvaluationJob, claimant: str | None = None) -> EvaluationResult:
        """Returns the job's final result.

        Claimants who wait take turns; each of a run's tasks is one unless the caller names another. The result's
        ``queue_s`` is the time before the last dispatch. A job that kills two workers, or finds three slots at fault,
        ends as ``crashed`` with reason ``worker_lost`` or ``device_fault``; one whose worker stops answering as
        ``timeout`` with reason ``worker_stuck``; one for which no core is left as ``crashed`` with ``no_core``.

        Raises:
            UserError: The evaluation found the user's set-up defective.
        """
        compiled = None if self._compilers is None else await self._compilers.compile(job, claimant or job.task_name)
        arrived = time.monotonic()
        fault, reason = "", "worker_lost"
        faults, lost_on = 0, list[str]()
        tried_before = False
        while faults + len(lost_on) < MAX_DISPATCHES:
            slot = await self._take(claimant or job.task_name)
            if slot is None:
                reasons = "; ".join(sorted({each.detail for each in self._slots.values()}))
                return self._given_up(job, EvaluationOutcome.CRASHED, "no_core", f"every core was retired: {reasons}")
            if lost_on and not await self._is_there(slot):
                continue  # it was lost at the same time, without this job
            dispatched = time.monotonic()
            self.statistics.retried += tried_before
            tried_before = True
            try:
                result = await self._on_worker(slot, job, compiled)
            except asyncio.TimeoutError:
                return self._given_up(job, EvaluationOutcome.TIMEOUT, "worker_stuck", "its worker stopped answering")
            except UserError:
                raise  # as plain as it was in the worker: another worker would say the same
            except RayTaskError as error:
                fault, is_device, faults = str(error), isinstance(error.cause, DeviceFault), faults + 1
                reason = "device_fault" if is_device else "worker_lost"
                continue
            except RayError as error:
                fault, reason = str(error), "worker_lost"
                lost_on.append(self._slots[slot].node)
                if len(lost_on) >= MAX_WORKERS_KILLED:
                    lost_on = await _nodes_that_stayed(lost_on)
                if len(lost_on) >= MAX_WORKERS_KILLED:
                    break
                continue
            self._slots[slot].evaluated += 1
            result = replace(result, queue_s=dispatched - arrived)
            self._note(result, time.monotonic() - dispatched)
            return result
        return self._given_up(job, EvaluationOutcome.CRASHED, reason, fault)

    async def close(self) -> None:
        """Stops replacing and ends the workers; what they evaluate is abandoned."""
        for task in list(self._preparing):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for slot, worker in self._workers.items():
            if self._slots[slot].is_open:
                ray.kill(worker)
        if self._compilers is not None:
            self._compilers.close()

    async def _take(self, claimant: str) -> int | None:
        """Waits for a slot; None once all are retired."""
        self._waiting += 1
        getting = asyncio.ensure_future(self._idle.get(claimant))
        ending = asyncio.ensure_future(self._all_retired.wait())
        try:
            await asyncio.wait({getting, ending}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
            getting.cancel()
            return None
        except asyncio.CancelledError:
            if getting.done() and not getting.cancelled():
                self._idle.put_nowait(getting.result())
            getting.cancel()
            raise
        finally:
            ending.cancel()
            self._waiting -= 1

    async def _on_worker(self, slot: int, job: EvaluationJob, compiled: Compiled | None) -> EvaluationResult:
        """Runs a job on a slot and gives the slot back, has its core looked at, or replaces its worker."""
        deadline_s = job.limits.timeout_s * _STAGES_PER_EVALUATION
        self._show(slot, SlotState.BUSY, job.evaluation_id)
        doubtful, lost = False, True
        try:
            result: EvaluationResult = await asyncio.wait_for(
                _answer(self._workers[slot].evaluate.remote(job, compiled)), deadline_s
            )
            doubtful = result.outcome in _KILLED
            if doubtful:
                await self._hear_from(slot)
            lost = False
            return result
        except RayTaskError as error:
            # The harness raised.
            if isinstance(error.cause, UserError):
                await self._hear_from(slot)
                lost = False
                raise UserError(str(error.cause)) from None
            doubtful, lost = isinstance(error.cause, DeviceFault), False
            raise
        finally:
            if lost:
                self._replace(slot)
            elif doubtful:
                self._idle.forget(slot)
                self._prepare(self._look_after(slot))
            else:
                self._offer(slot)

    async def _hear_from(self, slot: int) -> None:
        """Waits for a word from a slot's worker.

        A worker that goes down, with its node perhaps, ends its children first: what it tells of their death is no
        verdict unless it lives on.

        Raises:
            RayError: It has gone.
            asyncio.TimeoutError: It does not answer.
        """
        await asyncio.wait_for(_answer(self._workers[slot].core.remote()), _PROBE_TIMEOUT_S)

    async def _is_there(self, slot: int) -> bool:
        """Whether a slot's worker still answers; replaces it otherwise."""
        try:
            await self._hear_from(slot)
        except (RayError, asyncio.TimeoutError):
            self._replace(slot)
            return False
        return True

    def _replace(self, slot: int) -> None:
        self._log(logging.WARNING, slot, "its worker was lost")
        self.statistics.workers_lost += 1
        self._metrics.note_lost()
        self._idle.forget(slot)
        ray.kill(self._workers[slot])
        self._prepare(self._bring_back(slot))

    async def _introduce(self, slot: int) -> None:
        """Waits until a slot's worker is ready and asks what it owns and where."""
        worker, shown = self._workers[slot], self._slots[slot]
        shown.core, shown.node = await asyncio.gather(_answer(worker.core.remote()), _answer(worker.node.remote()))

    async def _admit(self, slot: int, ready: asyncio.Future[Any]) -> None:
        """Opens a slot once its first worker is ready."""
        opened = self._slots[slot]
        try:
            await ready
        except RayError:
            if opened is self._slots[slot]:
                await self._bring_back(slot)
            return
        if opened.is_open:
            self._offer(slot)

    async def _follow(self, places: Callable[[], int]) -> None:
        """Opens slots as nodes join; those of nodes that left are closed when their workers are missed."""
        while True:
            await asyncio.sleep(_FOLLOW_S)
            self._open(await asyncio.to_thread(places) - self._open_slots())

    async def _follow_demand(self, demand: SlotDemand) -> None:
        """Opens slots for evaluations that wait, and gives back what none has needed for a while."""
        while True:
            slots = Counter(slot.state for slot in self._slots.values())
            keep = demand.note(self._waiting + slots[SlotState.BUSY], time.monotonic())
            # A core that rests or is retired still has its place, but is of no use.
            useful = self._open_slots() - slots[SlotState.RESTING] - slots[SlotState.RETIRED]
            self._open(min(keep - useful, demand.most - self._open_slots()))
            self._give_back(useful - keep)
            await asyncio.sleep(_FOLLOW_S)

    def _open(self, count: int) -> None:
        gone = [number for number, slot in self._slots.items() if slot.state is SlotState.GONE]
        fresh = itertools.count(len(self._slots))
        for _ in range(count):
            number = gone.pop(0) if gone else next(fresh)
            self._slots[number] = Slot(number)
            self._prepare(self._bring_back(number))

    def _give_back(self, surplus: int) -> None:
        """Closes slots that have no worker yet, then those of whole nodes."""
        starting = [number for number, slot in self._slots.items() if slot.state is SlotState.STARTING]
        chosen = starting[: max(0, surplus)]
        idle: dict[str, list[int]] = {}
        in_use: Counter[str] = Counter()
        for number, slot in self._slots.items():
            if slot.state is SlotState.IDLE:
                idle.setdefault(slot.node, []).append(number)
            elif slot.is_open:
                in_use[slot.node] += 1
        for number in chosen + dispensable(idle, in_use, surplus - len(chosen)):
            self._idle.withdraw(number)
            self._show(number, SlotState.GONE, "given back: nothing needed it")
            ray.kill(self._workers[number])

    def _open_slots(self) -> int:
        return sum(slot.is_open for slot in self._slots.values())

    async def _has_left(self) -> bool:
        """Whether the cluster has fewer places than the pool has slots, so that a lost worker's node has left."""
        return self._places is not None and await asyncio.to_thread(self._places) < self._open_slots()

    async def _bring_back(self, slot: int) -> None:
        """Starts workers for a slot until one is ready; a node that is going down may take several with it."""
        delay_s = 0.1
        opened = self._slots[slot]
        while opened is self._slots[slot] and opened.is_open:
            if await self._has_left():
                self._show(slot, SlotState.GONE, "its node left the cluster")
                return
            self._show(slot, SlotState.STARTING)
            self._workers[slot] = self._start_worker(slot)
            try:
                await self._introduce(slot)
            except RayError:
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, 30.0)
                continue
            if opened.is_open:
                await self._look_after(slot)
            return

    async def _look_after(self, slot: int) -> None:
        """Offers a slot again once its core computes a known kernel; retires it if that does not come."""
        fault = ""
        for rest in range(MAX_RESTS + 1):
            self._show(slot, SlotState.PROBED, fault)
            try:
                fault = await asyncio.wait_for(_answer(self._workers[slot].check_health.remote()), _PROBE_TIMEOUT_S)
            except asyncio.TimeoutError:
                fault = f"a known kernel did not end within {_PROBE_TIMEOUT_S:g} s"
            except RayError:
                self._replace(slot)
                return
            if not fault:
                self._offer(slot)
                return
            if rest < MAX_RESTS:
                self._show(slot, SlotState.RESTING, fault)
                self._log(logging.WARNING, slot, fault)
                await asyncio.sleep(self._rest_s * 2**rest)
        self._show(slot, SlotState.RETIRED, fault)
        self._log(logging.ERROR, slot, fault)
        useless = all(each.state in (SlotState.RETIRED, SlotState.GONE) for each in self._slots.values())
        if useless and (self._demand is None or self._open_slots() >= self._demand.most):
            self._all_retired.set()

    def _offer(self, slot: int) -> None:
        self._show(slot, SlotState.IDLE)
        self._all_retired.clear()
        self._idle.put_nowait(slot)

    def _show(self, slot: int, state: SlotState, detail: str = "") -> None:
        self._slots[slot].state, self._slots[slot].detail = state, detail
        if state not in (SlotState.BUSY, SlotState.IDLE):
            self._metrics.show(self._slots, self._waiting)

    def _note(self, result: EvaluationResult, duration_s: float) -> None:
        self.statistics.note(result)
        self._metrics.note(result, duration_s)
        self._metrics.show(self._slots, self._waiting)

    def _log(self, level: int, slot: int, reason: str) -> None:
        shown = self._slots[slot]
        busy_with = shown.detail if shown.state is SlotState.BUSY else None
        text = fields(
            slot=slot, core=shown.core, node=shown.node, state=shown.state, evaluation=busy_with, reason=reason
        )
        _LOG.log(level, "slot %s", text)

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


async def _nodes_that_stayed(nodes: Sequence[str]) -> list[str]:
    """Leaves out nodes that the cluster has lost: they took their workers along, whatever these evaluated.

    Ray takes a while to notice a loss. Of this process's own node there is no doubt.
    """
    here = ray.get_runtime_context().get_node_id()
    deadline = time.monotonic() + _NODE_LOSS_S
    while True:
        alive = {node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]}
        stayed = [node for node in nodes if node in alive]
        if len(stayed) < len(nodes) or set(nodes) == {here} or time.monotonic() > deadline:
            return stayed
        await asyncio.sleep(1.0)
