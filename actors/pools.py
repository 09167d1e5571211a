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


def answers_of(method: str, timeout_s: float = _TIMEOUT_S) -> list[tuple[str, Any, Any]]:
    """Asks the named actors of the connected cluster that have a method; one that does not answer is left out.

    Returns:
        Each one's name, its handle, and what it says.
    """
    found: list[tuple[str, Any, Any]] = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] != NAMESPACE:
            continue
        try:
            holder = ray.get_actor(actor["name"], namespace=NAMESPACE)
            if hasattr(holder, method):
                answer = ray.get(getattr(holder, method).remote(), timeout=timeout_s)
                found.append((actor["name"], holder, answer))
        except (RayError, ValueError):  # it ended meanwhile
            continue
    return found


def find_pools() -> Mapping[str, PoolStatus]:
    """Asks every pool of the connected cluster what it is doing."""
    answers = answers_of("pool_status")
    return {name.removeprefix(_PREFIX): status for name, _, status in answers if status is not None}
