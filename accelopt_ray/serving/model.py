"""A model that a run brings up for itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HostedModel:
    """Everything needed to start a model and to know what it takes.

    Attributes:
        name: The name under which it is asked.
        source: Name at the hub, or a local folder, which needs no network.
        context_tokens: Longest prompt and completion together; None leaves it to the model's own configuration.
        tensor_parallel: GPUs, or processes on CPUs, that share one copy of the weights.
        gpus_per_replica: GPUs that one replica takes from the cluster; 0 serves on CPUs.
        cpus_per_replica: CPUs that one replica takes.
        min_replicas: Replicas kept when nobody asks; 0 gives all GPUs back.
        max_replicas: Most replicas.
        accelerator_type: Ray's name of the GPU wanted, such as ``H100``; None takes any.
        engine: Further arguments of vLLM's engine, by their Python names.
        environment: Environment variables of the engine.
        start_timeout_s: Longest wait until it is ready, in seconds; large models load for many minutes.
        max_restarts: How often a replica that has failed is started again.
        executable: The ``vllm`` command, for models hosted as child processes.
    """

    name: str
    source: str
    context_tokens: int | None = None
    tensor_parallel: int = 1
    gpus_per_replica: int = 1
    cpus_per_replica: int = 1
    min_replicas: int = 0
    max_replicas: int = 1
    accelerator_type: str | None = None
    engine: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 3600.0
    max_restarts: int = 3
    executable: str = "vllm"

    @property
    def gpus(self) -> int:
        """GPUs of all replicas at most."""
        return self.gpus_per_replica * self.max_replicas

    @property
    def engine_arguments(self) -> dict[str, object]:
        """All arguments of the engine by their Python names; those given win over those derived."""
        arguments: dict[str, object] = {"tensor_parallel_size": self.tensor_parallel, "enable_prefix_caching": True}
        if self.context_tokens is not None:
            arguments["max_model_len"] = self.context_tokens
        return {**arguments, **self.engine}
