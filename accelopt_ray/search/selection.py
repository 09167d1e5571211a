"""What an iteration hands on: beam, lessons' pairs and best kernel, each checked whole before anything is built on it.

During an iteration a kernel is tried on one set of inputs. Here the rest of the check is made for those that would be
chosen; where one fails, the choice is made anew, until all that are chosen have passed. So beam, memory and best are
those of a search that checks every kernel whole, at a fraction of its cost, and do not depend on the order of arrival.

Where selection goes by arrival, the beam does not wait for the checks of those that only a lesson is to be drawn from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from accelopt_ray.search.attempts import record_attempt
from accelopt_ray.search.beam import select_beam
from accelopt_ray.search.candidates import Attempt, Candidate, PlanGroup
from accelopt_ray.search.context import SearchContext, all_or_cancel
from accelopt_ray.search.lessons import telling_pairs
from accelopt_ray.search.memory import RewritePair
from accelopt_ray.search.streams import stream


@dataclass(frozen=True)
class Selection:
    """What was chosen.

    Attributes:
        iteration: The iteration that it ends.
        beam: The next beam.
        pairs: Rewrites worth a lesson.
        best: The fastest correct kernel of the search so far.
        groups: The iteration's attempts with their final results.
    """

    iteration: int
    beam: tuple[Candidate, ...]
    pairs: tuple[RewritePair, ...]
    best: Candidate | None
    groups: tuple[PlanGroup, ...]

    @property
    def attempts(self) -> list[Attempt]:
        """All attempts in the order of their positions."""
        return [attempt for group in self.groups for attempt in group.attempts]

    @property
    def checked(self) -> list[Candidate]:
        """Candidates of the iteration that have passed their whole check."""
        return [each.candidate() for each in self.attempts if each.valid and not each.result.provisional]

    @property
    def left_open(self) -> list[Attempt]:
        """Attempts that have passed what was tried and have not been tried on everything."""
        return [each for each in self.attempts if each.result.provisional]

    @property
    def carried_ids(self) -> set[str]:
        """Beam and best."""
        ids = {candidate.candidate_id for candidate in self.beam}
        return ids if self.best is None else ids | {self.best.candidate_id}

    @property
    def telling_ids(self) -> set[str]:
        """Candidates that lessons are drawn from."""
        return {
            candidate_id for pair in self.pairs for candidate_id in (pair.slow_candidate_id, pair.fast_candidate_id)
        }


def anticipate(context: SearchContext, beam: Sequence[Candidate], groups: Sequence[PlanGroup]) -> None:
    """Starts the rest of the check of those that would be carried on now, so that the choice itself waits for less.

    Which ones these are depends on who has arrived, so this is for searches that go by arrival anyway.
    """
    selection = _selection(context, context.iteration, beam, groups)
    for attempt in selection.left_open:
        if attempt.candidate_id in selection.carried_ids:
            context.start_completing(attempt)


async def choose(context: SearchContext, beam: Sequence[Candidate], groups: Sequence[PlanGroup]) -> Selection:
    """Chooses from an iteration's attempts and records those whose results had been left open.

    Args:
        context: The search, in the iteration that is ending.
        beam: The iteration's own beam.
        groups: Its attempts by plan, in the order of their positions.

    Returns:
        The choice; its pairs are settled, and all attempts recorded, unless :func:`settle_pairs` has still to do that.
    """
    iteration, later = context.iteration, _pairs_come_later(context)
    left_open = _provisional_ids(groups)
    while True:
        selection = _selection(context, iteration, beam, groups)
        needed = selection.carried_ids if later else selection.carried_ids | selection.telling_ids
        unsure = [each for each in selection.left_open if each.candidate_id in needed]
        if not unsure:
            break
        groups = _updated(groups, await all_or_cancel(*map(context.complete_check, unsure)))
    for attempt in selection.attempts:
        if attempt.candidate_id in left_open and not (later and attempt.result.provisional):
            await record_attempt(context, attempt)
    return selection


async def settle_pairs(context: SearchContext, selection: Selection) -> Selection:
    """Completes the checks of those that lessons are drawn from and records whatever :func:`choose` has left."""
    if not _pairs_come_later(context):
        return selection
    left_open = _provisional_ids(selection.groups)
    while True:
        unsure = [each for each in selection.left_open if each.candidate_id in selection.telling_ids]
        if not unsure:
            break
        groups = _updated(selection.groups, await all_or_cancel(*map(context.complete_check, unsure)))
        pairs = tuple(telling_pairs(context, selection.iteration, groups))
        selection = replace(selection, pairs=pairs, groups=tuple(groups))
    for attempt in selection.attempts:
        if attempt.candidate_id in left_open:
            await record_attempt(context, attempt)
    return selection


def _pairs_come_later(context: SearchContext) -> bool:
    return context.by_arrival and context.settings.use_memory


def _provisional_ids(groups: Sequence[PlanGroup]) -> set[str]:
    return {attempt.candidate_id for group in groups for attempt in group.attempts if attempt.result.provisional}


def _selection(
    context: SearchContext, iteration: int, beam: Sequence[Candidate], groups: Sequence[PlanGroup]
) -> Selection:
    settings = context.settings
    ties = stream(settings.seed, "beam", context.task.name, iteration)
    chosen = select_beam(settings.selection_rule, beam, groups, settings.beam_width, ties)
    pairs = telling_pairs(context, iteration, groups) if settings.use_memory else []
    return Selection(iteration, tuple(chosen), tuple(pairs), _best(context.best, groups), tuple(groups))


def _best(best: Candidate | None, groups: Sequence[PlanGroup]) -> Candidate | None:
    for group in groups:
        for attempt in group.valid_attempts:
            if best is None or attempt.latency_ms < best.latency_ms:
                best = attempt.candidate()
    return best


def _updated(groups: Sequence[PlanGroup], attempts: Iterable[Attempt]) -> list[PlanGroup]:
    new = {attempt.candidate_id: attempt for attempt in attempts}
    return [
        replace(group, attempts=tuple(new.get(attempt.candidate_id, attempt) for attempt in group.attempts))
        for group in groups
    ]
