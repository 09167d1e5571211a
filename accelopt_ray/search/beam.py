"""Which candidates the next iteration starts from.

Every rule first groups the attempts by (candidate, plan) and lets the fastest valid attempt stand for its group, so two
near-copies of one plan's kernel do not fill two places. The rules differ in what competes with these representatives:

``published``
    The published code's behaviour. A group without a valid attempt stands for its parent's source at infinite latency.
    Parents thus enter only behind every valid child, the beam can get slower, and one parent can fill several places.
``paper``
    The paper's text. The beam itself competes with its children, so a good candidate stays and gets more samples.
``baseline``
    The beam never changes: repeated sampling from where the search began.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from accelopt_ray.search.candidates import Attempt, Candidate, PlanGroup
from accelopt_ray.search.settings import SelectionRule


def select_beam(
    rule: SelectionRule | str,
    beam: Sequence[Candidate],
    groups: Sequence[PlanGroup],
    width: int,
    ties: random.Random,
) -> list[Candidate]:
    """Chooses the next beam.

    Args:
        rule: ``published``, ``paper`` or ``baseline``.
        beam: The iteration's own beam, one entry a slot, with this iteration's measurements.
        groups: The iteration's attempts by plan, in the order of their positions.
        width: Candidates to choose (B).
        ties: Stream that orders candidates of equal latency.

    Returns:
        At most ``width`` candidates, fastest first; the beam itself if nothing else can be chosen.
    """
    rule = SelectionRule(rule)
    if rule is SelectionRule.BASELINE:
        return list(beam)
    entries: list[tuple[float, float, Candidate]] = []
    # One draw for each beam member and each group, in the order of positions and whether it competes or not: neither
    # the order of arrival nor what is known of others has a say in a tie.
    if rule is SelectionRule.PAPER:
        # A slot may repeat a candidate when the beam was chosen by another rule; it competes once.
        entries.extend((candidate.latency_ms, ties.random(), candidate) for candidate in _distinct(beam))
    for group in groups:
        best, tie = fastest(group.valid_attempts), ties.random()
        if best is not None:
            entries.append((best.latency_ms, tie, best.candidate()))
        elif rule is SelectionRule.PUBLISHED and group.attempts:
            entries.append((math.inf, tie, group.plan.parent))
    if not entries:
        return list(beam)
    ranked = sorted((latency, tie, index) for index, (latency, tie, _) in enumerate(entries))
    return [entries[index][2] for _, _, index in ranked[:width]]


def fastest(attempts: Sequence[Attempt]) -> Attempt | None:
    """Returns the fastest of valid attempts, the earlier one of equals, or None if there are none."""
    return min(attempts, key=lambda attempt: attempt.latency_ms, default=None)


def slowest(attempts: Sequence[Attempt]) -> Attempt | None:
    """Returns the slowest of valid attempts, the earlier one of equals, or None if there are none."""
    return max(attempts, key=lambda attempt: attempt.latency_ms, default=None)


def _distinct(beam: Sequence[Candidate]) -> list[Candidate]:
    return list({candidate.candidate_id: candidate for candidate in beam}.values())
