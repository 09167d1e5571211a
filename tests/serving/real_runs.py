"""Small runs whose models are real but cannot write kernels, and what must be on record of each."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelopt_ray.config import RunConfig, load_config
from accelopt_ray.trajectory import read_table
from actors.cluster import Cluster
from actors.run import start_run

CONTEXTS = {"tiny": 32_768, "smollm2": 8_192}

# On CPUs this engine dies of a seed whose prompt it reads in several pieces.
ASKED: dict[str, Any] = {"max_tokens": 48, "timeout_s": 300, "send_seed": False}


def made_models(
    folder: Path, python: Path, names: Sequence[str], executable: str = "vllm"
) -> dict[str, dict[str, Any]]:
    """Returns models as a run's configuration has them; their folders are made by the engine's own Python."""
    script = Path(__file__).with_name("real_models.py")
    subprocess.run([python, script, folder, *names], check=True, capture_output=True)
    common = {
        "executable": executable,
        "gpus_per_replica": 0,
        # The cluster's two CPUs belong to the evaluations.
        "cpus_per_replica": 0,
        "engine": {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 8},
        "environment": {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        "start_timeout_s": 900.0,
        "gpu_hour_usd": 2.0,
    }
    return {name: {**common, "source": str(folder / name), "context_tokens": CONTEXTS[name]} for name in names}


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


def run_to_its_end(config: RunConfig, name: str, cluster: Cluster) -> None:
    run = start_run(config, name, cluster)
    events = list(run.events())
    result = run.result()["silu"]
    assert result.status == "completed", [str(event) for event in events]


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
