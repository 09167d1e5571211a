"""The driver: a run's searches in one actor, so that they live in the cluster beside what they use."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
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
from accelopt_ray.config import ROLES, RunConfig
from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.records import TaskRef
from accelopt_ray.outcome import UserError
from accelopt_ray.search.services import ModelCall, ModelReply
from accelopt_ray.tally import Tally, best_kernel_file
from accelopt_ray.trajectory import read_table
from accelopt_ray.version import code_version
from actors.events import Event, EventLog
from actors.memory import RemoteStore
from actors.models import ModelHosts, bring_up
from actors.pool import Pool, ProfilerPool
from actors.pool_state import PoolStatus
from actors.services import RayServices, Rows

if TYPE_CHECKING:
    from accelopt_ray.analysis.live import Snapshot
    from accelopt_ray.search.restore import Restored
    from accelopt_ray.search.result import SearchResult

Edits = Mapping[str, Sequence[object]]
"""Settings that were changed before a run was taken up again: name to (before, after)."""

_LOG = logging.getLogger("accelopt_ray.driver")

_RUN_ID: ContextVar[str] = ContextVar("run_id", default="")
"""The run on whose behalf code runs, for the logs."""

_TOLD_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "evaluations": (
        "task",
        "candidate_id",
        "parent_candidate_id",
        "iteration",
        "outcome",
        "reason",
        "error_text",
        "device",
        "simulated",
        "latency_ms",
        "percent_of_peak",
        "speedup_vs_baseline",
        "source_sha256",
        "check",
    ),
    "llm_calls": (
        "task",
        "role",
        "iteration",
        "outcome",
        "error_text",
        "cost_usd",
        "prompt_tokens",
        "completion_tokens",
    ),
    "iterations": ("task", "iteration", "beam_candidate_ids"),
}
"""Tables that watchers hear of, and the columns that are worth sending; the texts stay in the trajectory."""


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


@dataclass(frozen=True)
class Connection:
    """The way to the models.

    Attributes:
        client: A :class:`~accelopt_ray.agents.client.ModelClient`.
        roles: Endpoints by role.
        server: The offline rewriter, where it is the model and this run's own.
        hosts: The models that this run has brought up.
        keeping: Keeps these alive.
    """

    client: Any
    roles: Mapping[str, Sequence[ModelEndpoint]]
    server: Any
    hosts: ModelHosts | None = None
    keeping: asyncio.Task[None] | None = None


class LateClient:
    """Answers calls once the connection is made."""

    def __init__(self, connecting: asyncio.Task[Connection]) -> None:
        self._connecting = connecting

    async def complete(self, call: ModelCall) -> ModelReply:
        """As :meth:`ModelClient.complete`."""
        connection = await asyncio.shield(self._connecting)
        reply: ModelReply = await connection.client.complete(call)
        return reply


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
        self._tallies = {name: Tally() for name in self._tasks}
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
            name: Outcome(self._tallies[name], str(result.status), result.reason) for name, result in results.items()
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
        return self._tallies

    async def _run(self) -> dict[str, SearchResult]:
        await self._recorder.lock.remote()
        past = None if self._edits is None else await self._restore()
        # Connecting takes about as long as the baseline's evaluation, which needs no model.
        connecting = asyncio.get_running_loop().create_task(self._connect())
        limits = self._config.evaluation.limits()
        services = RayServices(
            LateClient(connecting),
            self._pool,
            self._recorder,
            self._recorded,
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
            await self._disconnect(connecting)
        return results

    async def _search_all(self, services: RayServices, past: Restored | None) -> dict[str, SearchResult]:
        from accelopt_ray.search.allocation import AdaptiveTurns, Allowance
        from accelopt_ray.search.context import all_or_cancel
        from accelopt_ray.search.history import History
        from accelopt_ray.search.loop import run_search
        from accelopt_ray.search.transfer import bring_lessons, read_lessons

        prompts = self._config.prompt_library()
        settings = self._config.settings_of_each(len(self._tasks))
        total = self._config.search_settings().max_evaluations
        turns = None
        if self._config.allocate == "adaptive" and total is not None and len(self._tasks) > 1:
            turns = AdaptiveTurns(list(self._tasks), total)
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
        for table in ("sources", *_TOLD_COLUMNS):
            rows = await asyncio.to_thread(read_table, self._config.output, table, self._run_id)
            self._record_in_tallies(table, rows.to_pylist())
            if table in _TOLD_COLUMNS:
                told[table] = rows.select(list(_TOLD_COLUMNS[table])).to_pylist()
        self._events.append(Event("resumed", {"tables": told, "lost_calls": len(past.lost_calls)}))
        return past

    async def _connect(self) -> Connection:
        """Makes the client; without configured models, starts the offline rewriter for it."""
        if self._config.replay is not None:
            from accelopt_ray.agents.replay import replay_client

            client = await asyncio.to_thread(replay_client, self._config.replay)
            origin = f"replay:{self._config.replay}"
            recorded = {role: [ModelEndpoint(origin, name) for name in client.models.get(role, ())] for role in ROLES}
            return Connection(client, recorded, None)
        # Imported in a thread, here where the actor lives: over a second in which actors and baseline get on.
        client_module = await asyncio.to_thread(importlib.import_module, "accelopt_ray.agents.client")
        server, hosts, hosted_urls = None, None, self._hosted_urls
        wanted = self._config.hosted_models()
        gpus_since_s = None
        if wanted and hosted_urls is None:
            hosts = await bring_up(wanted, self._config.hosting, self._config.output / "logs", self._tell_of_hosting)
            hosted_urls, gpus_since_s = hosts.urls, hosts.since_s
        roles = self._config.model_endpoints(hosted_urls or {})
        if not self._config.models and self._rewriter is not None:
            roles = {role: [self._rewriter] for role in ROLES}
        elif not self._config.models:
            rewriter = await asyncio.to_thread(importlib.import_module, "accelopt_ray.rewrite.server")
            server = await asyncio.to_thread(rewriter.start_background)
            roles = {role: [ModelEndpoint(server.base_url, server.model, max_in_flight=16)] for role in ROLES}
        # Models that somebody else has brought up serve others, too, while this run does not ask them.
        asked = client_module.ModelClient(
            roles, self._config.price_table(), gpus_since_s=gpus_since_s, charge_idle=self._hosted_urls is None
        )
        keeping = asyncio.get_running_loop().create_task(hosts.keep(asked.move)) if hosts is not None else None
        return Connection(asked, roles, server, hosts, keeping)

    async def _disconnect(self, connecting: asyncio.Task[Connection]) -> None:
        if connecting.cancelled() or connecting.exception() is not None:
            return
        connection = connecting.result()
        await connection.client.close()
        if connection.keeping is not None:
            connection.keeping.cancel()
            await asyncio.gather(connection.keeping, return_exceptions=True)
        if connection.hosts is not None:
            for model, usd in connection.client.idle_gpu_usd.items():
                self._tell_of_hosting(f"{model} was idle for {usd:.2f} USD of GPU time after its last call")
            await connection.hosts.stop()
        if connection.server is not None:
            await asyncio.to_thread(connection.server.stop)

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
            self._recorded("llm_calls", lost)
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

    def _recorded(self, table: str, rows: Rows) -> None:
        before = {name: tally.best for name, tally in self._tallies.items()}
        self._record_in_tallies(table, rows)
        for row in rows if table in _TOLD_COLUMNS else ():
            self._events.append(Event(table, {name: row.get(name) for name in _TOLD_COLUMNS[table]}))
        for name, tally in self._tallies.items():
            if table == "sources" or tally.best is not before[name]:
                self._write_best(name)

    def _record_in_tallies(self, table: str, rows: Rows) -> None:
        for row in rows:
            tally = self._tallies.get(str(row["task"]))
            if tally is not None:
                tally.record(table, [row])

    def _write_best(self, name: str) -> None:
        text = best_kernel_file(self._tallies[name], self._run_id, name)
        if text is None:
            return
        path = self._config.output / "best" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)

    def _open_log(self, folder: Path) -> logging.Handler:
        """Writes what is logged on behalf of this run; other runs may live in the same process."""
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / "driver.log", encoding="utf-8", delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        handler.addFilter(lambda _: _RUN_ID.get() == self._run_id)
        logging.getLogger("accelopt_ray").addHandler(handler)
        logging.getLogger("accelopt_ray").setLevel(logging.INFO)
        return handler

    async def _close(self) -> None:
        await self._pool.close()
        await self._recorder.close.remote()
        logging.getLogger("accelopt_ray").removeHandler(self._log)
        self._log.close()
