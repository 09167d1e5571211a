"""When a search ends: small rules that can be combined.

Every rule is asked at the end of an iteration. Those that are urgent are also asked before each model call; once one
says so, no new call starts, what has been paid for is still evaluated, and the search ends with its best so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from accelopt_ray.search.settings import SearchSettings

WARNED_SHARE = 0.8
"""Of a budget: at this share whoever watches is warned, once."""


@dataclass(frozen=True)
class SearchState:
    """What the rules may look at.

    Attributes:
        iteration: The present iteration, or the one that has just ended.
        iterations_without_improvement: Ended iterations since the best latency last fell.
        best_percent_of_peak: Percent of the hardware's limit that the best kernel reaches; None if not known.
        evaluations: Evaluations made or under way, and executor and fixer calls that will each lead to one.
        cost_usd: US dollars spent on finished calls.
        tokens: Prompt and completion tokens of these calls.
        device_s: Seconds that evaluations of this search have run on devices.
        elapsed_s: Seconds that the search has taken, those before it was resumed included.
    """

    iteration: int
    iterations_without_improvement: int
    best_percent_of_peak: float | None
    evaluations: int
    cost_usd: float
    tokens: int
    device_s: float
    elapsed_s: float


class Stopper(Protocol):
    """One rule."""

    urgent: ClassVar[bool]
    """Whether it is also asked before each model call."""

    def reason(self, state: SearchState) -> str | None:
        """Returns why the search should end, in a few words, or None."""

    def used(self, state: SearchState) -> float | None:
        """Returns how much of a budget is used, from 0 to 1; None if the rule is no budget."""


@dataclass(frozen=True)
class NoImprovement:
    """Ends when the best latency has not fallen for some iterations."""

    iterations: int
    urgent: ClassVar[bool] = False

    def reason(self, state: SearchState) -> str | None:
        """See :class:`Stopper`."""
        if state.iterations_without_improvement < self.iterations:
            return None
        return f"no improvement for {self.iterations} iterations"

    def used(self, state: SearchState) -> float | None:
        """See :class:`Stopper`."""
        return None


@dataclass(frozen=True)
class PercentOfPeak:
    """Ends when the best kernel is close enough to the hardware's limit."""

    percent: float
    urgent: ClassVar[bool] = False

    def reason(self, state: SearchState) -> str | None:
        """See :class:`Stopper`."""
        if state.best_percent_of_peak is None or state.best_percent_of_peak < self.percent:
            return None
        return f"{self.percent:g} percent of peak reached"

    def used(self, state: SearchState) -> float | None:
        """See :class:`Stopper`."""
        return None


@dataclass(frozen=True)
class EvaluationBudget:
    """Ends when no more evaluations may be started."""

    evaluations: int
    urgent: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.evaluations} evaluations"

    def reason(self, state: SearchState) -> str | None:
        """See :class:`Stopper`."""
        return f"budget of {self.evaluations} evaluations used" if state.evaluations >= self.evaluations else None

    def used(self, state: SearchState) -> float | None:
        """See :class:`Stopper`."""
        return state.evaluations / self.evaluations


@dataclass(frozen=True)
class CostBudget:
    """Ends when the money is spent; exceeded by no more than the calls in flight."""

    usd: float
    urgent: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.usd:g} USD"

    def reason(self, state: SearchState) -> str | None:
        """See :class:`Stopper`."""
        return f"budget of {self.usd:g} USD used" if state.cost_usd >= self.usd else None

    def used(self, state: SearchState) -> float | None:
        """See :class:`Stopper`."""
        return state.cost_usd / self.usd if self.usd else 1.0


@dataclass(frozen=True)
class TokenBudget:
    """Ends when the tokens are used; exceeded by no more than the calls in flight."""

    tokens: int
    urgent: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens"

    def reason(self, state: SearchState) -> str | None:
        """See :class:`Stopper`."""
        return f"budget of {self.tokens:,} tokens used" if state.tokens >= self.tokens else None

    def used(self, state: SearchState) -> float | None:
        """See :class:`Stopper`."""
        return state.tokens / self.tokens


@dataclass(frozen=True)
class DeviceTime:
    """Ends when evaluations have run for long enough; exceeded by no more than what is under way."""

    seconds: float
    urgent: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.seconds:g} s of device time"

    def reason(self, state: SearchState) -> str | None:
        """See :class:`Stopper`."""
        return f"budget of {self.seconds:g} s of device time used" if state.device_s >= self.seconds else None

    def used(self, state: SearchState) -> float | None:
        """See :class:`Stopper`."""
        return state.device_s / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class WallTime:
    """Ends when the time is up."""

    seconds: float
    urgent: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"{self.seconds:g} s"

    def reason(self, state: SearchState) -> str | None:
        """See :class:`Stopper`."""
        return f"time limit of {self.seconds:g} s reached" if state.elapsed_s >= self.seconds else None

    def used(self, state: SearchState) -> float | None:
        """See :class:`Stopper`."""
        return state.elapsed_s / self.seconds if self.seconds else 1.0


@dataclass(frozen=True)
class StopFile:
    """Ends when somebody has put a file in place."""

    path: Path
    urgent: ClassVar[bool] = True

    def reason(self, state: SearchState) -> str | None:
        """See :class:`Stopper`."""
        return f"stop file {self.path} found" if self.path.exists() else None

    def used(self, state: SearchState) -> float | None:
        """See :class:`Stopper`."""
        return None


def stoppers_for(settings: SearchSettings) -> list[Stopper]:
    """Returns the rules that the settings ask for, the number of iterations apart."""
    rules: list[Stopper] = []
    if settings.stop_after_no_improvement is not None:
        rules.append(NoImprovement(settings.stop_after_no_improvement))
    if settings.target_percent_of_peak is not None:
        rules.append(PercentOfPeak(settings.target_percent_of_peak))
    if settings.max_evaluations is not None:
        rules.append(EvaluationBudget(settings.max_evaluations))
    if settings.max_cost_usd is not None:
        rules.append(CostBudget(settings.max_cost_usd))
    if settings.max_total_tokens is not None:
        rules.append(TokenBudget(settings.max_total_tokens))
    if settings.max_device_s is not None:
        rules.append(DeviceTime(settings.max_device_s))
    if settings.max_wall_s is not None:
        rules.append(WallTime(settings.max_wall_s))
    if settings.stop_file is not None:
        rules.append(StopFile(Path(settings.stop_file)))
    return rules


def nearly_used(stoppers: Sequence[Stopper], state: SearchState) -> list[tuple[int, str]]:
    """Names the budgets of which :data:`WARNED_SHARE` is used, each with its position among the rules."""
    warned: list[tuple[int, str]] = []
    for position, stopper in enumerate(stoppers):
        used = stopper.used(state)
        if used is not None and used >= WARNED_SHARE:
            warned.append((position, f"{used:.0%} of the budget is used ({stopper})"))
    return warned


def first_reason(stoppers: Sequence[Stopper], state: SearchState, *, urgent_only: bool = False) -> str | None:
    """Returns the first rule's reason to end, or None."""
    for stopper in stoppers:
        if urgent_only and not stopper.urgent:
            continue
        reason = stopper.reason(state)
        if reason is not None:
            return reason
    return None
