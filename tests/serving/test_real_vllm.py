"""The whole loop against a real vLLM engine on the CPU: a small model of random weights, and SmolLM2-135M-Instruct.

``make test-vllm`` makes the engine's environment and names its command in ``ACCELOPT_TEST_VLLM``. Neither model can
write kernels: that every call and attempt is a typed row with its tokens and cost, and that the run ends as usual, is
what is tested.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from real_runs import (  # noqa: E402
    ASKED,
    check_that_everything_is_accounted_for,
    configured,
    made_models,
    run_to_its_end,
)

from accelopt_ray.agents.client import ModelClient  # noqa: E402
from accelopt_ray.agents.endpoints import ModelEndpoint  # noqa: E402
from accelopt_ray.outcome import CallOutcome  # noqa: E402
from accelopt_ray.search.services import ModelCall, ModelReply  # noqa: E402
from accelopt_ray.trajectory import trajectory_digest  # noqa: E402
from actors.cluster import Cluster  # noqa: E402
from actors.models import bring_up  # noqa: E402

VLLM = os.environ.get("ACCELOPT_TEST_VLLM", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not VLLM, reason="ACCELOPT_TEST_VLLM names no vllm command: use make test-vllm"),
]


@pytest.fixture(scope="session")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return made_models(tmp_path_factory.mktemp("models"), Path(VLLM).with_name("python"), ("tiny", "smollm2"), VLLM)


@pytest.fixture(scope="module")
def tiny_url(
    tmp_path_factory: pytest.TempPathFactory, cluster: Cluster, hosted: dict[str, dict[str, Any]]
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tiny-host")
    config = configured(folder, hosted=hosted, models={"default": {"hosted": "tiny"}})
    loop = asyncio.new_event_loop()
    found = loop.run_until_complete(bring_up(config.hosted_models(), "process", folder, print))
    [url] = found.urls["tiny"]
    yield url
    loop.run_until_complete(found.stop())
    loop.close()


def test_a_whole_run_hosts_smollm2_with_compact_prompts_and_can_be_replayed(
    tmp_path: Path, cluster: Cluster, hosted: dict[str, dict[str, Any]]
):
    models = {"default": {"hosted": "smollm2", **ASKED}}
    config = configured(tmp_path / "run", hosted=hosted, models=models, prompts="compact")
    run_to_its_end(config, "real", cluster)
    check_that_everything_is_accounted_for(tmp_path / "run")
    again = config.model_copy(update={"output": tmp_path / "again", "replay": tmp_path / "run"})
    run_to_its_end(again, "again", cluster)
    assert trajectory_digest(tmp_path / "again", "again") == trajectory_digest(tmp_path / "run", "real")


def test_a_whole_run_at_an_endpoint_of_random_weights(tmp_path: Path, cluster: Cluster, tiny_url: str):
    models = {"default": {"base_url": tiny_url, "model": "tiny", "gpu_hour_usd": 2.0, **ASKED}}
    run_to_its_end(configured(tmp_path / "run", models=models), "endpoint", cluster)
    check_that_everything_is_accounted_for(tmp_path / "run")


def test_the_client_and_the_engine_understand_each_other(tiny_url: str, hosted: dict[str, dict[str, Any]]):
    endpoint = ModelEndpoint(
        tiny_url,
        "tiny",
        max_tokens=24,
        samples_per_request=4,
        timeout_s=300.0,
        tokenizer=str(hosted["tiny"]["source"]),
    )

    def call(number: int, prompt: str) -> ModelCall:
        return ModelCall(f"{number}", "planner", "You plan.", prompt, number, number)

    async def ask() -> tuple[list[ModelReply], ModelReply]:
        client = ModelClient({"default": [endpoint]})
        await client.probe()
        try:
            samples = await asyncio.gather(*(client.complete(call(number, "hello " * 100)) for number in range(4)))
            return list(samples), await client.complete(call(9, "hello " * 40_000))
        finally:
            await client.close()

    samples, too_long = asyncio.run(ask())
    assert len({sample.reply_text for sample in samples}) > 1
    assert {sample.retries for sample in samples} == {0}
    assert sum(sample.completion_tokens for sample in samples) <= 4 * 24
    assert too_long.outcome is CallOutcome.ERROR
    assert "context length" in too_long.error_text
    assert "\n" not in too_long.error_text
