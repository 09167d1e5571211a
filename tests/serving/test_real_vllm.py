"""The whole loop against a real vLLM engine on the CPU: a small model of random weights, and SmolLM2-135M-Instruct.

``make test-vllm`` makes the engine's environment and names its command in ``ACCELOPT_TEST_VLLM``. Neither model can
write kernels: that every call and attempt is a typed row with its tokens and cost, and that the run ends as usual, is
what is tested.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from accelopt_ray.agents.client import ModelClient  # noqa: E402
from accelopt_ray.agents.endpoints import ModelEndpoint  # noqa: E402
from accelopt_ray.config import RunConfig, load_config  # noqa: E402
from accelopt_ray.outcome import CallOutcome  # noqa: E402
from accelopt_ray.search.services import ModelCall, ModelReply  # noqa: E402
from accelopt_ray.trajectory import read_table, trajectory_digest  # noqa: E402
from actors.cluster import Cluster  # noqa: E402
from actors.models import bring_up  # noqa: E402
from actors.run import start_run  # noqa: E402

VLLM = os.environ.get("ACCELOPT_TEST_VLLM", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not VLLM, reason="ACCELOPT_TEST_VLLM names no vllm command: use make test-vllm"),
]

CONTEXTS = {"tiny": 32_768, "smollm2": 8_192}


@pytest.fixture(scope="session")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Both models as a run's configuration has them; their folders are made by the engine's own Python."""
    folder = tmp_path_factory.mktemp("models")
    python = Path(VLLM).with_name("python")
    subprocess.run([python, Path(__file__).with_name("real_models.py"), folder], check=True, capture_output=True)
    common = {
        "executable": VLLM,
        "gpus_per_replica": 0,
        # The cluster's two CPUs belong to the evaluations.
        "cpus_per_replica": 0,
        "engine": {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 8},
        "environment": {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        "start_timeout_s": 900.0,
        "gpu_hour_usd": 2.0,
    }
    return {name: {**common, "source": str(folder / name), "context_tokens": CONTEXTS[name]} for name in CONTEXTS}


def configured(folder: Path, **changes: Any) -> RunConfig:
    return load_config(
        None,
        {
            "task": "silu",
            "shape": {"M": 128, "N": 1024},
            "output": str(folder),
            "search": {
                "iterations": 1,
                "beam_width": 1,
                "plans_per_candidate": 2,
                "attempts_per_plan": 2,
                "fix_attempts": 1,
            },
            "hosting": "process",
            **changes,
        },
    )


# On CPUs this engine dies of a seed whose prompt it reads in several pieces.
ASKED: dict[str, Any] = {"max_tokens": 48, "timeout_s": 300, "send_seed": False}


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


def run_to_its_end(config: RunConfig, name: str, cluster: Cluster) -> None:
    run = start_run(config, name, cluster)
    for _ in run.events():
        pass
    assert run.result()["silu"].status == "completed"


def check_that_everything_is_accounted_for(folder: Path) -> None:
    calls = read_table(folder, "llm_calls").to_pylist()
    roles = [row["role"] for row in calls]
    assert (roles.count("planner"), roles.count("executor")) == (2, 4)
    evaluations = read_table(folder, "evaluations").to_pylist()
    assert evaluations[0]["outcome"] == "correct"
    assert len(evaluations) == 1 + 4 + 4
    assert "correct" not in {row["outcome"] for row in evaluations[1:]}
    assert all(row["reason"] for row in evaluations[1:])
    # Each attempt has failed and was sent to the fixer once.
    assert roles.count("fixer") == 4
    for row in calls:
        assert row["outcome"] in ("ok", "truncated")
        assert row["prompt_tokens"] > 100
        assert 0 < row["completion_tokens"] <= 2 * ASKED["max_tokens"]
        assert not row["usage_estimated"]
        assert row["price_known"]
        assert row["cost_usd"] > 0


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
