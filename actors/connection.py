"""A run's way to its models: made while the baseline is evaluated, which needs none."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.config import ROLES, RunConfig
from accelopt_ray.search.services import ModelCall, ModelReply
from actors.models import ModelHosts, bring_up


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

    async def close(self, say: Callable[[str], None]) -> None:
        """Ends whatever was started for it; says what idle GPUs have cost."""
        await self.client.close()
        if self.keeping is not None:
            self.keeping.cancel()
            await asyncio.gather(self.keeping, return_exceptions=True)
        if self.hosts is not None:
            for model, usd in self.client.idle_gpu_usd.items():
                say(f"{model} was idle for {usd:.2f} USD of GPU time after its last call")
            await self.hosts.stop()
        if self.server is not None:
            await asyncio.to_thread(self.server.stop)


class LateClient:
    """Answers calls once the connection is made."""

    def __init__(self, connecting: asyncio.Task[Connection]) -> None:
        self._connecting = connecting

    async def complete(self, call: ModelCall) -> ModelReply:
        """As :meth:`ModelClient.complete`."""
        connection = await asyncio.shield(self._connecting)
        reply: ModelReply = await connection.client.complete(call)
        return reply


async def connect(
    config: RunConfig,
    say: Callable[[str], None],
    rewriter: ModelEndpoint | None = None,
    urls: Mapping[str, Sequence[str]] | None = None,
) -> Connection:
    """Makes the client; without configured models, starts the offline rewriter for it.

    Args:
        config: The run's configuration.
        say: Told how hosted models come up.
        rewriter: The offline rewriter where somebody else serves it.
        urls: Where the hosted models answer if somebody else has brought them up.
    """
    if config.replay is not None:
        replaying = await asyncio.to_thread(importlib.import_module, "accelopt_ray.agents.replay")
        client = await asyncio.to_thread(replaying.replay_client, config.replay)
        origin = f"replay:{config.replay}"
        recorded = {role: [ModelEndpoint(origin, name) for name in client.models.get(role, ())] for role in ROLES}
        return Connection(client, recorded, None)
    # Imported in a thread, here where the actor lives: over a second in which actors and baseline get on.
    client_module = await asyncio.to_thread(importlib.import_module, "accelopt_ray.agents.client")
    server, hosts, hosted_urls = None, None, urls
    wanted = config.hosted_models()
    gpus_since_s = None
    if wanted and hosted_urls is None:
        hosts = await bring_up(wanted, config.hosting, config.output / "logs", say)
        hosted_urls, gpus_since_s = hosts.urls, hosts.since_s
    roles = config.model_endpoints(hosted_urls or {})
    if not config.models and rewriter is not None:
        roles = {role: [rewriter] for role in ROLES}
    elif not config.models:
        module = await asyncio.to_thread(importlib.import_module, "accelopt_ray.rewrite.server")
        server = await asyncio.to_thread(module.start_background)
        roles = {role: [ModelEndpoint(server.base_url, server.model, max_in_flight=16)] for role in ROLES}
    # Models that somebody else has brought up serve others, too, while this run does not ask them.
    asked = client_module.ModelClient(roles, config.price_table(), gpus_since_s=gpus_since_s, charge_idle=urls is None)
    keeping = asyncio.get_running_loop().create_task(hosts.keep(asked.move)) if hosts is not None else None
    return Connection(asked, roles, server, hosts, keeping)
