"""Names of everything a search makes, derived from position alone.

``silu.i2.c3.p1.a0`` is attempt 0 at plan 1 of beam slot 3 in iteration 2 of task silu. Names made this way are the same
in every run of the same search, whatever order results arrive in; that is what lets a resumed run recognise what it has
already paid for. The task is part of the name because one run may hold several tasks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Identifiers:
    """Names within one task's search."""

    task: str

    @property
    def baseline(self) -> str:
        """Candidate 0 of iteration 0."""
        return f"{self.task}.i0.c0"

    def slot(self, iteration: int, slot: int) -> str:
        """A place in the beam at the start of an iteration."""
        return f"{self.task}.i{iteration}.c{slot}"

    def remeasurement(self, iteration: int, slot: int) -> str:
        """The evaluation that measures a beam member again."""
        return f"{self.slot(iteration, slot)}.parent"

    def plan(self, iteration: int, slot: int, plan: int, resample: int = 0) -> str:
        """A plan, and the stem of its planner call; ``resample`` counts the samples before it that repeated others."""
        stem = f"{self.slot(iteration, slot)}.p{plan}"
        return f"{stem}.r{resample}" if resample else stem

    def attempt(self, iteration: int, slot: int, plan: int, attempt: int, fix: int = 0, resample: int = 0) -> str:
        """A candidate: one implementation of a plan.

        ``resample`` counts the samples before it that gave known kernels, ``fix`` its repairs.
        """
        stem = f"{self.plan(iteration, slot, plan)}.a{attempt}"
        stem = f"{stem}.r{resample}" if resample else stem
        return f"{stem}.f{fix}" if fix else stem

    def item(self, iteration: int, rank: int) -> str:
        """An experience item by its rank among those of its iteration."""
        return f"{self.task}.i{iteration}.m{rank}"

    def content(self, canonical_sha256: str, void: int = 0) -> str:
        """The one evaluation of a kernel's content, where duplicates are not evaluated again.

        ``void`` counts the evaluations before it that ended without a verdict.
        """
        stem = f"{self.task}.k{canonical_sha256[:20]}"
        return f"{stem}.v{void}" if void else stem

    @staticmethod
    def rest(evaluation_id: str) -> str:
        """The evaluation that makes the rest of a check."""
        return f"{evaluation_id}.rest"

    @staticmethod
    def call(owner: str, role: str) -> str:
        """The model call that ``role`` answers for a plan, an attempt or an item."""
        return f"{owner}.{role}"
