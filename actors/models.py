"""Models that a run brings up for itself on the cluster's GPU nodes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from accelopt_ray.outcome import UserError
from accelopt_ray.serving.model import HostedModel
from accelopt_ray.serving.process import ServerProcess
from accelopt_ray.serving.supervisor import HostState, HostStatus, Patience, Server, Supervisor
from actors.pools import NAMESPACE
from actors.serve_application import ServeApplication, ServeGuard

_STATE_WAIT_S = 15.0
_UNAVAILABLE_PAUSE_S = 1.0
_STOP_S = 60.0

Tell = Callable[[str], None]


class ModelHost:
    """An asynchronous actor that owns one server of models from its start to its end."""

    def __init__(
        self, models: Sequence[HostedModel], hosting: str, logs: str, beside_node: str, application: str
    ) -> None:
        """Takes the job; :meth:`start` begins it.

        Args:
            models: What to serve; exactly one for ``process``.
            hosting: ``serve`` or ``process``.
            logs: Folder for the log of a child process.
            beside_node: Id of the node that asks: on the same node the server listens to this machine alone.
            application: Name for it at Ray Serve, used by nobody else.
        """
        here = ray.get_runtime_context().get_node_id()
        address = "127.0.0.1" if here == beside_node else str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        server: Server
        if hosting == "serve":
            server = ServeApplication(models, application, address, here)
        else:
            [model] = models
            server = ServerProcess(model, Path(logs) / f"{_file_name(model.name)}-{here[:6]}.log", address)
        patience = Patience(
            start_s=max(model.start_timeout_s for model in models),
            max_restarts=max(model.max_restarts for model in models),
        )
        self._supervisor = Supervisor(server, [model.name for model in models], patience)

    async def start(self) -> str:
        """Begins to serve; returns the base URL that will answer."""
        self._supervisor.start()
        return self._supervisor.base_url

    async def state(self, seen: HostState | None = None, wait_s: float = 0.0) -> HostState:
        """Where the server stands; waits a while for another state than the one seen."""
        return await self._supervisor.next_state(seen or self._supervisor.state, wait_s)

    async def base_url(self) -> str:
        """Where it answers once it is ready."""
        return self._supervisor.base_url

    async def stop(self) -> None:
        """Ends it for good."""
        await self._supervisor.stop()


@dataclass
class _Place:
    """A host that is ready, where its server answers, and when it got its place, by ``time.monotonic``."""

    models: tuple[HostedModel, ...]
    needed: str
    actor: Any
    url: str
    since_s: float


class ModelHosts:
    """The hosts of a run."""

    def __init__(self, places: Sequence[_Place], start: Callable[[Sequence[HostedModel]], Any], tell: Tell) -> None:
        """Takes over hosts that are ready.

        Args:
            places: The hosts.
            start: Starts another host of the same models.
            tell: Told of every stage in a sentence.
        """
        self._places = list(places)
        self._start = start
        self._tell = tell

    @property
    def urls(self) -> Mapping[str, Sequence[str]]:
        """Base URLs by the model's name, one for each replica that is a process."""
        found: dict[str, list[str]] = {}
        for place in self._places:
            for model in place.models:
                found.setdefault(model.name, []).append(place.url)
        return found

    @property
    def since_s(self) -> float:
        """When the first of them got its place and its GPUs, by ``time.monotonic``."""
        return min(place.since_s for place in self._places)

    async def keep(self, moved: Callable[[str, str], Awaitable[None]]) -> None:
        """Watches the hosts until cancelled; one that is lost, as with its node, is started again where there is room.

        Args:
            moved: Told the base URL that a replica had at first, and where it answers now.
        """
        await asyncio.gather(*(self._keep(place, moved) for place in self._places))

    async def stop(self) -> None:
        """Ends all of them; one that does not follow is ended by force."""
        await _stop([place.actor for place in self._places])

    async def _keep(self, place: _Place, moved: Callable[[str, str], Awaitable[None]]) -> None:
        names, first_url = ", ".join(model.name for model in place.models), place.url
        for _ in range(max(model.max_restarts for model in place.models) + 1):
            reason = await self._until_it_ends(place.actor)
            if reason is not None:
                self._tell(f"{names} is given up: {reason}")
                return
            self._tell(f"the host of {names} was lost and is started again")
            place.actor = self._start(place.models)
            try:
                place.url, place.since_s = await _ready(place.actor, place.models, place.needed, self._tell)
            except UserError as error:
                self._tell(f"{names} is given up: {error}")
                return
            await moved(first_url, place.url)
        self._tell(f"{names} is given up: its hosts were lost too often")

    async def _until_it_ends(self, actor: Any) -> str | None:
        """Passes news on until a host is lost (None) or its server has failed for good (why)."""
        state: HostState | None = None
        while True:
            try:
                news: HostState = await actor.state.remote(state, 0.0 if state is None else _STATE_WAIT_S)
            except ActorUnavailableError:
                await asyncio.sleep(_UNAVAILABLE_PAUSE_S)  # the way to it may be disturbed for a moment
                continue
            except RayActorError:
                return None
            if state is not None and news != state:
                self._tell(news.message)
            if news.status in (HostStatus.FAILED, HostStatus.STOPPED):
                return news.message
            state = news


async def bring_up(models: Sequence[HostedModel], hosting: str, logs: Path, tell: Tell) -> ModelHosts:
    """Starts models and waits until all of them are ready.

    Ray places the hosts, and its autoscaler adds nodes where their GPUs are missing. With ``process`` each model has as
    many replicas as it may have at most; with ``serve`` their number follows the requests.

    Args:
        models: What to serve.
        hosting: ``serve`` or ``process``.
        logs: Folder for logs of child processes.
        tell: Told of every stage in a sentence.

    Raises:
        UserError: One does not come up; what was started is ended.
    """
    here = ray.get_runtime_context().get_node_id()
    if hosting == "serve":
        groups = [tuple(models)] if models else []
    else:
        groups = [(model,) for model in models for _ in range(model.max_replicas)]

    def start(group: Sequence[HostedModel]) -> Any:
        return _host(group, hosting, logs, here)

    actors = [start(group) for group in groups]
    needs = [_needed(group, hosting) for group in groups]
    coming = [asyncio.ensure_future(_ready(*each, tell)) for each in zip(actors, groups, needs, strict=True)]
    try:
        found = await asyncio.gather(*coming)
    except BaseException:
        for each in coming:
            each.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        await _stop(actors)
        raise
    return ModelHosts(
        [
            _Place(group, needed, actor, *each)
            for group, needed, actor, each in zip(groups, needs, actors, found, strict=True)
        ],
        start,
        tell,
    )


def _needed(group: Sequence[HostedModel], hosting: str) -> str:
    """What a host takes of the cluster, in words; with Ray Serve its replicas take what they need themselves."""
    if hosting == "serve":
        return "a process on this machine"
    return f"{group[0].gpus_per_replica} GPUs and {group[0].cpus_per_replica} CPUs on one node"


def _host(group: Sequence[HostedModel], hosting: str, logs: Path, here: str) -> Any:
    options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 100}
    if hosting == "serve":
        # Serve's proxies listen at the same address of every node, here the loopback one of the machine that asks.
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(here, soft=False)
    else:
        # The engine runs in the actor's child and takes the GPUs that the actor was given.
        options["num_cpus"] = group[0].cpus_per_replica
        options["num_gpus"] = group[0].gpus_per_replica
        if group[0].accelerator_type is not None:
            options["accelerator_type"] = group[0].accelerator_type
    application = f"accelopt-{uuid.uuid4().hex[:8]}"
    host = ray.remote(ModelHost).options(**options).remote(list(group), hosting, str(logs), here, application)
    if hosting == "serve":
        beside = NodeAffinitySchedulingStrategy(here, soft=True)
        ray.remote(ServeGuard).options(
            name=f"{application}-guard",
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            scheduling_strategy=beside,
        ).remote(host, application)
    return host


async def _ready(actor: Any, group: Sequence[HostedModel], needed: str, tell: Tell) -> tuple[str, float]:
    """Waits for a host's place and for its server; returns where it answers and when it got its place."""
    names = ", ".join(model.name for model in group)
    try:
        await _placed(actor, names, max(model.start_timeout_s for model in group), needed, tell)
        since_s, state = time.monotonic(), None
        while True:
            state = await actor.state.remote(state, 0.0 if state is None else _STATE_WAIT_S)
            tell(state.message)
            if state.status is HostStatus.READY:
                return await actor.base_url.remote(), since_s
            if state.status in (HostStatus.FAILED, HostStatus.STOPPED):
                raise UserError(f"the model {names} did not come up: {state.message}")
    except RayError as error:
        raise UserError(f"the host of {names} was lost: {str(error).splitlines()[0]}") from None


async def _placed(actor: Any, names: str, timeout_s: float, needed: str, tell: Tell) -> None:
    """Waits until a host has begun; one that is not waited for any longer has nothing to stop and is ended at once."""
    starting = asyncio.ensure_future(_as_future(actor.start.remote()))
    deadline = time.monotonic() + timeout_s
    try:
        while not (await asyncio.wait([starting], timeout=_STATE_WAIT_S))[0]:
            if time.monotonic() > deadline:
                raise UserError(f"the model {names} finds no place in the cluster: it needs {needed} for itself")
            tell(f"{names} waits for a place in the cluster, {needed}")
    except BaseException:
        starting.cancel()
        ray.kill(actor)
        raise
    await starting


async def _as_future(reference: Any) -> Any:
    return await reference


async def _stop(actors: Sequence[Any]) -> None:
    stopping = [asyncio.ensure_future(_as_future(actor.stop.remote())) for actor in actors]
    if stopping:
        await asyncio.wait(stopping, timeout=_STOP_S)
    for each, actor in zip(stopping, actors, strict=True):
        each.cancel()
        ray.kill(actor)
    await asyncio.gather(*stopping, return_exceptions=True)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in name)
