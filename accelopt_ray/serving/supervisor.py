"""Keeping a server of models alive: started, waited for, watched, started again when it fails, ended at last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from accelopt_ray.outcome import StrEnum, UserError
from accelopt_ray.serving.readiness import POLL_S, NotReadyError, answers, wait_until_ready

_LOG = logging.getLogger(__name__)


class Server(Protocol):
    """Something that serves models once it is started."""

    @property
    def base_url(self) -> str:
        """Where it answers; the same after another start."""

    async def start(self) -> None:
        """Starts it, without waiting until it is ready.

        Raises:
            UserError: It cannot be started at all.
        """

    async def loading(self) -> str | None:
        """What it still waits for although it may answer already, or None."""

    def failure(self) -> str | None:
        """Why it has ended, or None."""

    async def stop(self) -> None:
        """Ends it; no harm if it has ended."""


class HostStatus(StrEnum):
    """Where a server stands."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class HostState:
    """Where a server stands.

    Attributes:
        status: The stage.
        message: The last news of it, in one sentence.
        restarts: How often it was started again.
    """

    status: HostStatus
    message: str = ""
    restarts: int = 0


@dataclass(frozen=True)
class Patience:
    """How long is waited for what.

    Attributes:
        start_s: Until it is ready, in seconds.
        max_restarts: How often it is started again.
        watch_s: Between two looks at it.
        silent_looks: Looks in a row without an answer after which it counts as hung.
        pause_s: Before it is started again; doubles each time.
        poll_s: Between two looks while it starts.
    """

    start_s: float = 3600.0
    max_restarts: int = 3
    watch_s: float = 5.0
    silent_looks: int = 6
    pause_s: float = 2.0
    poll_s: float = POLL_S


class Supervisor:
    """Owns one server. Belongs to one event loop."""

    def __init__(self, server: Server, models: Sequence[str], patience: Patience = Patience()) -> None:
        """Prepares; nothing is started.

        Args:
            server: What to keep alive.
            models: Names that it serves.
            patience: How long is waited for what.
        """
        self._server = server
        self._models = list(models)
        self._patience = patience
        self._state = HostState(HostStatus.STOPPED)
        self._changed = asyncio.Condition()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def state(self) -> HostState:
        """Where the server stands."""
        return self._state

    @property
    def base_url(self) -> str:
        """Where it answers once it is ready."""
        return self._server.base_url

    def start(self) -> None:
        """Begins to keep the server alive."""
        if self._keeping is None:
            self._state = HostState(HostStatus.STARTING, f"{', '.join(self._models)} is starting")
            self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def next_state(self, seen: HostState, wait_s: float) -> HostState:
        """Waits a while for another state than the one seen; returns the present one."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(lambda: self._state != seen), wait_s)
        return self._state

    async def stop(self) -> None:
        """Ends the server for good."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        await self._server.stop()
        await self._tell(HostStatus.STOPPED, "stopped")

    async def _keep(self) -> None:
        restarts = 0
        while True:
            try:
                trouble = await self._live()
            except UserError as error:
                await self._tell(HostStatus.FAILED, str(error))
                return
            await self._server.stop()
            if restarts >= self._patience.max_restarts:
                await self._tell(HostStatus.FAILED, trouble)
                return
            restarts += 1
            _LOG.warning("starting the server of %s again: %s", ", ".join(self._models), trouble)
            await self._tell(HostStatus.RESTARTING, trouble, restarts)
            await asyncio.sleep(self._patience.pause_s * 2 ** (restarts - 1))

    async def _live(self) -> str:
        """Starts the server once and stays with it; returns what ended it."""
        await self._server.start()
        try:
            await wait_until_ready(
                self._server.base_url,
                self._models,
                self._patience.start_s,
                loading=self._server.loading,
                failed=self._server.failure,
                progress=self._progress,
                poll_s=self._patience.poll_s,
            )
        except NotReadyError as error:
            return str(error)
        await self._tell(HostStatus.READY, f"{', '.join(self._models)} answers at {self._server.base_url}")
        silent = 0
        while silent < self._patience.silent_looks:
            await asyncio.sleep(self._patience.watch_s)
            reason = self._server.failure()
            if reason is not None:
                return reason
            silent = 0 if await answers(self._server.base_url, self._models[0], self._patience.watch_s) else silent + 1
        return f"{', '.join(self._models)} no longer answers at {self._server.base_url}"

    def _progress(self, message: str) -> None:
        self._state = HostState(self._state.status, message, self._state.restarts)

    async def _tell(self, status: HostStatus, message: str, restarts: int | None = None) -> None:
        async with self._changed:
            self._state = HostState(status, message, self._state.restarts if restarts is None else restarts)
            self._changed.notify_all()
