"""The search's services, given by actors: replies that are on disk before they are used, evaluations, records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, Protocol

from accelopt_ray.devices.protocol import Limits
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.search.rows import call_row, call_start_row, result_row
from accelopt_ray.search.services import ModelCall, ModelReply
from actors.events import Event, EventLog
from actors.logs import fields
from actors.pool import Pool

Rows = Sequence[Mapping[str, object]]

_LOG = logging.getLogger("accelopt_ray.evaluations")


class Client(Protocol):
    """Whoever answers model calls."""

    async def complete(self, call: ModelCall) -> ModelReply:
        """Returns the reply; a failed call is a reply whose outcome is not ``ok``."""


class RayServices:
    """Implements :class:`~accelopt_ray.search.services.Services` inside the driver actor."""

    def __init__(
        self,
        client: Client,
        pool: Pool,
        recorder: Any,
        recorded: Callable[[str, Rows], None],
        events: EventLog,
        limits: Limits,
        askings: Mapping[str, int],
    ) -> None:
        """Joins what the driver has started.

        Args:
            client: Answers model calls.
            pool: Evaluates.
            recorder: Handle of the :class:`~actors.recorder.Recorder` actor.
            recorded: Told of every row once it is accepted, with the name of its table.
            events: Where the search's own events go.
            limits: Bounds of each stage of each evaluation.
            askings: How often calls were asked for in earlier sessions of the run, by call id.
        """
        self._client = client
        self._pool = pool
        self._recorder = recorder
        self._recorded = recorded
        self._events = events
        self._limits = limits
        self._askings = askings

    async def complete(self, call: ModelCall) -> ModelReply:
        """Asks the model and returns the reply once its row is on disk; that it is asked is on disk before."""
        started_at = datetime.now(timezone.utc)
        asking = self._askings.get(call.call_id, 0)
        await self._recorder.commit.remote("call_starts", [call_start_row(call, asking, started_at)])
        reply = await self._client.complete(call)
        rows = [call_row(call, reply, asking, started_at)]
        await self._recorder.commit.remote("llm_calls", rows)
        self._recorded("llm_calls", rows)
        return reply

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        """Evaluates on the pool and returns the result once it is on disk.

        Raises:
            UserError: The task or its reference proved defective.
        """
        result = await self._pool.evaluate(replace(job, limits=self._limits))
        await self._recorder.commit.remote("results", [result_row(job, result)])
        _LOG.info("evaluated %s", _of_result(job, result))
        return result

    async def record(self, table: str, rows: Rows) -> None:
        """Hands rows to the recorder."""
        await self._recorder.add.remote(table, list(rows))
        self._recorded(table, rows)
        for row in rows if table == "evaluations" else ():
            _LOG.info("candidate %s", _of_row(row))

    def progress(self, event: str, **values: object) -> None:
        """Tells watchers of what is no row of any table."""
        self._events.append(Event(event, values))


def _of_result(job: EvaluationJob, result: EvaluationResult) -> str:
    return fields(
        task=job.task_name,
        iteration=job.iteration,
        evaluation=result.evaluation_id,
        core=result.core,
        outcome=result.outcome,
        reason=result.reason,
        latency_ms=result.latency_ms,
        compile_s=result.compile_s,
        run_s=result.run_s,
        queue_s=result.queue_s,
        answered_from=result.answered_from,
    )


def _of_row(row: Mapping[str, object]) -> str:
    """A candidate's own line: which evaluation is whose may be settled only at the iteration's end."""
    names = ("task", "iteration", "core", "outcome", "reason", "latency_ms", "answered_from")
    ids = {"candidate": row.get("candidate_id"), "evaluation": row.get("evaluation_id")}
    return fields(**ids, **{name: row.get(name) for name in names})
