"""Finding the pools of a cluster: whoever holds one is an actor of a known kind of name with ``pool_status()``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from actors.pool_state import PoolStatus

NAMESPACE = "accelopt-ray"
"""Of all actors that are looked for by name."""
_PREFIX = "pool:"
_TIMEOUT_S = 10.0


def findable(name: str) -> dict[str, Any]:
    """Options for an actor that holds a pool, so that :func:`find_pools` finds it."""
    return {"name": f"{_PREFIX}{name}", "namespace": NAMESPACE}


def find_pools() -> Mapping[str, PoolStatus]:
    """Asks every pool of the connected cluster what it is doing; one that does not answer is left out."""
    found: dict[str, PoolStatus] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] != NAMESPACE or not actor["name"].startswith(_PREFIX):
            continue
        try:
            holder = ray.get_actor(actor["name"], namespace=NAMESPACE)
            status = ray.get(holder.pool_status.remote(), timeout=_TIMEOUT_S)
        except (RayError, ValueError):  # it ended meanwhile
            continue
        if status is not None:
            found[actor["name"].removeprefix(_PREFIX)] = status
    return found
