"""Models for the stand-in of the ``vllm`` command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil

from accelopt_ray.serving.model import HostedModel

FAKE = Path(__file__).with_name("fake_vllm.py")


def fake_model(folder: Path, *behaviours: dict[str, Any], **changes: Any) -> HostedModel:
    """A model folder with one behaviour for each start, and a command that plays it."""
    source = folder / "model"
    source.mkdir()
    (source / "behaviour.json").write_text(json.dumps(behaviours or [{}]))
    command = folder / "vllm"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{FAKE}" "$@"\n')
    command.chmod(0o755)
    settings: dict[str, Any] = {"gpus_per_replica": 0, "cpus_per_replica": 0, "start_timeout_s": 120.0, **changes}
    return HostedModel("fake", str(source), executable=str(command), **settings)


def starts(folder: Path) -> list[int]:
    """Process ids of all starts so far."""
    path = folder / "model" / "starts"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def alive(process_id: int) -> bool:
    """Whether a process has not ended; a zombie that nobody has waited for yet has."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
