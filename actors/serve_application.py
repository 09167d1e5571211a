"""Models as an application of Ray Serve, and the guard that sees to its end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from accelopt_ray.outcome import UserError
from accelopt_ray.serving.llm_config import entry_options, llm_config_arguments
from accelopt_ray.serving.model import HostedModel

_SERVE_PORT = 8000
_GUARD_LOOKS_S = 5.0


class ServeApplication:
    """All models of a run as one application of ``ray.serve.llm``. Ray Serve starts and heals their replicas.

    Attributes:
        base_url: Where the application answers.
    """

    def __init__(self, models: Sequence[HostedModel], name: str, host: str, node: str, port: int = _SERVE_PORT) -> None:
        """Prepares; nothing is started.

        Args:
            models: What to serve.
            name: Of the application, and the first part of its path: a cluster may serve several runs.
            host: Address of this node, at which Serve's proxy listens.
            node: Id of this node. The entry stays on it, where a proxy then is, and off the GPU nodes, which could not
                be given back under it.
            port: Port of the proxy.
        """
        self._models = models
        self._names = ", ".join(model.name for model in models)
        self._name = name
        self._host = host
        self._node = node
        self._port = port
        self._deploying: asyncio.Future[Any] | None = None
        self._failure: str | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="serve")
        self.base_url = f"http://{host}:{port}/{name}/v1"

    async def start(self) -> None:
        """Hands the application to Serve, which deploys it in the background.

        Raises:
            UserError: Ray's LLM serving is not installed.
        """
        try:
            from ray.serve.llm import LLMConfig, build_openai_app
        except ImportError as error:
            raise UserError(
                f"hosting on Ray Serve needs Ray's LLM serving ({error}): install ray[llm] on the nodes, or choose "
                "hosting: process"
            ) from None
        from ray import serve

        application = build_openai_app(
            {
                "llm_configs": [LLMConfig(**llm_config_arguments(model)) for model in self._models],
                "ingress_deployment_config": entry_options(self._node),
            }
        )

        def deploy() -> None:
            options = {"host": self._host, "port": self._port}
            try:
                serve.start(http_options=options)
            except ValueError:
                # Another run has started Serve at the same moment; now it is there for both.
                serve.start(http_options=options)
            serve.run_many(
                [serve.RunTarget(application, self._name, f"/{self._name}")], wait_for_applications_running=False
            )

        self._failure = None
        self._deploying = self._in_thread(deploy)

    async def loading(self) -> str | None:
        """What the application still waits for. Its entry lists all models before a single one is loaded."""
        if self._deploying is None or not self._deploying.done():
            return "Ray Serve is starting"
        if self._deploying.exception() is not None:
            return "Ray Serve could not start"
        from ray import serve

        application = (await self._in_thread(serve.status)).applications.get(self._name)
        if application is None or application.status == "RUNNING":
            return None
        deployments = application.deployments
        if application.status == "DEPLOY_FAILED":
            causes = [
                f"{name.partition(':')[2]}: {_sentence(each.message)}"
                for name, each in deployments.items()
                if each.status == "DEPLOY_FAILED"
            ]
            self._failure = "; ".join(causes) or f"{self._names}: {_sentence(application.message)}"
        waiting = [each.message for each in deployments.values() if each.status != "HEALTHY" and each.message]
        return waiting[0].partition("\n")[0].strip() if waiting else "its replicas are starting"

    def failure(self) -> str | None:
        """Why Serve has given up, or None; a replica's own trouble is Serve's to mend."""
        if self._deploying is None:
            return "the application has not been started"
        if not self._deploying.done():
            return None
        error = self._deploying.exception()
        reason = self._failure if error is None else f"{self._names}: {_sentence(str(error))}"
        return None if reason is None else f"Ray Serve could not deploy {reason}"

    async def stop(self) -> None:
        """Takes the application down and gives its GPUs back."""
        if self._deploying is None:
            return
        await asyncio.gather(self._deploying, return_exceptions=True)
        await self._in_thread(_take_down, self._name)
        self._deploying = None

    def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _take_down(application: str) -> None:
    from ray import serve

    if application in serve.status().applications:
        serve.delete(application)


def _sentence(told: str) -> str:
    """Returns what a message of Serve says at its end, where the error of a replica's traceback stands."""
    return next((line.strip() for line in reversed(told.splitlines()) if line.strip()), "it does not say why")


class ServeGuard:
    """A detached actor that takes an application down once its host is gone: Serve outlives whoever has asked it."""

    def __init__(self, host: Any, application: str) -> None:
        """Begins to watch.

        Args:
            host: The actor that owns the application.
            application: Its name.
        """
        me = ray.get_runtime_context().current_actor
        threading.Thread(target=self._watch, args=(host, application, me), daemon=True).start()

    @staticmethod
    def _watch(host: Any, application: str, me: Any) -> None:
        while True:
            try:
                ray.get(host.base_url.remote())
            except ActorUnavailableError:
                pass  # the way to it may be disturbed for a moment
            except RayActorError:
                break
            time.sleep(_GUARD_LOOKS_S)
        try:
            with contextlib.suppress(ImportError):  # without Serve there is nothing to take down
                _take_down(application)
        finally:
            ray.kill(me)
