"""The memory actor forgets exactly as the search's own store does."""

from __future__ import annotations

import asyncio
import random

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from accelopt_ray.search.memory import ExperienceItem, ExperienceKind, LocalStore, RewritePair  # noqa: E402
from accelopt_ray.search.settings import MemoryRule  # noqa: E402
from actors.memory import Memory, RemoteStore  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def items(iteration: int) -> list[ExperienceItem]:
    pair = RewritePair(ExperienceKind.POSITIVE, "s", "slow", "f", "fast", 1.5, "plan")
    return [ExperienceItem(f"i{iteration}.{n}", iteration, pair, "title", "text", "call") for n in range(3)]


@pytest.mark.parametrize("rule", list(MemoryRule))
def test_an_actor_keeps_what_the_local_store_keeps(rule: MemoryRule):
    async def kept(store: LocalStore | RemoteStore) -> list[list[str]]:
        rounds = [await store.update(items(i), random.Random(i)) for i in range(4)]
        return [[item.item_id for item in each] for each in rounds]

    actor = ray.remote(Memory).options(num_cpus=0).remote(rule, 5)
    assert asyncio.run(kept(RemoteStore(actor, "silu"))) == asyncio.run(kept(LocalStore(rule, 5)))


def test_tasks_do_not_see_each_others_items():
    async def kept() -> list[ExperienceItem]:
        await RemoteStore(actor, "silu").update(items(0), random.Random(0))
        return await RemoteStore(actor, "mamba").update(items(1), random.Random(0))

    actor = ray.remote(Memory).options(num_cpus=0).remote(MemoryRule.PAPER, 9)
    assert {item.iteration for item in asyncio.run(kept())} == {1}
