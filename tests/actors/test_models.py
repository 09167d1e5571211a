"""Models that a run brings up: real actors and processes, a stand-in for the engine."""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "serving"))

from fake_models import alive, fake_model, starts  # noqa: E402

from accelopt_ray.config import RunConfig, load_config  # noqa: E402
from accelopt_ray.outcome import UserError  # noqa: E402
from accelopt_ray.serving.model import HostedModel  # noqa: E402
from accelopt_ray.trajectory import read_table  # noqa: E402
from actors.cluster import Cluster  # noqa: E402
from actors.models import ModelHosts, bring_up  # noqa: E402
from actors.run import start_run  # noqa: E402
from actors.serve_application import ServeApplication  # noqa: E402


@pytest.mark.ray
def test_models_come_up_answer_and_leave_no_process(tmp_path: Path, cluster: Cluster):
    model = fake_model(tmp_path, {"start_s": 0.3}, max_replicas=2)
    told: list[str] = []

    async def run() -> None:
        hosts = await bring_up([model], "process", tmp_path / "logs", told.append)
        assert len(set(hosts.urls["fake"])) == 2
        assert len(starts(tmp_path)) == 2
        await hosts.stop()

    asyncio.run(run())
    assert any("fake answers at http://127.0.0.1:" in message for message in told)
    assert not any(alive(process_id) for process_id in starts(tmp_path))


@pytest.mark.ray
def test_a_model_that_does_not_come_up_is_told_in_one_sentence(tmp_path: Path, cluster: Cluster):
    model = fake_model(tmp_path, {"exit_at_start": 3}, max_restarts=0)

    async def run() -> None:
        await bring_up([model], "process", tmp_path / "logs", lambda _: None)

    with pytest.raises(UserError, match="the model fake did not come up: .* exit code 3: CUDA out of memory"):
        asyncio.run(run())


@pytest.mark.ray
def test_a_model_for_which_there_is_no_place_is_not_waited_for_for_ever(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("actors.models._STATE_WAIT_S", 0.2)
    model = fake_model(tmp_path, gpus_per_replica=8, start_timeout_s=0.5)
    told: list[str] = []

    async def run() -> None:
        await bring_up([model], "process", tmp_path / "logs", told.append)

    with pytest.raises(UserError, match="finds no place in the cluster: it needs 8 GPUs and 0 CPUs on one node"):
        asyncio.run(run())
    assert told
    assert starts(tmp_path) == []


def lose(hosts: ModelHosts) -> dict[str, str]:
    """Kills the host of a model's first replica, as the death of its node would; returns who moved where."""

    async def run() -> dict[str, str]:
        moves: dict[str, str] = {}
        ended = asyncio.Event()

        async def moved(base_url: str, to: str) -> None:
            moves[base_url] = to
            ended.set()

        keeping = asyncio.ensure_future(hosts.keep(moved))
        ray.kill(hosts._places[0].actor)
        await asyncio.wait([keeping, asyncio.ensure_future(ended.wait())], return_when=asyncio.FIRST_COMPLETED)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await hosts.stop()
        return moves

    return asyncio.run(run())


@pytest.mark.ray
def test_a_model_whose_host_is_lost_comes_up_again_elsewhere(tmp_path: Path, cluster: Cluster):
    model, told = fake_model(tmp_path, max_replicas=2), list[str]()
    hosts = asyncio.run(bring_up([model], "process", tmp_path / "logs", told.append))
    before = list(hosts.urls["fake"])
    moves = lose(hosts)
    assert list(moves) == [before[0]]
    assert moves[before[0]] not in before
    assert list(hosts.urls["fake"]) == [moves[before[0]], before[1]]
    assert "the host of fake was lost and is started again" in told
    assert len(starts(tmp_path)) == 3
    # The server of the lost host ends by itself, as soon as it hears of the loss; nobody has waited for it.
    deadline = time.monotonic() + 20.0
    while any(map(alive, starts(tmp_path))):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.ray
def test_a_lost_host_that_does_not_come_up_again_is_given_up(tmp_path: Path, cluster: Cluster):
    model, told = fake_model(tmp_path, {}, {"exit_at_start": 3}, max_restarts=0), list[str]()
    hosts = asyncio.run(bring_up([model], "process", tmp_path / "logs", told.append))
    assert lose(hosts) == {}
    assert "fake is given up: " in told[-1]
    assert "exit code 3" in told[-1]


@pytest.mark.ray
def test_a_run_hosts_its_own_model_survives_its_crash_and_accounts_for_it(tmp_path: Path, cluster: Cluster):
    fake = fake_model(tmp_path, {"exit_after": 3}, {})
    hosted = {
        "source": fake.source,
        "executable": fake.executable,
        "gpus_per_replica": 0,
        "cpus_per_replica": 0,
        "gpu_hour_usd": 3600.0,
    }
    config: RunConfig = load_config(
        None,
        {
            "task": "silu",
            "shape": {"M": 128, "N": 1024},
            "output": str(tmp_path / "run"),
            "search": {"iterations": 1, "beam_width": 1, "plans_per_candidate": 3, "attempts_per_plan": 2},
            "models": {"default": {"hosted": "fake", "samples_per_request": 1, "max_retries": 8}},
            "hosted": {"fake": hosted},
            "hosting": "process",
        },
    )
    run = start_run(config, "run-h", cluster)
    events = [event for events in run.events() for event in events]
    assert run.result()["silu"].status == "completed"
    calls = read_table(tmp_path / "run", "llm_calls").to_pylist()
    assert len(calls) == 9
    # The server died in the middle and came back; no call was lost, and each has its share of the GPU's time.
    assert {row["outcome"] for row in calls} == {"ok"}
    assert len(starts(tmp_path)) == 2
    assert any(row["retries"] > 0 for row in calls)
    assert all(row["price_known"] and row["cost_usd"] > 0 for row in calls)
    messages = [event.values["message"] for event in events if event.name == "hosting"]
    assert any("answers at" in message for message in messages)
    assert any("idle" in message and "after its last call" in message for message in messages)
    # A dollar a second, in pauses too: what lies between the first and the last request is in the calls' costs.
    asked = [row["started_at"] for row in calls if row["role"] == "executor"]
    assert sum(row["cost_usd"] for row in calls) >= (max(asked) - min(asked)).total_seconds()
    evaluations = read_table(tmp_path / "run", "evaluations").to_pylist()
    assert {row["outcome"] for row in evaluations} == {"correct", "no_code"}
    assert not any(alive(process_id) for process_id in starts(tmp_path))


@pytest.mark.ray
def test_without_rays_serving_a_run_ends_in_one_sentence_and_leaves_no_actor(tmp_path: Path, cluster: Cluster):
    try:
        importlib.import_module("ray.serve.llm")
    except ImportError:
        pass  # as wanted
    else:
        pytest.skip("Ray's LLM serving is installed")

    with pytest.raises(UserError, match=r"the model a did not come up: .* install ray\[llm\] on the nodes"):
        asyncio.run(bring_up([HostedModel("a", "maker/a")], "serve", tmp_path, lambda _: None))
    deadline = time.monotonic() + 60.0
    while any(actor["name"].endswith("-guard") for actor in ray.util.list_named_actors(all_namespaces=True)):
        assert time.monotonic() < deadline
        time.sleep(0.5)


class FakeServe(types.ModuleType):
    """Stands in for ``ray.serve`` and ``ray.serve.llm``, which our environment lacks: keeps what it was given."""

    def __init__(self, failure: Exception | None = None) -> None:
        super().__init__("ray.serve")
        self.calls: list[tuple[str, Any]] = []
        self.failure = failure
        self.applications: dict[str, Any] = {}
        self.llm = types.ModuleType("ray.serve.llm")
        self.llm.LLMConfig = lambda **arguments: arguments  # type: ignore[attr-defined]
        self.llm.build_openai_app = lambda arguments: arguments  # type: ignore[attr-defined]

    def start(self, **options: Any) -> None:
        self.calls.append(("start", options))

    def RunTarget(self, target: Any, name: str, route_prefix: str) -> tuple[Any, str, str]:
        return target, name, route_prefix

    def run_many(self, targets: list[tuple[Any, str, str]], **options: Any) -> None:
        self.calls.append(("run", (*targets[0], options)))
        if self.failure is not None:
            raise self.failure
        self.applications[targets[0][1]] = targets[0]

    def status(self) -> Any:
        return types.SimpleNamespace(applications=self.applications)

    def delete(self, name: str) -> None:
        self.calls.append(("delete", name))
        del self.applications[name]


def on_fake_serve(monkeypatch: pytest.MonkeyPatch, fake: FakeServe) -> str | None:
    monkeypatch.setitem(sys.modules, "ray.serve", fake)
    monkeypatch.setitem(sys.modules, "ray.serve.llm", fake.llm)
    monkeypatch.setattr(ray, "serve", fake, raising=False)

    async def run() -> str | None:
        models = [HostedModel("a", "maker/a", max_replicas=3), HostedModel("b", "maker/b")]
        application = ServeApplication(models, "accelopt-1", "10.0.0.1", "abc")
        assert application.base_url == "http://10.0.0.1:8000/accelopt-1/v1"
        await application.start()
        assert application._deploying is not None
        await asyncio.wait([application._deploying])
        failure = application.failure()
        await application.stop()
        return failure

    return asyncio.run(run())


def test_all_models_are_one_application_of_ray_serve(monkeypatch: pytest.MonkeyPatch):
    fake = FakeServe()
    assert on_fake_serve(monkeypatch, fake) is None
    assert [name for name, _ in fake.calls] == ["start", "run", "delete"]
    assert fake.calls[0][1] == {"http_options": {"host": "10.0.0.1", "port": 8000}}
    application, name, route_prefix, options = fake.calls[1][1]
    assert [each["model_loading_config"]["model_id"] for each in application["llm_configs"]] == ["a", "b"]
    assert application["ingress_deployment_config"]["ray_actor_options"]["label_selector"] == {"ray.io/node-id": "abc"}
    assert (name, route_prefix, fake.calls[2][1]) == ("accelopt-1", "/accelopt-1", "accelopt-1")
    # Waiting inside could not be given up.
    assert options == {"wait_for_applications_running": False}


def test_what_serve_cannot_deploy_is_told(monkeypatch: pytest.MonkeyPatch):
    failure = on_fake_serve(monkeypatch, FakeServe(RuntimeError("trace\nno GPU of this type\n")))
    assert failure == "Ray Serve could not deploy a, b: no GPU of this type"


def test_without_rays_llm_serving_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray.serve.llm", None)
    with pytest.raises(UserError, match=r"install ray\[llm\] on the nodes, or choose hosting: process"):
        asyncio.run(ServeApplication([HostedModel("a", "maker/a")], "x", "127.0.0.1", "abc").start())
