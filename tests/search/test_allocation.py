"""A shared budget goes where it has paid, in rounds that do not depend on who arrives first."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from scripted_world import ScriptedTask, World

from accelopt_ray.search.allocation import AdaptiveTurns, Allowance, DollarPurse, EvaluationPurse, Purse, Standing
from accelopt_ray.search.loop import run_search
from accelopt_ray.search.presets import preset_settings
from accelopt_ray.search.result import SearchResult, SearchStatus

GAINS = {"steady": 0.9, "stalled": 1.0, "quick": 0.7}


def rounds(budget: int, gains: dict[str, float], order: int = 0, prices: dict[str, float] | None = None) -> list[str]:
    """Which task runs each iteration, when each iteration multiplies the latency by a constant.

    An iteration makes ten evaluations; with ``prices`` it costs so many US dollars, of which the budget is.
    """

    async def run() -> list[str]:
        purse: Purse = EvaluationPurse(budget) if prices is None else DollarPurse(budget)
        turns = AdaptiveTurns(list(gains), purse)
        ran: list[str] = []
        delays = random.Random(order)

        async def search(task: str) -> None:
            latency_ms, evaluations, cost_usd = 100.0, 1, 0.0
            while True:
                for _ in range(delays.randrange(5)):
                    await asyncio.sleep(0)
                standing = Standing(latency_ms, 1.0, evaluations, cost_usd)
                if await turns.next(task, standing) is not None:
                    break
                ran.append(task)
                latency_ms *= gains[task]
                evaluations += 10
                cost_usd += 0.0 if prices is None else prices[task]
            turns.ended(task, standing)

        await asyncio.gather(*(search(task) for task in gains))
        return ran

    return asyncio.run(run())


def test_every_task_has_a_first_iteration_and_the_budget_ends_it():
    ran = rounds(200, GAINS)
    assert set(ran[:3]) == set(GAINS)
    assert 200 <= 3 + 10 * len(ran) < 200 + 2 * 10


def test_what_gains_more_gets_more_and_what_stalls_gives_way():
    counts = Counter(rounds(400, GAINS))
    assert counts["quick"] > counts["stalled"]
    assert counts["steady"] > counts["stalled"]
    assert counts["stalled"] >= 1


def test_of_equal_gains_the_cheaper_one_gets_more():
    gains, prices = {"dear": 0.9, "cheap": 0.9, "middling": 0.9}, {"dear": 3.0, "cheap": 0.5, "middling": 1.0}
    ran = Counter(rounds(40, gains, prices=prices))
    assert ran["cheap"] >= ran["middling"] > 2 * ran["dear"] >= 2
    assert 40 <= sum(ran[task] * prices[task] for task in gains) < 40 + 3.0 + 1.0


@pytest.mark.parametrize("order", range(5))
def test_the_order_of_arrival_does_not_matter(order: int):
    assert Counter(rounds(300, GAINS, order)) == Counter(rounds(300, GAINS))


def test_searches_share_a_budget_and_never_exceed_it():
    async def run(worlds: dict[str, World]) -> dict[str, SearchResult]:
        turns = AdaptiveTurns(list(worlds), EvaluationPurse(60))
        settings = preset_settings("beyond", iterations=50, beam_width=2, plans_per_candidate=2, attempts_per_plan=1)
        results = await asyncio.gather(
            *(
                run_search(settings, ScriptedTask(name), world, stoppers=[Allowance(turns, name)], turns=turns)
                for name, world in worlds.items()
            )
        )
        return dict(zip(worlds, results, strict=True))

    worlds = {"a": World(factors=(0.9, 0.95)), "b": World(factors=(1.1,)), "c": World(factors=(0.99,))}
    results = asyncio.run(run(worlds))
    assert all(result.status is SearchStatus.STOPPED for result in results.values())
    made = {name: len(world.jobs) for name, world in worlds.items()}
    assert sum(made.values()) <= 60 + 8
    assert made["a"] > made["b"]


def test_a_task_without_a_baseline_holds_nobody_up():
    async def run() -> str | None:
        turns = AdaptiveTurns(["a", "b"], EvaluationPurse(10))
        waiting = asyncio.ensure_future(turns.next("a", Standing(1.0, None, 1)))
        await asyncio.sleep(0)
        assert not waiting.done()
        turns.ended("b", None)
        return await waiting

    assert asyncio.run(run()) is None
