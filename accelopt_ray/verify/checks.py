"""What a correctness check is to the evaluation, and the checks by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

from accelopt_ray.outcome import EvaluationOutcome, UserError
from accelopt_ray.verify import published
from accelopt_ray.verify.references import ReferenceSet
from nkibench.distributions import ORDINARY
from nkibench.task import Task


@dataclass(frozen=True)
class Finding:
    """Why a kernel does not pass.

    Attributes:
        outcome: Typed outcome.
        reason: Short machine-readable cause.
        text: The same in words, for people and prompts.
    """

    outcome: EvaluationOutcome
    reason: str
    text: str


@dataclass(frozen=True)
class Trial:
    """One set of inputs that a kernel has to get right."""

    seed: int
    distribution: str = ORDINARY


@dataclass(frozen=True)
class Verdict:
    """What comparing one trial's outputs gave.

    Attributes:
        finding: What is wrong, or None.
        details: Measured errors by name, for the evaluation's row.
    """

    finding: Finding | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


class Check(Protocol):
    """A correctness check. Cheap looks come first; the first finding ends the evaluation."""

    @property
    def name(self) -> str:
        """Name as given to ``--check``."""

    def inspect_source(self, source: str) -> Finding | None:
        """Looks at the text, before anything runs."""

    def inspect_program(self, precision_tier: str, stragglers: int) -> Finding | None:
        """Looks at what compiling revealed."""

    def inspect_latency(
        self, task: Task, hardware: str, latency_ms: float, counters: Mapping[str, float]
    ) -> Finding | None:
        """Looks at whether the latency can be true."""

    def trials(self, task: Task, seeds: Sequence[int]) -> Sequence[Trial]:
        """Lists the inputs to try, cheapest and most telling first."""

    def compare(self, task: Task, outputs: Sequence[npt.NDArray[Any]], reference: ReferenceSet) -> Verdict:
        """Judges the outputs of one trial, given in the reference's layout."""


class PublishedCheck:
    """The published check: relative L2 error over five seeds, and no ``float16`` in the text."""

    @property
    def name(self) -> str:
        """``published``."""
        return "published"

    def inspect_source(self, source: str) -> Finding | None:
        """Applies the published ban on half precision."""
        if published.banned_text(source):
            text = f"the source contains '{published.BANNED_TEXT}', which the published check does not allow"
            return Finding(EvaluationOutcome.INCORRECT, "float16_text", text)
        return None

    def inspect_program(self, precision_tier: str, stragglers: int) -> Finding | None:
        """Finds nothing: the published check does not look."""
        return None

    def inspect_latency(
        self, task: Task, hardware: str, latency_ms: float, counters: Mapping[str, float]
    ) -> Finding | None:
        """Finds nothing: the published check does not look."""
        return None

    def trials(self, task: Task, seeds: Sequence[int]) -> Sequence[Trial]:
        """The given seeds, or the five published ones."""
        return [Trial(seed) for seed in seeds or published.SEEDS]

    def compare(self, task: Task, outputs: Sequence[npt.NDArray[Any]], reference: ReferenceSet) -> Verdict:
        """Compares by relative L2 error."""
        result = published.compare(outputs, reference.output_arrays(), task.tolerance, reference.output_norms)
        details = {"relative_l2": max(result.relative_l2, default=float("nan"))}
        if result.passed:
            return Verdict(details=details)
        return Verdict(Finding(EvaluationOutcome.INCORRECT, "relative_l2", result.text), details)


def get_check(name: str) -> Check:
    """Returns the check of that name.

    Raises:
        UserError: There is none.
    """
    checks: dict[str, Check] = {"published": PublishedCheck()}
    if name not in checks:
        close = difflib.get_close_matches(name, list(checks), n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(checks)}"
        raise UserError(f"unknown check '{name}': {hint}")
    return checks[name]
