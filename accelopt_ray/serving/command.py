"""A hosted model as a ``vllm serve`` command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelopt_ray.serving.model import HostedModel

_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def serve_command(model: HostedModel, port: int, host: str = "127.0.0.1") -> list[str]:
    """Returns the command that serves a model.

    Engine arguments become options: ``max_model_len: 4096`` is ``--max-model-len 4096``, a true value a flag, a false
    one its ``--no-`` form, a mapping JSON, a list several values; None is left out.
    """
    command = [
        model.executable,
        "serve",
        model.source,
        "--served-model-name",
        model.name,
        "--host",
        host,
        "--port",
        str(port),
    ]
    for name, value in model.engine_arguments.items():
        command += _option(name, value)
    return command


def serve_environment(model: HostedModel, inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of the command: the inherited one, no usage reports, and the model's own variables.

    A local folder needs nothing from the hub, so its engine is told not to ask there.
    """
    offline = {"HF_HUB_OFFLINE": "1"} if Path(model.source).is_dir() else {}
    return {**inherited, **_QUIET, **offline, **model.environment}


def _option(name: str, value: object) -> list[str]:
    option = "--" + name.replace("_", "-")
    if value is None:
        return []
    if value is True:
        return [option]
    if value is False:
        return ["--no-" + name.replace("_", "-")]
    if isinstance(value, Mapping):
        return [option, json.dumps(value, sort_keys=True)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [option, *map(str, value)]
    return [option, str(value)]
