"""What a hosted model becomes: a command line, arguments for Ray Serve."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from accelopt_ray.serving.command import serve_command, serve_environment
from accelopt_ray.serving.llm_config import llm_config_arguments
from accelopt_ray.serving.model import HostedModel
from accelopt_ray.serving.presets import PRESETS, model_preset

MODEL = HostedModel(
    "coder", "maker/coder", context_tokens=65_536, tensor_parallel=4, gpus_per_replica=4, max_replicas=2
)


def options(command: list[str]) -> str:
    return " ".join(command)


def test_a_model_as_a_command():
    command = serve_command(MODEL, 8123)
    assert command[:3] == ["vllm", "serve", "maker/coder"]
    said = options(command)
    for option in (
        "--served-model-name coder",
        "--host 127.0.0.1 --port 8123",
        "--tensor-parallel-size 4",
        "--max-model-len 65536",
        "--enable-prefix-caching",
    ):
        assert option in said


def test_every_kind_of_engine_argument_becomes_an_option():
    engine = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "rope_scaling": {"factor": 2.0},
        "allowed_origins": ["a", "b"],
        "dtype": "float32",
        "quantization": None,
    }
    said = options(serve_command(HostedModel("m", "s", engine=engine), 1))
    assert "--enforce-eager --" in said
    assert "--no-enable-prefix-caching" in said
    assert '--rope-scaling {"factor": 2.0}' in said
    assert "--allowed-origins a b" in said
    assert "--dtype float32" in said
    assert "quantization" not in said


def test_a_local_folder_needs_no_network(tmp_path: Path):
    local = HostedModel("m", str(tmp_path), environment={"OMP_NUM_THREADS": "1"})
    assert serve_environment(local, {"PATH": "/bin"}) | {} == {
        "PATH": "/bin",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert "HF_HUB_OFFLINE" not in serve_environment(MODEL, {})


def test_a_model_as_arguments_of_ray_serve():
    arguments = llm_config_arguments(MODEL)
    assert arguments["model_loading_config"] == {"model_id": "coder", "model_source": "maker/coder"}
    scaling = arguments["deployment_config"]["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (0, 2)
    assert arguments["engine_kwargs"]["tensor_parallel_size"] == 4
    assert "placement_group_config" not in arguments
    on_cpus = llm_config_arguments(HostedModel("m", "s", gpus_per_replica=0, cpus_per_replica=2))
    assert on_cpus["placement_group_config"] == {"bundles": [{"CPU": 2}]}
    # What Serve adds for its own part of a replica comes on top.
    assert on_cpus["deployment_config"]["ray_actor_options"] == {"num_cpus": 0}


@pytest.mark.parametrize("name", PRESETS)
def test_rays_own_class_accepts_the_arguments(name: str):
    llm = pytest.importorskip("ray.serve.llm", reason="Ray's LLM serving is not installed", exc_type=ImportError)
    preset = model_preset(name)
    model = HostedModel(
        name,
        preset.source,
        preset.context_tokens,
        preset.tensor_parallel,
        preset.tensor_parallel,
        max_replicas=2,
        engine=preset.engine,
    )
    config = llm.LLMConfig(**llm_config_arguments(model))
    assert config.model_id == name
    router = config.deployment_config.get("request_router_config", {})
    module, _, attribute = router["request_router_class"].rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


def test_presets_fit_a_node_of_eight_gpus_and_their_context():
    for preset in PRESETS.values():
        assert preset.tensor_parallel in (1, 2, 4, 8)
        assert preset.sampling.max_tokens is not None
        assert preset.sampling.max_tokens < preset.context_tokens
