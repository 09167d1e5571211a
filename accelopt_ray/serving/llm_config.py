"""A hosted model as the arguments of ``ray.serve.llm.LLMConfig``."""

from __future__ import annotations

from typing import Any

from accelopt_ray.serving.command import serve_environment
from accelopt_ray.serving.model import HostedModel

PREFIX_ROUTER = "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
"""Sends requests with a common prefix to the replica that has it in its cache."""

_LEAST_CPUS = 0.001
"""Ray knows no empty bundle."""

_ONGOING_PER_REPLICA = 32
"""Requests for which one replica is kept; with more, Serve adds one, with fewer it takes one away."""


def llm_config_arguments(model: HostedModel) -> dict[str, Any]:
    """Returns the keyword arguments of ``LLMConfig`` for a model.

    Replicas scale between the model's bounds with the requests that are under way. Placement is named only for models
    on CPUs; for others Ray derives it from the parallelism.
    """
    deployment: dict[str, Any] = {
        "autoscaling_config": {
            "min_replicas": model.min_replicas,
            # Started at once, so that readiness can be waited for; scaled to zero only after work.
            "initial_replicas": max(1, model.min_replicas),
            "max_replicas": model.max_replicas,
            "target_ongoing_requests": _ONGOING_PER_REPLICA,
        },
        "max_ongoing_requests": 4 * _ONGOING_PER_REPLICA,
        # Comes on top of what the engine takes: its GPUs, or its CPUs.
        "ray_actor_options": {"num_cpus": model.cpus_per_replica if model.gpus_per_replica else 0},
    }
    if model.max_replicas > 1:
        deployment["request_router_config"] = {"request_router_class": PREFIX_ROUTER}
    arguments: dict[str, Any] = {
        "model_loading_config": {"model_id": model.name, "model_source": model.source},
        "deployment_config": deployment,
        "engine_kwargs": model.engine_arguments,
        "accelerator_type": model.accelerator_type,
        "runtime_env": {"env_vars": serve_environment(model, {})},
        "log_engine_metrics": False,
    }
    if model.gpus_per_replica == 0:
        bundle = {"CPU": max(model.cpus_per_replica, _LEAST_CPUS)}
        arguments["placement_group_config"] = {"bundles": [bundle] * model.tensor_parallel}
    return arguments


def entry_options(node: str) -> dict[str, Any]:
    """Returns the deployment options of the entry, which takes all requests: one on a node, at no cost of CPUs.

    Args:
        node: Ray's id of the node.
    """
    return {
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 1},
        "ray_actor_options": {"num_cpus": 0, "label_selector": {"ray.io/node-id": node}},
    }
