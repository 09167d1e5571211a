"""Fair sharing: whoever holds least is served first, and nothing is lost on the way."""

from __future__ import annotations

import asyncio

from accelopt_ray.sharing import FairQueue


def served_in_order(requests: list[str], items: int) -> list[str]:
    """Who is served, one item at a time, each given back before the next is."""

    async def run() -> list[str]:
        queue: FairQueue[int] = FairQueue()
        order: list[str] = []

        async def work(owner: str) -> None:
            item = await queue.get(owner)
            order.append(owner)
            await asyncio.sleep(0)
            queue.put_nowait(item)

        jobs = [asyncio.ensure_future(work(owner)) for owner in requests]
        await asyncio.sleep(0)
        for item in range(items):
            queue.put_nowait(item)
        await asyncio.gather(*jobs)
        return order

    return asyncio.run(run())


def test_a_late_owner_does_not_wait_for_all_of_an_early_ones():
    assert served_in_order(["a"] * 6 + ["b"] * 2, 1)[:4] == ["a", "b", "a", "b"]
    assert served_in_order(["a"] * 6 + ["b"] * 2 + ["c"], 2)[:4] == ["a", "b", "c", "a"]


def test_one_owner_is_served_in_its_order_and_may_hold_everything():
    async def run() -> list[int]:
        queue: FairQueue[int] = FairQueue()
        for item in range(3):
            queue.put_nowait(item)
        return [await queue.get("a") for _ in range(3)]

    assert asyncio.run(run()) == [0, 1, 2]


def test_an_owner_that_holds_two_gives_way_to_one_that_holds_none():
    async def run() -> str:
        queue: FairQueue[int] = FairQueue()
        for item in range(2):
            queue.put_nowait(item)
        first = await queue.get("a")
        await queue.get("a")
        waiting = {owner: asyncio.ensure_future(queue.get(owner)) for owner in ("a", "b")}
        await asyncio.sleep(0)
        queue.put_nowait(first)
        await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
        [served] = [owner for owner, future in waiting.items() if future.done()]
        for future in waiting.values():
            future.cancel()
        return served

    assert asyncio.run(run()) == "b"


def test_an_item_given_to_a_cancelled_request_goes_to_the_next():
    async def run() -> int:
        queue: FairQueue[int] = FairQueue()
        cancelled = asyncio.ensure_future(queue.get("a"))
        after = asyncio.ensure_future(queue.get("b"))
        await asyncio.sleep(0)
        queue.put_nowait(7)
        cancelled.cancel()
        return await after

    assert asyncio.run(run()) == 7


def test_a_forgotten_item_is_no_longer_held():
    async def run() -> str:
        queue: FairQueue[int] = FairQueue()
        queue.put_nowait(0)
        queue.put_nowait(1)
        broken = await queue.get("a")
        await queue.get("b")
        queue.forget(broken)
        waiting = {owner: asyncio.ensure_future(queue.get(owner)) for owner in ("b", "a")}
        await asyncio.sleep(0)
        queue.put_nowait(2)
        await asyncio.sleep(0)
        [served] = [owner for owner, future in waiting.items() if future.done()]
        for future in waiting.values():
            future.cancel()
        return served

    assert asyncio.run(run()) == "a"
