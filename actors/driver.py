"""The driver: one search, run as an actor, so that it lives in the cluster beside what it uses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.config import ROLES, RunConfig
from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.records import TaskRef
from accelopt_ray.tally import Tally, best_kernel_file
from accelopt_ray.version import code_version
from actors.events import Event, EventLog
from actors.pool import ProfilerPool
from actors.services import RayServices, Rows
from nkibench.task import load_task

if TYPE_CHECKING:
    from accelopt_ray.search.loop import SearchResult

_LOG = logging.getLogger("accelopt_ray.driver")

_TOLD_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "evaluations": (
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
    "llm_calls": ("role", "iteration", "outcome", "error_text", "cost_usd", "prompt_tokens", "completion_tokens"),
    "iterations": ("iteration", "beam_candidate_ids"),
}
"""Tables that watchers hear of, and the columns that are worth sending; the texts stay in the trajectory."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        tally: Where it stands.
        status: As :class:`~accelopt_ray.search.loop.SearchStatus` has it.
        reason: One sentence where the status does not say it all.
    """

    tally: Tally
    status: str
    reason: str


class SearchDriver:
    """An asynchronous Ray actor that runs one search. Watching and stopping work while it runs."""

    def __init__(
        self, config: RunConfig, run_id: str, recorder: Any, workers: Sequence[Any], start_worker: Callable[[int], Any]
    ) -> None:
        """Takes over what was started for it; nothing runs yet.

        Args:
            config: The resolved configuration.
            run_id: Names the run.
            recorder: Handle of the run's :class:`~actors.recorder.Recorder`.
            workers: Handles of its profilers.
            start_worker: Starts another profiler for a slot.
        """
        self._config = config
        self._run_id = run_id
        self._recorder = recorder
        self._pool = ProfilerPool(workers, start_worker)
        self._events = EventLog()
        self._tally = Tally()
        self._task = load_task(config.task, config.shape)
        self._search: asyncio.Task[SearchResult] | None = None
        self._write_log(config.output / "logs")

    async def run(self) -> Outcome:
        """Runs the search to its end.

        Raises:
            UserError: Something that could not be known before proved wrong in the user's set-up.
        """
        self._search = asyncio.get_running_loop().create_task(self._run())
        try:
            result = await self._search
        except Exception:
            _LOG.exception("the run failed")
            raise
        finally:
            await self._close()
        return Outcome(self._tally, str(result.status), result.reason)

    async def events(self, position: int, wait_s: float) -> list[Event]:
        """Returns the events from a position on; waits a while for the first of them."""
        return await self._events.after(position, wait_s)

    async def stop(self) -> Tally:
        """Ends the search early, makes everything recorded durable and returns where it stands."""
        if self._search is not None:
            self._search.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._search
        await self._close()
        return self._tally

    async def _run(self) -> SearchResult:
        # Imported where the actor lives: the process that starts it needs none of this and is waited for.

        from accelopt_ray.agents.client import ModelClient
        from accelopt_ray.search.loop import run_search

        roles = {role: [each.model_endpoint() for each in self._config.endpoints(role)] for role in ROLES}
        if not self._config.models:
            from accelopt_ray.rewrite.server import start_background

            server = start_background()
            roles = {"default": [ModelEndpoint(server.base_url, server.model, api_key_env="", max_in_flight=16)]}
        client = ModelClient(roles)
        services = RayServices(
            client, self._pool, self._recorder, self._recorded, self._events, self._config.evaluation.limits()
        )
        try:
            await asyncio.gather(self._pool.start(), self._record_run(roles))
            return await run_search(
                self._config.search_settings(),
                self._task,
                services,
                task_ref=TaskRef(self._task.location, tuple(self._config.shape.items())),
            )
        finally:
            await client.close()

    async def _record_run(self, roles: Mapping[str, Sequence[ModelEndpoint]]) -> None:
        device = get_device(self._config.device)
        machine = {"python": platform.python_version(), "platform": platform.platform(), "host": platform.node()}
        models = {role: ", ".join(endpoint.model for endpoint in endpoints) for role, endpoints in roles.items()}
        row = {
            "created_at": datetime.now(timezone.utc),
            "preset": self._config.preset,
            "seed": self._config.seed,
            "device": self._config.device,
            "models": models,
            "config_json": self._config.to_json(),
            "config_sha256": self._config.sha256(),
            "code_version": code_version(),
            "fingerprint_json": json.dumps({**device.fingerprint(), **machine}, sort_keys=True),
        }
        await self._recorder.commit.remote("runs", [row])

    def _recorded(self, table: str, rows: Rows) -> None:
        before = self._tally.best
        self._tally.record(table, rows)
        for row in rows if table in _TOLD_COLUMNS else ():
            self._events.append(Event(table, {name: row.get(name) for name in _TOLD_COLUMNS[table]}))
        if table == "sources" or self._tally.best is not before:
            self._write_best()

    def _write_best(self) -> None:
        text = best_kernel_file(self._tally, self._run_id, self._task.name)
        if text is None:
            return
        path = self._config.output / "best" / f"{self._task.name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)

    def _write_log(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / "driver.log", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
        logging.getLogger("accelopt_ray").addHandler(handler)
        logging.getLogger("accelopt_ray").setLevel(logging.INFO)

    async def _close(self) -> None:
        await self._pool.close()
        await self._recorder.close.remote()
