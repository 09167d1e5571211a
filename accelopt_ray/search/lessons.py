"""From an iteration's attempts to lessons for the next one's planners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accelopt_ray.agents.lessons import parse_lesson
from accelopt_ray.search.candidates import PlanGroup
from accelopt_ray.search.context import SearchContext, all_or_cancel, has_text
from accelopt_ray.search.memory import ExperienceItem, RewritePair, select_experiences
from accelopt_ray.search.rows import memory_row
from accelopt_ray.search.streams import stream
from accelopt_ray.search.usage import Use, Uses, added, mentions


def telling_pairs(context: SearchContext, groups: Sequence[PlanGroup]) -> list[RewritePair]:
    """Chooses the rewrites of an iteration that are worth a lesson."""
    settings = context.settings
    return select_experiences(
        groups,
        positive_threshold=settings.positive_threshold,
        negative_threshold=settings.negative_threshold,
        limit=settings.experiences_per_iteration,
        ties=stream(settings.seed, "experiences", context.task.name, context.iteration),
    )


async def recall(context: SearchContext, items: Sequence[ExperienceItem]) -> list[ExperienceItem]:
    """Takes another run's items into the memory of a search that is about to start."""
    name = context.task.name
    own = [replace(item, item_id=context.ids.item(0, rank), iteration=0) for rank, item in enumerate(items)]
    kept = await context.memory.update(own, stream(context.settings.seed, "forgetting", name, 0))
    kept_ids = {item.item_id for item in kept}
    await context.record("memory_items", *(memory_row(name, item) for item in own if item.item_id in kept_ids))
    return kept


async def learn(
    context: SearchContext,
    memory: Sequence[ExperienceItem],
    pairs: Sequence[RewritePair],
    groups: Sequence[PlanGroup],
) -> list[ExperienceItem]:
    """Has an iteration's rewrites summarised and returns the memory with them in it.

    A summary that fails for want of a reply yields no item; the pair may come up again. Items that enter and items that
    leave are recorded.
    """
    settings, name, iteration = context.settings, context.task.name, context.iteration
    summarised = await all_or_cancel(*(_summarise(context, rank, pair) for rank, pair in enumerate(pairs)))
    new = [item for item in summarised if item is not None]
    forgetting = stream(settings.seed, "forgetting", name, iteration)
    kept = await context.memory.update(new, forgetting, uses_of(memory, groups))
    kept_ids = {item.item_id for item in kept}
    leaving = [item for item in [*memory, *new] if item.item_id not in kept_ids]
    await context.record("memory_items", *(memory_row(name, item) for item in new))
    await context.record("memory_items", *(memory_row(name, item, iteration) for item in leaving))
    return kept


async def _summarise(context: SearchContext, rank: int, pair: RewritePair) -> ExperienceItem | None:
    item_id = context.ids.item(context.iteration, rank)
    prompt = context.prompts.summarizer(slow=pair.slow_source, fast=pair.fast_source, speedup=pair.speedup)
    reply = await context.ask(item_id, "summarizer", prompt, sample_index=0, affinity=f"{context.task.name}.summarizer")
    if reply is None or not has_text(reply):
        return None
    lesson = parse_lesson(reply.reply_text)
    context.progress("lesson", item_id=item_id, kind=str(pair.kind), title=lesson.title, speedup=pair.speedup)
    return ExperienceItem(item_id, context.iteration, pair, lesson.title, lesson.text, reply.call_id)


def uses_of(memory: Sequence[ExperienceItem], groups: Sequence[PlanGroup]) -> Uses:
    """How often an iteration's plans used each item, and how often such a plan made its kernel faster."""
    uses: Uses = {}
    for group in groups:
        success = any(attempt.speedup > 1.0 for attempt in group.valid_attempts)
        for item in memory:
            if item.shown and mentions(group.plan.text, item.title):
                uses = added(uses, {item.item_id: Use(int(success), 1)})
    return uses
