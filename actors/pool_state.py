"""What a profiler pool is doing: slots, queue, counts; for ``accelopt-ray pool status`` and Ray's metrics."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ray.util.metrics import Counter, Gauge, Histogram

from accelopt_ray.evaluation.records import EvaluationResult
from accelopt_ray.outcome import StrEnum

_RATE_WINDOW_S = 60.0
_SECONDS_BOUNDARIES = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]


class SlotState(StrEnum):
    """What a slot is doing."""

    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    PROBED = "probed"
    RESTING = "resting"
    RETIRED = "retired"
    GONE = "gone"


@dataclass
class Slot:
    """One core or simulator slot.

    Attributes:
        number: Its place in the pool.
        core: What its worker owns, once that is known.
        state: What it is doing.
        detail: The evaluation it is busy with, or why it rests or was retired.
        evaluated: Evaluations that ended on it.
        node: Ray node of its worker, once that is known.
    """

    number: int
    core: str = ""
    state: SlotState = SlotState.STARTING
    detail: str = ""
    evaluated: int = 0
    node: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it has a worker, or is to have one."""
        return self.state is not SlotState.GONE


@dataclass(frozen=True)
class PoolStatus:
    """A pool at one moment.

    Attributes:
        slots: All of them.
        waiting: Evaluations that wait for a slot.
        evaluated: Evaluations that have ended.
        answered_from_store: Those of them that had been made before.
        per_minute: Evaluations that ended within the last minute.
        outcomes: Ended evaluations by outcome.
        workers_lost: Workers that died or were replaced.
        retried: Dispatches after the first.
    """

    slots: tuple[Slot, ...]
    waiting: int
    evaluated: int
    answered_from_store: int
    per_minute: int
    outcomes: Mapping[str, int]
    workers_lost: int
    retried: int


@dataclass
class PoolStatistics:
    """Counts since the pool's start."""

    evaluated: int = 0
    answered_from_store: int = 0
    workers_lost: int = 0
    retried: int = 0
    outcomes: Counts[str] = field(default_factory=Counts)
    ended_at: deque[float] = field(default_factory=deque)

    def note(self, result: EvaluationResult) -> None:
        """Counts a result."""
        self.evaluated += 1
        self.answered_from_store += result.answered_from.startswith("store:")
        self.outcomes[str(result.outcome)] += 1
        self.ended_at.append(time.monotonic())
        self._forget()

    def per_minute(self) -> int:
        """Results within the last minute."""
        self._forget()
        return len(self.ended_at)

    def _forget(self) -> None:
        oldest = time.monotonic() - _RATE_WINDOW_S
        while self.ended_at and self.ended_at[0] < oldest:
            self.ended_at.popleft()

    def status(self, slots: Mapping[int, Slot], waiting: int) -> PoolStatus:
        """The pool's status, with copies that no later change reaches."""
        return PoolStatus(
            slots=tuple(Slot(**vars(slot)) for slot in slots.values()),
            waiting=waiting,
            evaluated=self.evaluated,
            answered_from_store=self.answered_from_store,
            per_minute=self.per_minute(),
            outcomes=dict(self.outcomes),
            workers_lost=self.workers_lost,
            retried=self.retried,
        )


class PoolMetrics:
    """Ray metrics; Ray prefixes their names with ``ray_`` where Prometheus reads them."""

    def __init__(self) -> None:
        """Registers them with the Ray process this one belongs to."""
        self._evaluations = Counter(
            "accelopt_evaluations_total", description="Evaluations that ended, by outcome.", tag_keys=("outcome",)
        )
        self._answered = Counter(
            "accelopt_evaluations_answered_from_store_total", description="Evaluations that had been made before."
        )
        self._lost = Counter("accelopt_pool_workers_lost_total", description="Workers that died or were replaced.")
        self._slots = Gauge("accelopt_pool_slots", description="Slots of the pool, by state.", tag_keys=("state",))
        self._waiting = Gauge("accelopt_pool_waiting", description="Evaluations that wait for a slot.")
        self._queue = Histogram(
            "accelopt_evaluation_queue_seconds",
            description="Time an evaluation waited for a slot.",
            boundaries=_SECONDS_BOUNDARIES,
        )
        self._duration = Histogram(
            "accelopt_evaluation_seconds",
            description="Time an evaluation took on its slot.",
            boundaries=_SECONDS_BOUNDARIES,
        )

    def note(self, result: EvaluationResult, duration_s: float) -> None:
        """Counts a result."""
        self._evaluations.inc(1, {"outcome": str(result.outcome)})
        if result.answered_from.startswith("store:"):
            self._answered.inc(1)
        # Ray refuses a zero, which a queue that was empty is.
        self._queue.observe(max(result.queue_s, 1e-6))
        self._duration.observe(max(duration_s, 1e-6))

    def note_lost(self) -> None:
        """Counts a lost worker."""
        self._lost.inc(1)

    def show(self, slots: Mapping[int, Slot], waiting: int) -> None:
        """Publishes the slots' states."""
        states = Counts(slot.state for slot in slots.values())
        for state in SlotState:
            self._slots.set(states[state], {"state": str(state)})
        self._waiting.set(waiting)
