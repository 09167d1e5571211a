"""Telling a plan that says something new from one that repeats.

A slot's samples are judged against what was tried from the same kernel before and what was taken in this iteration.
Which of two is the repetition is decided by position: they are judged in the order of their indices, whatever order
they arrive in. Only where selection goes by arrival are they judged as they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.search.beam import fastest
from accelopt_ray.search.candidates import PlanGroup, is_void
from accelopt_ray.search.plan_text import PlanText

_TITLE_CHARACTERS = 160


@dataclass(frozen=True)
class TriedPlan:
    """A plan that has been carried out from a kernel, and what came of it.

    Attributes:
        text: The plan, for comparing.
        title: Its first line.
        outcome: What came of it, in a few words.
        speedup: Of its fastest correct attempt over the kernel; 0 if there is none.
    """

    text: PlanText
    title: str
    outcome: str
    speedup: float = 0.0


@dataclass
class PlanBook:
    """Everything tried so far, by the canonical hash of the kernel it was tried from."""

    _tried: dict[str, list[TriedPlan]] = field(default_factory=dict)

    def tried_from(self, content: str) -> Sequence[TriedPlan]:
        """What has been tried from a kernel, oldest first."""
        return self._tried.get(content, [])

    def note(self, groups: Sequence[PlanGroup]) -> None:
        """Takes in an iteration's plans with their outcomes, in the order of their positions."""
        for group in groups:
            content = group.plan.parent.source.canonical_sha256
            if group.attempts and all(is_void(attempt.result) for attempt in group.attempts):
                continue  # Nothing is known of it yet.
            self._tried.setdefault(content, []).append(_tried(group))


class PlanGate:
    """Judges one slot's samples, round by round."""

    def __init__(
        self,
        tried: Sequence[TriedPlan],
        samples: int,
        similarity: float,
        *,
        in_order: bool = True,
        recorded: Mapping[str, str | None] | None = None,
    ) -> None:
        """Opens the first round.

        Args:
            tried: What was tried from the slot's kernel in earlier iterations.
            samples: Samples of the first round, with indices from 0.
            similarity: As in :meth:`PlanText.repeats`.
            in_order: Whether samples are judged in the order of their indices and rounds one after another.
            recorded: Judgements that stand, by plan id: the plan that was repeated, or None.
        """
        self._known = [each.text for each in tried]
        self._similarity = similarity
        self._in_order = in_order
        self._recorded = recorded or {}
        self._taken: list[TriedPlan] = []
        self._taken_before: list[TriedPlan] = []
        self._rounds: list[Mapping[int, asyncio.Future[str | None]]] = [self._open(range(samples))]

    async def judge(self, round_number: int, index: int, plan_id: str, text: str | None) -> str | None:
        """Judges a sample, where they go in order after those of smaller indices.

        Args:
            round_number: 0, or how often this index has been sampled before.
            index: The sample.
            plan_id: Its plan.
            text: The plan; None if there is none, which repeats nothing.

        Returns:
            The plan that it repeats, or None if it is taken.
        """
        if not self._in_order:
            return self._judged(plan_id, text) if text is not None else None
        judgements = self._rounds[round_number]
        for earlier, judgement in judgements.items():
            if earlier < index:
                await asyncio.shield(judgement)
        repeated = self._judged(plan_id, text) if text is not None else None
        judgements[index].set_result(repeated)
        return repeated

    async def next_round(self, round_number: int) -> Sequence[TriedPlan]:
        """Returns what was taken so far, for the prompt; where samples go in order, by the end of the round before."""
        if not self._in_order:
            return list(self._taken)
        previous = self._rounds[round_number - 1]
        repeated = [await asyncio.shield(judgement) for judgement in previous.values()]
        if len(self._rounds) == round_number:
            again = [index for index, plan_id in zip(previous, repeated, strict=True) if plan_id is not None]
            self._rounds.append(self._open(again))
            self._taken_before = list(self._taken)
        return self._taken_before

    def _judged(self, plan_id: str, text: str) -> str | None:
        plan = PlanText.of(plan_id, text)
        if self._recorded.get(plan_id) is not None:
            return self._recorded[plan_id]
        for known in self._known if plan_id not in self._recorded else ():
            if plan.repeats(known, self._similarity):
                return known.plan_id
        self._known.append(plan)
        self._taken.append(TriedPlan(plan, plan_title(text), "being tried now"))
        return None

    @staticmethod
    def _open(indices: Sequence[int]) -> Mapping[int, asyncio.Future[str | None]]:
        loop = asyncio.get_running_loop()
        return {index: loop.create_future() for index in sorted(indices)}


def plan_title(text: str) -> str:
    """Returns a plan's first line that says something, without its marks, shortened."""
    for line in text.splitlines():
        plain = line.strip().strip("#*_ \t").strip()
        if plain:
            return plain if len(plain) <= _TITLE_CHARACTERS else plain[: _TITLE_CHARACTERS - 3] + "..."
    return ""


def _tried(group: PlanGroup) -> TriedPlan:
    text, title = PlanText.of(group.plan.plan_id, group.plan.text), plan_title(group.plan.text)
    best = fastest(group.valid_attempts)
    if best is not None:
        return TriedPlan(text, title, "correct", best.speedup)
    outcomes = [attempt.result.outcome for attempt in group.attempts]
    if EvaluationOutcome.DUPLICATE in outcomes:
        return TriedPlan(text, title, "gave a kernel that was known already")
    return TriedPlan(text, title, f"failed: {outcomes[0]}" if outcomes else "not carried out")
