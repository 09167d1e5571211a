"""The whole loop against a real vLLM engine on the CPU, with a small model of random weights.

``make test-slow`` makes the engine's environment and names its command in ``ACCELOPT_TEST_VLLM``. The model writes
nonsense, so no kernel comes of it: that every call and attempt is a typed row with its tokens and cost, and that the
run ends as usual, is what is tested.
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
from accelopt_ray.config import load_config  # noqa: E402
from accelopt_ray.outcome import CallOutcome  # noqa: E402
from accelopt_ray.search.services import ModelCall, ModelReply  # noqa: E402
from accelopt_ray.trajectory import read_table, trajectory_digest  # noqa: E402
from actors.cluster import Cluster  # noqa: E402
from actors.models import ModelHosts, bring_up  # noqa: E402
from actors.run import start_run  # noqa: E402

VLLM = os.environ.get("ACCELOPT_TEST_VLLM", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not VLLM, reason="ACCELOPT_TEST_VLLM names no vllm command: use make test-slow"),
]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The model as a configuration of a hosted model; its folder is made by the engine's own Python."""
    folder = tmp_path_factory.mktemp("tiny")
    python = Path(VLLM).with_name("python")
    subprocess.run([python, Path(__file__).with_name("tiny_model.py"), folder], check=True, capture_output=True)
    return {
        "source": str(folder),
        "executable": VLLM,
        "gpus_per_replica": 0,
        # The cluster's two CPUs belong to the evaluations.
        "cpus_per_replica": 0,
        "engine": {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 8},
        "environment": {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        "context_tokens": 32_768,
        "start_timeout_s": 900.0,
        "gpu_hour_usd": 2.0,
    }


def configured(folder: Path, tiny: dict[str, Any], **changes: Any) -> Any:
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
            # On CPUs this engine dies of a seed whose prompt it reads in several pieces.
            "models": {"default": {"hosted": "tiny", "max_tokens": 48, "timeout_s": 300, "send_seed": False}},
            "hosted": {"tiny": tiny},
            "hosting": "process",
            **changes,
        },
    )


def test_a_whole_run_hosts_the_model_and_accounts_for_every_call(
    tmp_path: Path, cluster: Cluster, tiny: dict[str, Any]
):
    config = configured(tmp_path / "run", tiny)
    run = start_run(config, "real", cluster)
    for _ in run.events():
        pass
    assert run.result()["silu"].status == "completed"
    calls = read_table(tmp_path / "run", "llm_calls").to_pylist()
    roles = [row["role"] for row in calls]
    assert (roles.count("planner"), roles.count("executor"), roles.count("fixer")) == (2, 4, 4)
    for row in calls:
        assert row["outcome"] in ("ok", "truncated")
        assert row["prompt_tokens"] > 100
        assert 0 < row["completion_tokens"] <= 2 * 48
        assert not row["usage_estimated"]
        assert row["price_known"]
        assert row["cost_usd"] > 0
    evaluations = read_table(tmp_path / "run", "evaluations").to_pylist()
    assert evaluations[0]["outcome"] == "correct"
    assert {row["outcome"] for row in evaluations[1:]} == {"no_code"}
    assert all(row["reason"] for row in evaluations[1:])
    again = config.model_copy(update={"output": tmp_path / "again", "replay": tmp_path / "run"})
    replayed = start_run(again, "again", cluster)
    for _ in replayed.events():
        pass
    replayed.result()
    assert trajectory_digest(tmp_path / "again", "again") == trajectory_digest(tmp_path / "run", "real")


@pytest.fixture
def hosts(tmp_path: Path, cluster: Cluster, tiny: dict[str, Any]) -> Iterator[ModelHosts]:
    loop = asyncio.new_event_loop()
    models = configured(tmp_path, tiny).hosted_models()
    found = loop.run_until_complete(bring_up(models, "process", tmp_path / "logs", print))
    yield found
    loop.run_until_complete(found.stop())
    loop.close()


def test_the_client_and_the_engine_understand_each_other(hosts: ModelHosts, tiny: dict[str, Any]):
    [url] = hosts.urls["tiny"]
    endpoint = ModelEndpoint(
        url, "tiny", max_tokens=24, samples_per_request=4, timeout_s=300.0, tokenizer=str(tiny["source"])
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
