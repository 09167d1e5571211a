"""Several runs of a sweep in one process: starting one then costs next to nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from accelopt_ray.config import RunConfig
from accelopt_ray.outcome import UserError
from actors.driver import Edits, Outcome, SearchDriver
from actors.memory import Memory
from actors.recorder import Recorder
from actors.shared import Shared, SharedPool
from nkibench.task import TaskError

if TYPE_CHECKING:
    from accelopt_ray.analysis.live import Snapshot


class InProcess:
    """Stands where a driver expects an actor's handle, for an object of this process."""

    def __init__(self, served: object) -> None:
        """Takes an object whose methods are coroutines."""
        self._served = served

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._served, name))


class _Method:
    def __init__(self, method: Callable[..., Awaitable[Any]]) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        """Starts the method, as a call of an actor would."""
        return asyncio.ensure_future(self._method(*arguments))


class RunHost:
    """An asynchronous Ray actor in which drivers, recorders and memories of several runs live together.

    If it is lost, so are the runs that go on in it; they are taken up from their folders in another.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._drivers: dict[str, SearchDriver] = {}

    async def run(self, config: RunConfig, run_id: str, shared: Shared, edits: Edits | None) -> dict[str, Outcome]:
        """Runs one run to its end; arguments and result as for :class:`~actors.driver.SearchDriver`.

        Raises:
            UserError: The user's set-up proved wrong.
        """
        settings = config.search_settings()
        recorder = InProcess(Recorder(str(config.output / "trajectory"), run_id))
        memory = InProcess(Memory(settings.memory_rule, settings.memory_capacity))
        try:
            driver = SearchDriver(
                config,
                run_id,
                recorder,
                memory,
                partial(SharedPool, shared.pool, run_id),
                edits,
                shared.rewriter,
                shared.hosted_urls,
            )
        except TaskError as error:
            raise UserError(str(error)) from None
        self._drivers[run_id] = driver
        try:
            return await driver.run()
        finally:
            del self._drivers[run_id]

    async def held_runs(self) -> dict[str, str]:
        """The runs that go on here and their folders."""
        return {
            name: folder for driver in self._drivers.values() for name, folder in (await driver.held_runs()).items()
        }

    async def snapshot(self, run_id: str) -> Snapshot:
        """Where one of the runs stands.

        Raises:
            KeyError: It does not go on here (any more).
            UserError: It has written nothing yet.
        """
        return await self._drivers[run_id].snapshot(run_id)

    async def stop(self) -> None:
        """Ends all runs early, everything recorded made durable."""
        await asyncio.gather(*(driver.stop() for driver in list(self._drivers.values())), return_exceptions=True)
