"""Open models that are known to serve this search, with what their makers recommend for them.

Sizes of the tensor parallelism suit GPUs with 80 GB. Sources: the models' cards and configuration files, and vLLM's
public recipes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from accelopt_ray.outcome import UserError


@dataclass(frozen=True)
class Sampling:
    """How a model is asked, unless the endpoint's configuration says otherwise.

    Attributes:
        temperature: Sampling temperature.
        top_p: Nucleus sampling.
        max_tokens: Longest completion, reasoning included.
        timeout_s: Longest wait for one reply, in seconds; long reasoning takes long.
        extra_body: Further request fields.
    """

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    timeout_s: float = 600.0
    extra_body: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelPreset:
    """One model.

    Attributes:
        source: Name at the hub.
        context_tokens: Longest prompt and completion together; at most what the model was trained for.
        tensor_parallel: GPUs that share one copy of the weights.
        sampling: How it is asked.
        engine: Further arguments of vLLM's engine, by their Python names.
    """

    source: str
    context_tokens: int
    tensor_parallel: int
    sampling: Sampling
    engine: Mapping[str, object] = field(default_factory=dict)


_GPT_OSS_SAMPLING = Sampling(
    temperature=1.0, top_p=1.0, max_tokens=32_768, timeout_s=1800.0, extra_body={"reasoning_effort": "medium"}
)
_QWEN_CODER_SAMPLING = Sampling(
    temperature=0.7, top_p=0.8, max_tokens=32_768, extra_body={"top_k": 20, "repetition_penalty": 1.05}
)

PRESETS: Mapping[str, ModelPreset] = MappingProxyType(
    {
        # Weights of about 61 GB in MXFP4: one GPU would hold them, two leave room for many sequences.
        "gpt-oss-120b": ModelPreset("openai/gpt-oss-120b", 131_072, 2, _GPT_OSS_SAMPLING),
        "gpt-oss-20b": ModelPreset("openai/gpt-oss-20b", 131_072, 1, _GPT_OSS_SAMPLING),
        # Blocks of the FP8 quantisation cannot be cut into eight; experts can be dealt out instead.
        "Qwen3-Coder-480B-A35B-FP8": ModelPreset(
            "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
            131_072,
            8,
            _QWEN_CODER_SAMPLING,
            {"enable_expert_parallel": True},
        ),
        "Qwen3-Coder-30B-A3B": ModelPreset("Qwen/Qwen3-Coder-30B-A3B-Instruct", 131_072, 2, _QWEN_CODER_SAMPLING),
        "Qwen3-235B-A22B-Thinking": ModelPreset(
            "Qwen/Qwen3-235B-A22B-Thinking-2507",
            131_072,
            8,
            Sampling(
                temperature=0.6,
                top_p=0.95,
                max_tokens=65_536,
                timeout_s=3600.0,
                extra_body={"top_k": 20, "min_p": 0.0},
            ),
            {"reasoning_parser": "qwen3"},
        ),
    }
)
"""Presets by the names under which a configuration calls for them."""


def model_preset(name: str) -> ModelPreset:
    """Looks a preset up; capitals do not matter.

    Raises:
        UserError: There is none of that name.
    """
    by_lower = {known.lower(): preset for known, preset in PRESETS.items()}
    preset = by_lower.get(name.lower())
    if preset is None:
        raise UserError(f"there is no model preset {name!r}: choose one of {', '.join(PRESETS)}, or give a source")
    return preset
