"""The memory: a run's experience, kept by an actor of its own beside the driver."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from accelopt_ray.search.memory import ExperienceItem, LocalStore
from accelopt_ray.search.settings import MemoryRule


class Memory:
    """An asynchronous Ray actor around a :class:`~accelopt_ray.search.memory.LocalStore`."""

    def __init__(self, rule: MemoryRule, capacity: int) -> None:
        """Starts empty; arguments as in :func:`~accelopt_ray.search.memory.update_memory`."""
        self._store = LocalStore(rule, capacity)

    async def update(self, new: Sequence[ExperienceItem], forgetting: random.Random) -> list[ExperienceItem]:
        """As :meth:`ExperienceStore.update`."""
        return await self._store.update(new, forgetting)


class RemoteStore:
    """The search's view of a :class:`Memory` actor."""

    def __init__(self, memory: Any) -> None:
        """Takes the actor's handle."""
        self._memory = memory

    async def update(self, new: Sequence[ExperienceItem], forgetting: random.Random) -> list[ExperienceItem]:
        """As :meth:`ExperienceStore.update`."""
        kept: list[ExperienceItem] = await self._memory.update.remote(list(new), forgetting)
        return kept
