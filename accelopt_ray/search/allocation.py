"""Moving a total budget between the searches of one run, to where what it buys next promises most.

The budget is one of US dollars or one of evaluations.

The rule, in rounds. In the first round every task runs one iteration. Then, round by round, the more promising half of
the tasks that still search (rounded up) runs one iteration each, and the others wait. A task's promise is its expected
gain per dollar or evaluation: the logarithm of its best latency's fall in an iteration, over what that iteration took,
averaged over its iterations with each one weighing as much as all before it; it starts from a tenth of what lies
between baseline and the hardware's limit, and never exceeds what is left until there. An iteration that brings nothing
halves the promise, so a task that has stalled gives way, and one that waits keeps its promise and gets its turn.

Each round may use what is left of the budget, in equal shares. A round starts when the one before is over, so that the
choice depends on results alone and not on their order of arrival.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, Union

from accelopt_ray.search.stoppers import SearchState

_INITIAL_SHARE = 0.1
_UNKNOWN_PERCENT_OF_PEAK = 50.0


@dataclass(frozen=True)
class Standing:
    """Where one task's search stands between two iterations.

    Attributes:
        latency_ms: Of its best kernel.
        percent_of_peak: Of its best kernel; None if not known.
        evaluations: Made so far.
        cost_usd: US dollars spent so far.
    """

    latency_ms: float
    percent_of_peak: float | None
    evaluations: int
    cost_usd: float = 0.0


@dataclass(frozen=True)
class EvaluationPurse:
    """A total budget of evaluations."""

    amount: int
    least: ClassVar[float] = 1.0
    """What a task is granted and an iteration is taken to have used at least."""

    def __str__(self) -> str:
        return f"{self.amount} evaluations"

    def spent(self, standing: Standing | SearchState) -> float:
        """How much of it a task has used."""
        return standing.evaluations


@dataclass(frozen=True)
class DollarPurse:
    """A total budget of US dollars."""

    amount: float
    least: ClassVar[float] = 1e-6

    def __str__(self) -> str:
        return f"{self.amount:g} USD"

    def spent(self, standing: Standing | SearchState) -> float:
        """How much of it a task has used."""
        return standing.cost_usd


Purse = Union[EvaluationPurse, DollarPurse]


class Turns(Protocol):
    """Who may run the next iteration."""

    async def next(self, task: str, standing: Standing) -> str | None:
        """Waits for a task's turn; returns None, or why it gets none any more."""

    def ended(self, task: str, standing: Standing | None) -> None:
        """Says that a task's search has ended; ``standing`` is None if it had no baseline."""


@dataclass(frozen=True)
class _Account:
    standing: Standing
    promise: float | None = None
    allowance: float | None = None


class AdaptiveTurns:
    """The rule above; belongs to one event loop."""

    def __init__(self, tasks: Sequence[str], purse: Purse) -> None:
        """Starts with no round run.

        Args:
            tasks: Names of all tasks; the first round waits for each of them.
            purse: Budget of all together.
        """
        self._order = list(tasks)
        self._searching = set(tasks)
        self._purse = purse
        self._accounts: dict[str, _Account] = {}
        self._waiting: dict[str, asyncio.Future[str | None]] = {}

    async def next(self, task: str, standing: Standing) -> str | None:
        """See :class:`Turns`."""
        self._update(task, standing)
        turn = asyncio.get_running_loop().create_future()
        self._waiting[task] = turn
        self._start_round()
        answer: str | None = await turn
        return answer

    def ended(self, task: str, standing: Standing | None) -> None:
        """See :class:`Turns`."""
        account = self._accounts.get(task)
        if standing is not None and (account is None or account.standing != standing):
            self._update(task, standing)
        self._searching.discard(task)
        self._waiting.pop(task, None)
        self._start_round()

    @property
    def purse(self) -> Purse:
        """The budget of all together."""
        return self._purse

    def allowance(self, task: str) -> float:
        """How much of the budget a task may have used by the end of the present round."""
        account = self._accounts.get(task)
        return self._purse.amount if account is None or account.allowance is None else account.allowance

    def _update(self, task: str, standing: Standing) -> None:
        account = self._accounts.get(task)
        headroom = math.log(max(1.0, 100.0 / (standing.percent_of_peak or _UNKNOWN_PERCENT_OF_PEAK)))
        if account is None:
            self._accounts[task] = _Account(standing)
            return
        used = max(self._purse.least, self._purse.spent(standing) - self._purse.spent(account.standing))
        gain = math.log(account.standing.latency_ms / standing.latency_ms) / used
        before = account.promise if account.promise is not None else _INITIAL_SHARE * headroom / used
        promise = min((before + gain) / 2, headroom / used)
        self._accounts[task] = replace(account, standing=standing, promise=promise)

    def _start_round(self) -> None:
        waiting = [task for task in self._order if task in self._waiting and not self._waiting[task].done()]
        if not waiting or self._searching - set(waiting):
            return
        left = self._purse.amount - sum(self._purse.spent(account.standing) for account in self._accounts.values())
        if left <= 0:
            for task in waiting:
                self._waiting.pop(task).set_result(f"total budget of {self._purse} used")
            return
        chosen = self._chosen(waiting)
        for task in chosen:
            account = self._accounts[task]
            share = left // len(chosen) if isinstance(self._purse, EvaluationPurse) else left / len(chosen)
            allowance = self._purse.spent(account.standing) + max(self._purse.least, share)
            self._accounts[task] = replace(account, allowance=allowance)
            self._waiting.pop(task).set_result(None)

    def _chosen(self, waiting: Sequence[str]) -> list[str]:
        def promise(task: str) -> float:
            known = self._accounts[task].promise
            return math.inf if known is None else known

        new = [task for task in waiting if promise(task) == math.inf]
        if new:
            return new
        ranked = sorted(waiting, key=lambda task: (-promise(task), self._order.index(task)))
        return ranked[: math.ceil(len(ranked) / 2)]


@dataclass(frozen=True)
class Allowance:
    """Ends a search that has used its share of the round's budget."""

    turns: AdaptiveTurns
    task: str
    urgent: ClassVar[bool] = True

    def reason(self, state: SearchState) -> str | None:
        """See :class:`~accelopt_ray.search.stoppers.Stopper`."""
        purse = self.turns.purse
        return f"total budget of {purse} used" if purse.spent(state) >= self.turns.allowance(self.task) else None

    def used(self, state: SearchState) -> float | None:
        """See :class:`~accelopt_ray.search.stoppers.Stopper`."""
        return None
