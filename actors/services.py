"""The search's services, given by actors: replies that are on disk before they are used, evaluations, records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from typing import Any, Protocol

from accelopt_ray.devices.protocol import Limits
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.search.services import ModelCall, ModelReply
from actors.events import Event, EventLog
from actors.pool import ProfilerPool

Rows = Sequence[Mapping[str, object]]


class Client(Protocol):
    """Whoever answers model calls."""

    async def complete(self, call: ModelCall) -> ModelReply:
        """Returns the reply; a failed call is a reply whose outcome is not ``ok``."""


class RayServices:
    """Implements :class:`~accelopt_ray.search.services.Services` inside the driver actor."""

    def __init__(
        self,
        client: Client,
        pool: ProfilerPool,
        recorder: Any,
        recorded: Callable[[str, Rows], None],
        events: EventLog,
        limits: Limits,
    ) -> None:
        """Joins what the driver has started.

        Args:
            client: Answers model calls.
            pool: Evaluates.
            recorder: Handle of the :class:`~actors.recorder.Recorder` actor.
            recorded: Told of every row once it is accepted, with the name of its table.
            events: Where the search's own events go.
            limits: Bounds of each stage of each evaluation.
        """
        self._client = client
        self._pool = pool
        self._recorder = recorder
        self._recorded = recorded
        self._events = events
        self._limits = limits

    async def complete(self, call: ModelCall) -> ModelReply:
        """Asks the model and returns the reply once its row is on disk."""
        started_at = datetime.now(timezone.utc)
        reply = await self._client.complete(call)
        rows = [call_row(call, reply, started_at)]
        await self._recorder.commit.remote("llm_calls", rows)
        self._recorded("llm_calls", rows)
        return reply

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        """Evaluates on the pool.

        Raises:
            UserError: The task or its reference proved defective.
        """
        return await self._pool.evaluate(replace(job, limits=self._limits))

    async def record(self, table: str, rows: Rows) -> None:
        """Hands rows to the recorder."""
        await self._recorder.add.remote(table, list(rows))
        self._recorded(table, rows)

    def progress(self, event: str, **values: object) -> None:
        """Tells watchers of what is no row of any table."""
        self._events.append(Event(event, values))


def call_row(call: ModelCall, reply: ModelReply, started_at: datetime) -> dict[str, object]:
    """The ``llm_calls`` row of a finished call."""
    row = asdict(call)
    del row["affinity"]
    return {**row, **asdict(reply), "started_at": started_at}
