"""Models as an application of a real Ray Serve, with a stand-in for Ray's LLM serving.

Runs in the environment of ``make test-serve``, which has ``ray[serve]``; ours has not.
"""

from __future__ import annotations

import asyncio
import sys
import time
import types
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")
serve = pytest.importorskip(
    "ray.serve", reason="ray[serve] is not installed: use make test-serve", exc_type=ImportError
)

from ray.exceptions import RayActorError  # noqa: E402

from accelopt_ray.agents.client import ModelClient  # noqa: E402
from accelopt_ray.agents.endpoints import ModelEndpoint  # noqa: E402
from accelopt_ray.outcome import CallOutcome  # noqa: E402
from accelopt_ray.search.services import ModelCall, ModelReply  # noqa: E402
from accelopt_ray.serving.llm_config import entry_options, llm_config_arguments  # noqa: E402
from accelopt_ray.serving.model import HostedModel  # noqa: E402
from accelopt_ray.serving.supervisor import HostState, HostStatus, Patience, Supervisor  # noqa: E402
from actors.cluster import Cluster  # noqa: E402
from actors.serve_application import ServeApplication, ServeGuard  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1500)]

QUICK = Patience(start_s=240.0, max_restarts=0, watch_s=1.0, silent_looks=3, pause_s=0.1, poll_s=0.2)


@pytest.fixture
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the builder alone: an application of the same form whose models echo, and load for a while or fail."""

    def build_openai_app(arguments: dict[str, Any]) -> Any:
        class Model:
            def __init__(self, name: str, load_s: float, error: str | None) -> None:
                time.sleep(load_s)
                if error is not None:
                    raise RuntimeError(error)
                self.name = name

            def chat(self, body: dict[str, Any]) -> dict[str, Any]:
                said = {"role": "assistant", "content": f"{self.name} heard {body['messages'][-1]['content']}"}
                return {
                    "id": "1",
                    "object": "chat.completion",
                    "created": 0,
                    "model": self.name,
                    "choices": [{"index": 0, "message": said, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
                }

        class Entry:
            def __init__(self, models: dict[str, Any]) -> None:
                self.models = models

            async def __call__(self, request: Any) -> Any:
                if request.method == "GET":
                    return {"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]}
                body = await request.json()
                return await self.models[body["model"]].chat.remote(body)

        def deployed(config: dict[str, Any]) -> Any:
            name, options, engine = (
                config["model_loading_config"]["model_id"],
                config["deployment_config"],
                config["engine_kwargs"],
            )
            scaling = {
                **options["autoscaling_config"],
                "metrics_interval_s": 0.2,
                "look_back_period_s": 0.5,
                "downscale_delay_s": engine.get("idle_s", 600),
            }
            deployment = serve.deployment(
                Model,
                name=f"LLMServer:{name}",
                autoscaling_config=scaling,
                ray_actor_options={"num_cpus": config["placement_group_config"]["bundles"][0]["CPU"]},
            )
            return deployment.bind(name, engine.get("load_s", 0.0), engine.get("error"))

        models = {config["model_loading_config"]["model_id"]: deployed(config) for config in arguments["llm_configs"]}
        return serve.deployment(Entry, **arguments["ingress_deployment_config"]).bind(models)

    stand_in = types.ModuleType("ray.serve.llm")
    stand_in.LLMConfig = lambda **arguments: arguments  # type: ignore[attr-defined]
    stand_in.build_openai_app = build_openai_app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.serve.llm", stand_in)
    yield
    serve.shutdown()


def model(name: str, **engine: object) -> HostedModel:
    return HostedModel(name, f"maker/{name}", gpus_per_replica=0, cpus_per_replica=0, engine=engine)


def supervised(
    applications: dict[str, list[HostedModel]], use: Callable[[dict[str, Supervisor]], Awaitable[None]]
) -> None:
    node = ray.get_runtime_context().get_node_id()

    async def run() -> None:
        found = {
            name: Supervisor(ServeApplication(models, name, "127.0.0.1", node), [each.name for each in models], QUICK)
            for name, models in applications.items()
        }
        for supervisor in found.values():
            supervisor.start()
        try:
            await use(found)
        finally:
            for supervisor in found.values():
                await supervisor.stop()

    asyncio.run(run())
    assert not set(applications) & set(serve.status().applications)


async def settled(supervisor: Supervisor) -> HostState:
    state = supervisor.state
    while state.status is HostStatus.STARTING:
        state = await supervisor.next_state(state, 1.0)
    return state


async def ask(base_url: str, name: str, prompt: str = "hello") -> ModelReply:
    client = ModelClient({"default": [ModelEndpoint(base_url, name, timeout_s=240.0, send_seed=False, max_tokens=8)]})
    try:
        return await client.complete(ModelCall("1", "planner", "You plan.", prompt, 1, 1))
    finally:
        await client.close()


def replicas(application: str, name: str) -> int:
    states = serve.status().applications[application].deployments[f"LLMServer:{name}"].replica_states
    return sum(number for state, number in states.items() if state == "RUNNING")


def test_applications_with_several_models_live_side_by_side(cluster: Cluster, standing_in: None):
    async def use(found: dict[str, Supervisor]) -> None:
        for supervisor in found.values():
            assert (await settled(supervisor)).status is HostStatus.READY
        for name, asked in (("one", "a"), ("one", "b"), ("two", "a")):
            answer = await ask(found[name].base_url, asked)
            assert answer.reply_text == f"{asked} heard hello"
            assert (answer.prompt_tokens, answer.completion_tokens) == (3, 4)
        await found["one"].stop()
        assert list(serve.status().applications) == ["two"]
        assert (await ask(found["two"].base_url, "a")).outcome is CallOutcome.OK

    supervised({"one": [model("a"), model("b")], "two": [model("a")]}, use)


def test_a_model_is_not_ready_before_it_is_loaded_although_the_entry_lists_it(cluster: Cluster, standing_in: None):
    async def use(found: dict[str, Supervisor]) -> None:
        assert (await settled(found["slow"])).status is HostStatus.READY
        assert replicas("slow", "late") == 1

    supervised({"slow": [model("late", load_s=12.0)]}, use)


def test_a_model_that_cannot_be_loaded_is_told_with_its_cause(cluster: Cluster, standing_in: None):
    async def use(found: dict[str, Supervisor]) -> None:
        state = await settled(found["broken"])
        assert state.status is HostStatus.FAILED
        assert state.message == "Ray Serve could not deploy bad: RuntimeError: CUDA out of memory"

    supervised({"broken": [model("good"), model("bad", error="CUDA out of memory")]}, use)


def test_what_is_still_loading_is_stopped_at_once(cluster: Cluster, standing_in: None):
    async def use(found: dict[str, Supervisor]) -> None:
        while "loading" not in serve.status().applications:  # noqa: ASYNC110 - Serve tells nobody
            await asyncio.sleep(0.2)

    supervised({"loading": [model("late", load_s=3600.0)]}, use)


def test_replicas_go_when_nobody_asks_and_come_back_for_a_request(cluster: Cluster, standing_in: None):
    async def use(found: dict[str, Supervisor]) -> None:
        await settled(found["idle"])
        assert (await ask(found["idle"].base_url, "a")).outcome is CallOutcome.OK
        deadline = time.monotonic() + 60.0
        while replicas("idle", "a"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.5)
        # The watch on the application asks its entry alone, and keeps no replica.
        assert found["idle"].state.status is HostStatus.READY
        assert (await ask(found["idle"].base_url, "a")).reply_text == "a heard hello"
        assert replicas("idle", "a") == 1

    supervised({"idle": [model("a", idle_s=2.0)]}, use)


def test_an_application_whose_host_is_gone_is_taken_down(cluster: Cluster, standing_in: None):
    class Host:
        def base_url(self) -> str:
            return ""

    async def use(found: dict[str, Supervisor]) -> None:
        assert (await settled(found["orphan"])).status is HostStatus.READY
        host = ray.remote(Host).options(num_cpus=0).remote()
        guard = ray.remote(ServeGuard).options(num_cpus=0).remote(host, "orphan")
        ray.get(host.base_url.remote())
        await asyncio.sleep(2.0)
        assert "orphan" in serve.status().applications
        ray.kill(host)
        deadline = time.monotonic() + 60.0
        while "orphan" in serve.status().applications:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.5)
        with pytest.raises(RayActorError):
            while time.monotonic() < deadline:
                ray.get(guard.__ray_ready__.remote())
                await asyncio.sleep(0.5)

    supervised({"orphan": [model("a")]}, use)


def test_gpus_of_a_replica_are_those_of_its_parallelism_and_the_entry_takes_none(cluster: Cluster):
    llm = pytest.importorskip("ray.serve.llm", reason="Ray's LLM serving is not installed", exc_type=ImportError)
    large = HostedModel(
        "coder", "maker/coder", tensor_parallel=4, gpus_per_replica=4, cpus_per_replica=2, max_replicas=2
    )
    configs = [llm.LLMConfig(**llm_config_arguments(large))]
    entry = llm.build_openai_app(
        {"llm_configs": configs, "ingress_deployment_config": entry_options("abc")}
    )._bound_deployment
    assert entry.ray_actor_options == {"num_cpus": 0, "label_selector": {"ray.io/node-id": "abc"}}
    [served] = entry.init_kwargs["llm_deployments"].values()
    bundles = served._bound_deployment._replica_config.placement_group_bundles
    assert [bundle["GPU"] for bundle in bundles] == [1, 1, 1, 1]
