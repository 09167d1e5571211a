"""A beam slot's plans: what its planner is shown, and sampling again where a plan only repeats."""

from __future__ import annotations

from collections.abc import Sequence

from accelopt_ray.agents.rendering import (
    Prompt,
    ShownAttempt,
    ShownExperience,
    ShownPlan,
    explanation_lines,
    profile_lines,
)
from accelopt_ray.search.candidates import Attempt, Candidate, Plan
from accelopt_ray.search.context import ERROR_TEXT_SHOWN, SearchContext, has_text
from accelopt_ray.search.diversity import PlanGate, TriedPlan
from accelopt_ray.search.memory import ExperienceItem
from accelopt_ray.search.rows import plan_row
from accelopt_ray.search.streams import stream


class SlotPlanning:
    """The planner's samples for one slot."""

    def __init__(
        self,
        context: SearchContext,
        iteration: int,
        slot: int,
        parent: Candidate,
        memory: Sequence[ExperienceItem],
        feedback: Sequence[Attempt],
    ) -> None:
        """Writes the prompt; nothing is asked yet.

        Args:
            context: The search.
            iteration: The iteration that asks.
            slot: Place in its beam.
            parent: The kernel to change.
            memory: Experience items to show, in this order.
            feedback: Earlier attempts to show, oldest first.
        """
        settings = context.settings
        self._context = context
        self._iteration = iteration
        self._slot = slot
        self._parent = parent
        self._memory = memory
        self._feedback = feedback
        self._tried = context.plan_book.tried_from(parent.source.canonical_sha256)
        self._gate = PlanGate(
            self._tried,
            settings.plans_per_candidate,
            settings.plan_similarity,
            in_order=not context.by_arrival,
            recorded=context.services.history.repeats if context.by_arrival else {},
        )
        self._prompt = self._prompt_with(self._tried)

    async def sampled(self, index: int) -> Plan | None:
        """Asks for a plan, again where it only repeats; returns None if none comes that is new."""
        context, settings = self._context, self._context.settings
        prompt, judged = self._prompt, settings.plan_resamples > 0
        for resample in range(settings.plan_resamples + 1):
            if resample:
                prompt = self._prompt_with([*self._tried, *await self._gate.next_round(resample)])
            plan_id = context.ids.plan(self._iteration, self._slot, index, resample)
            reply = await context.ask(
                plan_id,
                "planner",
                prompt,
                sample_index=index + resample * settings.plans_per_candidate,
                affinity=context.ids.slot(self._iteration, self._slot),
                iteration=self._iteration,
            )
            text = reply.reply_text.strip() if reply is not None and has_text(reply) else None
            repeated = await self._gate.judge(resample, index, plan_id, text) if judged else None
            if reply is None or text is None:
                return None
            plan = Plan(plan_id, self._slot, index, self._parent, text, self._iteration)
            item_ids = [item.item_id for item in self._memory]
            row = plan_row(context.task.name, self._iteration, plan, reply.call_id, item_ids, repeated)
            await context.record("plans", row)
            if repeated is None:
                return plan
        return None

    def _prompt_with(self, tried: Sequence[TriedPlan]) -> Prompt:
        context, settings, result = self._context, self._context.settings, self._parent.result
        order = stream(settings.seed, "profile", context.ids.slot(self._iteration, self._slot))
        return context.prompts.planner(
            problem=context.task.reference_source(),
            kernel=self._parent.source.text,
            profile=profile_lines(result.latency_ms, result.counters, order),
            experiences=[ShownExperience(item.title, item.text, item.pair.speedup) for item in self._memory],
            percent_of_peak=result.percent_of_peak if settings.show_percent_of_peak else None,
            bottleneck=explanation_lines(result.explanation) if settings.show_bottleneck else (),
            feedback=[_shown_attempt(attempt) for attempt in self._feedback],
            tried=[
                ShownPlan(each.title, each.outcome, each.speedup)
                for each in tried[max(0, len(tried) - settings.show_tried_plans) :]
            ],
        )


def _shown_attempt(attempt: Attempt) -> ShownAttempt:
    result = attempt.result
    return ShownAttempt(
        plan=attempt.plan.text,
        outcome=str(result.outcome),
        speedup=attempt.speedup,
        error_text=result.error_text[:ERROR_TEXT_SHOWN],
        profile=profile_lines(result.latency_ms, result.counters) if attempt.valid else (),
    )
