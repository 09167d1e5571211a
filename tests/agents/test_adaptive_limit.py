"""The bound on calls in flight: halved by an overload, raised by successes, served in turn."""

from __future__ import annotations

import asyncio

import pytest

from accelopt_ray.agents.limiter import AdaptiveLimit


def test_an_overload_halves_the_limit_once_for_all_who_met_it() -> None:
    async def run() -> list[int]:
        limit, seen = AdaptiveLimit(16), []
        async with limit.slot() as first, limit.slot() as second:
            limit.overloaded(first)
            seen.append(limit.limit)
            limit.overloaded(second)
            seen.append(limit.limit)
        async with limit.slot() as third:
            limit.overloaded(third)
            seen.append(limit.limit)
        return seen

    assert asyncio.run(run()) == [8, 8, 4]


def test_it_never_falls_below_one_nor_rises_above_the_maximum() -> None:
    async def run() -> None:
        limit = AdaptiveLimit(4)
        for _ in range(10):
            async with limit.slot() as ticket:
                limit.overloaded(ticket)
        assert limit.limit == 1
        for _ in range(3):
            limit.succeeded()
        assert limit.limit == 2
        for _ in range(100):
            limit.succeeded()
        assert limit.limit == 4

    asyncio.run(run())


def test_waiting_calls_are_served_in_turn_and_cancelled_ones_skipped() -> None:
    async def run() -> list[int]:
        limit, served = AdaptiveLimit(1), []

        async def work(number: int) -> None:
            async with limit.slot():
                served.append(number)
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(work(number)) for number in range(6)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert limit.in_flight == 0
        return served

    assert asyncio.run(run()) == [0, 1, 2, 4, 5]


def test_a_limit_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="allow none"):
        AdaptiveLimit(0)
