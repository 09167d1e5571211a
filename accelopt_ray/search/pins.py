"""Candidates that somebody wants carried beside every beam, whatever the rule says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accelopt_ray.search.candidates import Candidate
from accelopt_ray.search.context import SearchContext
from accelopt_ray.search.rows import measurement_row

PINNED = "pinned"
"""Why a candidate is in a beam that no rule has chosen it for."""


async def pinned_beside(context: SearchContext, beam: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates that are pinned to the next iteration and not in its beam by themselves.

    One whose check was left open is checked whole first; if it fails, it is not carried and whoever watches is told.
    """
    present = {candidate.candidate_id for candidate in beam}
    pinned: list[Candidate] = []
    for candidate_id, first_iteration in context.settings.pins.items():
        if first_iteration > context.iteration + 1:
            continue
        if candidate_id in context.provisional:
            await _complete_check(context, candidate_id)
        if candidate_id in context.correct and candidate_id not in present:
            pinned.append(context.correct[candidate_id])
    return pinned


async def _complete_check(context: SearchContext, candidate_id: str) -> None:
    attempt = context.provisional.pop(candidate_id)
    completed = await context.complete_check(attempt)
    result = replace(completed.result, evaluation_id=context.ids.rest(attempt.evaluation_id))
    row = measurement_row(
        context.task.name, context.iteration, attempt.candidate(), result, context.baseline_latency_ms
    )
    await context.record("evaluations", row)
    if completed.valid:
        context.correct[candidate_id] = completed.candidate()
    else:
        message = f"{candidate_id} is pinned and failed the rest of its check ({result.outcome}): it is not carried"
        context.progress("warning", message=message)
