"""From an iteration's attempts to lessons for the next one's planners."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Protocol

from accelopt_ray.agents.lessons import parse_lesson
from accelopt_ray.search.candidates import PlanGroup
from accelopt_ray.search.context import SearchContext, all_or_cancel, has_text
from accelopt_ray.search.memory import ExperienceItem, RewritePair, select_experiences
from accelopt_ray.search.rows import memory_row
from accelopt_ray.search.streams import stream
from accelopt_ray.search.usage import Use, Uses, added, mentions


def telling_pairs(context: SearchContext, iteration: int, groups: Sequence[PlanGroup]) -> list[RewritePair]:
    """Chooses the rewrites of an iteration that are worth a lesson."""
    settings = context.settings
    return select_experiences(
        groups,
        positive_threshold=settings.positive_threshold,
        negative_threshold=settings.negative_threshold,
        limit=settings.experiences_per_iteration,
        ties=stream(settings.seed, "experiences", context.task.name, iteration),
    )


class Rewrites(Protocol):
    """What an iteration's lessons are drawn from."""

    @property
    def pairs(self) -> Sequence[RewritePair]:
        """Rewrites worth a lesson."""

    @property
    def groups(self) -> Sequence[PlanGroup]:
        """The iteration's attempts with their final results."""


class Learning:
    """One search's memory and what is being learnt; belongs to one event loop.

    Where selection waits for all, planners are shown what every iteration before theirs has taught. Where it does not,
    they do not wait for the summarizer either: an iteration's lessons are drawn beside the next one and shown from the
    one after it on.
    """

    def __init__(self, context: SearchContext) -> None:
        """Starts with nothing learnt."""
        self._context = context
        self._memory: list[ExperienceItem] = []
        self._under_way: asyncio.Future[list[ExperienceItem]] | None = None

    @property
    def memory(self) -> list[ExperienceItem]:
        """What the next iteration's planners may be shown."""
        return self._memory

    async def recall(self, items: Sequence[ExperienceItem]) -> None:
        """Takes another run's items into the memory of a search that is about to start."""
        context, name = self._context, self._context.task.name
        own = [replace(item, item_id=context.ids.item(0, rank), iteration=0) for rank, item in enumerate(items)]
        kept = await context.memory.update(own, stream(context.settings.seed, "forgetting", name, 0))
        kept_ids = {item.item_id for item in kept}
        await context.record("memory_items", *(memory_row(name, item) for item in own if item.item_id in kept_ids))
        self._memory = kept

    async def learn(self, iteration: int, rewrites: Awaitable[Rewrites]) -> None:
        """Has an iteration's rewrites summarised and takes them into the memory.

        A summary that fails for want of a reply yields no item; the pair may come up again. Items that enter and items
        that leave are recorded.

        Args:
            iteration: The iteration that has ended.
            rewrites: Its rewrites, once they are known for good.
        """
        previous, self._under_way = self._under_way, None
        if previous is not None:
            self._memory = await previous
        self._under_way = asyncio.ensure_future(self._learn(iteration, self._memory, rewrites))
        if not self._context.by_arrival:
            await self.finish()

    async def finish(self) -> None:
        """Waits for what is being learnt."""
        if self._under_way is not None:
            self._memory = await self._under_way
            self._under_way = None

    async def close(self) -> None:
        """Gives up what is being learnt."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)

    async def _learn(
        self, iteration: int, memory: Sequence[ExperienceItem], rewrites: Awaitable[Rewrites]
    ) -> list[ExperienceItem]:
        context, name = self._context, self._context.task.name
        known = await rewrites
        summarised = await all_or_cancel(
            *(_summarise(context, iteration, rank, pair) for rank, pair in enumerate(known.pairs))
        )
        new = [item for item in summarised if item is not None]
        forgetting = stream(context.settings.seed, "forgetting", name, iteration)
        kept = await context.memory.update(new, forgetting, uses_of(memory, known.groups))
        kept_ids = {item.item_id for item in kept}
        leaving = [item for item in [*memory, *new] if item.item_id not in kept_ids]
        await context.record("memory_items", *(memory_row(name, item) for item in new))
        await context.record("memory_items", *(memory_row(name, item, iteration) for item in leaving))
        return kept


async def _summarise(context: SearchContext, iteration: int, rank: int, pair: RewritePair) -> ExperienceItem | None:
    item_id = context.ids.item(iteration, rank)
    prompt = context.prompts.summarizer(slow=pair.slow_source, fast=pair.fast_source, speedup=pair.speedup)
    affinity = f"{context.task.name}.summarizer"
    reply = await context.ask(item_id, "summarizer", prompt, sample_index=0, affinity=affinity, iteration=iteration)
    if reply is None or not has_text(reply):
        return None
    lesson = parse_lesson(reply.reply_text)
    context.progress("lesson", item_id=item_id, kind=str(pair.kind), title=lesson.title, speedup=pair.speedup)
    return ExperienceItem(item_id, iteration, pair, lesson.title, lesson.text, reply.call_id)


def uses_of(memory: Sequence[ExperienceItem], groups: Sequence[PlanGroup]) -> Uses:
    """How often an iteration's plans used each item, and how often such a plan made its kernel faster."""
    uses: Uses = {}
    for group in groups:
        success = any(attempt.speedup > 1.0 for attempt in group.valid_attempts)
        for item in memory:
            if item.shown and mentions(group.plan.text, item.title):
                uses = added(uses, {item.item_id: Use(int(success), 1)})
    return uses
