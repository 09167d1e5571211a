"""The driver: a run's searches in one actor, so that they live in the cluster beside what they use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.config import RunConfig
from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.records import TaskRef
from accelopt_ray.outcome import UserError
from accelopt_ray.tally import Tally
from accelopt_ray.trajectory import read_table
from accelopt_ray.version import code_version
from actors.connection import Connection, LateClient, connect
from actors.events import Event, EventLog
from actors.logs import run_formatter
from actors.memory import RemoteStore
from actors.pool import Pool, ProfilerPool
from actors.pool_state import PoolStatus
from actors.services import RayServices
from actors.telling import TOLD_COLUMNS, Telling

if TYPE_CHECKING:
    from accelopt_ray.analysis.live import Snapshot
    from accelopt_ray.search.restore import Restored
    from accelopt_ray.search.result import SearchResult

Edits = Mapping[str, Sequence[object]]
"""Settings that were changed before a run was taken up again: name to (before, after)."""

_LOG = logging.getLogger("accelopt_ray.driver")

_RUN_ID: ContextVar[str] = ContextVar("run_id", default="")
"""The run on whose behalf code runs, for the logs."""


@dataclass(frozen=True)
class Outcome:
    """How one task's search ended.

    Attributes:
        tally: Where it stands.
        status: As :class:`~accelopt_ray.search.result.SearchStatus` has it.
        reason: One sentence where the status does not say it all.
    """

    tally: Tally
    status: str
    reason: str


class SearchDriver:
    """An asynchronous Ray actor that runs the searches of a run. Watching and stopping work while it runs."""

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        recorder: Any,
        memory: Any,
        make_pool: Callable[[], Pool],
        edits: Edits | None = None,
        rewriter: ModelEndpoint | None = None,
        hosted_urls: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Takes over what was started for it; nothing runs yet.

        Args:
            config: The resolved configuration.
            run_id: Names the run.
            recorder: Handle of the run's :class:`~actors.recorder.Recorder`.
            memory: Handle of its :class:`~actors.memory.Memory`.
            make_pool: Gives the pool that evaluates; called here, where its event loop is.
            edits: What was changed before the run in ``config.output`` is taken up again; None for a new run.
            rewriter: The offline rewriter where somebody else serves it; by default the run starts its own.
            hosted_urls: Where the hosted models answer if somebody else has brought them up.
        """
        self._config = config
        self._run_id = run_id
        self._edits = edits
        self._recorder = recorder
        self._memory = memory
        self._pool = make_pool()
        self._rewriter = rewriter
        self._hosted_urls = hosted_urls
        self._events = EventLog()
        self._tasks = {task.name: task for task in config.load_tasks()}
        self._telling = Telling(run_id, self._tasks, config.output, self._events)
        self._search: asyncio.Task[dict[str, SearchResult]] | None = None
        self._log = self._open_log(config.output / "logs")

    async def run(self) -> dict[str, Outcome]:
        """Runs the searches to their end; returns how each task's ended, by the task's name.

        Raises:
            UserError: Something that could not be known before proved wrong in the user's set-up.
        """
        _RUN_ID.set(self._run_id)
        self._search = asyncio.get_running_loop().create_task(self._run())
        try:
            results = await self._search
        except Exception:
            _LOG.exception("the run failed")
            raise
        finally:
            await self._close()
        return {
            name: Outcome(self._telling.tallies[name], str(result.status), result.reason)
            for name, result in results.items()
        }

    async def events(self, position: int, wait_s: float) -> list[Event]:
        """Returns the events from a position on; waits a while for the first of them."""
        return await self._events.after(position, wait_s)

    async def pool_status(self) -> PoolStatus | None:
        """What the run's own pool is doing; None for a run that evaluates on a shared one."""
        return self._pool.status() if isinstance(self._pool, ProfilerPool) else None

    async def held_runs(self) -> dict[str, str]:
        """The run and its folder, for those who look for it in the cluster."""
        return {self._run_id: str(self._config.output)}

    async def snapshot(self, run_id: str) -> Snapshot:
        """Where the run stands, read from its folder for those who cannot.

        Raises:
            UserError: It has written nothing yet.
        """
        from accelopt_ray.analysis.live import look

        return await asyncio.to_thread(look, str(self._config.output), run_id)

    async def stop(self) -> dict[str, Tally]:
        """Ends the run early, makes everything recorded durable and returns where each task stands."""
        if self._search is not None:
            self._search.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._search
        await self._close()
        return self._telling.tallies

    async def _run(self) -> dict[str, SearchResult]:
        await self._recorder.lock.remote()
        past = None if self._edits is None else await self._restore()
        # Connecting takes about as long as the baseline's evaluation, which needs no model.
        connecting = asyncio.get_running_loop().create_task(
            connect(self._config, self._tell_of_hosting, self._rewriter, self._hosted_urls)
        )
        limits = self._config.evaluation.limits()
        services = RayServices(
            LateClient(connecting),
            self._pool,
            self._recorder,
            self._telling.recorded,
            self._events,
            limits,
            past.askings if past is not None else {},
        )
        described = asyncio.get_running_loop().create_task(self._record_run(connecting, past))
        try:
            await self._pool.start()
            results = await self._search_all(services, past)
            await described
        finally:
            described.cancel()
            connecting.cancel()
            await asyncio.gather(described, connecting, return_exceptions=True)
            if not connecting.cancelled() and connecting.exception() is None:
                await connecting.result().close(self._tell_of_hosting)
        return results

    async def _search_all(self, services: RayServices, past: Restored | None) -> dict[str, SearchResult]:
        from accelopt_ray.search.allocation import AdaptiveTurns, Allowance, DollarPurse, EvaluationPurse
        from accelopt_ray.search.context import all_or_cancel
        from accelopt_ray.search.history import History
        from accelopt_ray.search.loop import run_search
        from accelopt_ray.search.transfer import bring_lessons, read_lessons

        prompts = self._config.prompt_library()
        settings = self._config.settings_of_each(len(self._tasks))
        total = self._config.search_settings()
        turns = None
        if self._config.allocate == "adaptive" and len(self._tasks) > 1:
            if total.max_cost_usd is not None:
                turns = AdaptiveTurns(list(self._tasks), DollarPurse(total.max_cost_usd))
            elif total.max_evaluations is not None:
                turns = AdaptiveTurns(list(self._tasks), EvaluationPurse(total.max_evaluations))
        if self._config.memory_from is not None:
            await asyncio.to_thread(bring_lessons, self._config.output, self._config.memory_from)
        lessons = read_lessons(self._config.output)
        results = await all_or_cancel(
            *(
                run_search(
                    settings,
                    task,
                    services,
                    prompts=prompts,
                    task_ref=TaskRef(task.location, tuple(self._config.shape_of(name).items())),
                    memory=RemoteStore(self._memory, name),
                    history=past.history if past is not None else History(),
                    stoppers=[Allowance(turns, name)] if turns is not None else [],
                    turns=turns,
                    lessons=lessons,
                )
                for name, task in self._tasks.items()
            )
        )
        return dict(zip(self._tasks, results, strict=True))

    async def _restore(self) -> Restored:
        """Reads what the run has on disk and tells watchers where it stands."""
        from accelopt_ray.search.restore import restore

        past = await asyncio.to_thread(restore, self._config.output, self._run_id)
        told: dict[str, list[dict[str, object]]] = {}
        for table in ("sources", *TOLD_COLUMNS):
            rows = await asyncio.to_thread(read_table, self._config.output, table, self._run_id)
            self._telling.count(table, rows.to_pylist())
            if table in TOLD_COLUMNS:
                told[table] = rows.select(list(TOLD_COLUMNS[table])).to_pylist()
        self._events.append(Event("resumed", {"tables": told, "lost_calls": len(past.lost_calls)}))
        return past

    async def _record_run(self, connecting: asyncio.Task[Connection], past: Restored | None) -> None:
        started_at = datetime.now(timezone.utc)
        if past is not None:
            await self._record_resume(past, started_at)
            if await asyncio.to_thread(self._is_described):
                return
        roles = (await asyncio.shield(connecting)).roles
        row = {
            "created_at": started_at,
            "preset": self._config.preset,
            "seed": self._config.seed,
            "device": self._config.device,
            "models": {role: ", ".join(each.model for each in endpoints) for role, endpoints in roles.items()},
            "config_json": self._config.to_json(),
            "config_sha256": self._config.sha256(),
            "code_version": code_version(),
            "fingerprint_json": self._fingerprint_json(),
        }
        await self._recorder.commit.remote("runs", [row])

    def _is_described(self) -> bool:
        return len(read_table(self._config.output, "runs", self._run_id, columns=["run_id"])) > 0

    async def _record_resume(self, past: Restored, resumed_at: datetime) -> None:
        lost = [dict(row) for row in past.lost_calls]
        if lost:
            await self._recorder.commit.remote("llm_calls", lost)
            self._telling.recorded("llm_calls", lost)
        costs = [row["cost_usd"] for row in lost]
        row = {
            "resumed_at": resumed_at,
            "config_json": self._config.to_json(),
            "config_sha256": self._config.sha256(),
            "edits_json": json.dumps(self._edits, sort_keys=True),
            "code_version": code_version(),
            "fingerprint_json": self._fingerprint_json(),
            "lost_calls": len(lost),
            "lost_cost_usd": sum(cost for cost in costs if isinstance(cost, float)),
        }
        await self._recorder.commit.remote("resumes", [row])

    def _tell_of_hosting(self, message: str) -> None:
        _LOG.info("%s", message)
        self._events.append(Event("hosting", {"message": message}))

    def _fingerprint_json(self) -> str:
        try:
            device = get_device(self._config.device).fingerprint()
        except UserError:
            device = {}  # The driver's machine need not have it; each evaluation carries its own machine's.
        machine = {"python": platform.python_version(), "platform": platform.platform(), "host": platform.node()}
        return json.dumps({**device, **machine}, sort_keys=True)

    def _open_log(self, folder: Path) -> logging.Handler:
        """Writes what is logged on behalf of this run; other runs may live in the same process."""
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / "driver.log", encoding="utf-8", delay=True)
        handler.setFormatter(run_formatter(self._run_id))
        handler.addFilter(lambda _: _RUN_ID.get() == self._run_id)
        logging.getLogger("accelopt_ray").addHandler(handler)
        logging.getLogger("accelopt_ray").setLevel(logging.INFO)
        return handler

    async def _close(self) -> None:
        await self._pool.close()
        await self._recorder.close.remote()
        logging.getLogger("accelopt_ray").removeHandler(self._log)
        self._log.close()
