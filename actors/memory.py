"""The memory: a run's experience, kept by an actor of its own beside the driver."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from accelopt_ray.search.memory import ExperienceItem, LocalStore
from accelopt_ray.search.settings import MemoryRule
from accelopt_ray.search.usage import Uses


class Memory:
    """An asynchronous Ray actor around a :class:`~accelopt_ray.search.memory.LocalStore` for each task."""

    def __init__(self, rule: MemoryRule, capacity: int) -> None:
        """Starts empty; arguments as in :func:`~accelopt_ray.search.memory.update_memory`."""
        self._rule = rule
        self._capacity = capacity
        self._stores: dict[str, LocalStore] = {}

    async def update(
        self, task: str, new: Sequence[ExperienceItem], forgetting: random.Random, uses: Uses | None = None
    ) -> list[ExperienceItem]:
        """As :meth:`ExperienceStore.update`, for one of the run's tasks."""
        if task not in self._stores:
            self._stores[task] = LocalStore(self._rule, self._capacity)
        return await self._stores[task].update(new, forgetting, uses)


class RemoteStore:
    """One search's view of a :class:`Memory` actor."""

    def __init__(self, memory: Any, task: str) -> None:
        """Takes the actor's handle and the search's task."""
        self._memory = memory
        self._task = task

    async def update(
        self, new: Sequence[ExperienceItem], forgetting: random.Random, uses: Uses | None = None
    ) -> list[ExperienceItem]:
        """As :meth:`ExperienceStore.update`."""
        kept: list[ExperienceItem] = await self._memory.update.remote(self._task, list(new), forgetting, uses)
        return kept
