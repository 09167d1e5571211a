"""How runs share a sweep's budget: each is granted its part before it starts, so none can spend another's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from accelopt_ray.config import RunConfig
from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.demand import run_demand
from accelopt_ray.sweep.estimate import run_usd
from accelopt_ray.sweep.file import Sweep
from accelopt_ray.sweep.folder import Grant, RunState, RunStatus


class SweepBudget:
    """Grants runs their parts of the sweep's money and evaluations.

    A run's part is in proportion to what it is expected to take, of what is left by then: the budget without what
    finished runs have used and what is granted to others that have begun. So what a run leaves over goes to those that
    begin after it, and all together never use more than the budget. A run that is taken up again gets no less than it
    had.
    """

    def __init__(self, sweep: Sweep) -> None:
        """Weighs the runs.

        Raises:
            UserError: The budget has fewer evaluations than the sweep has runs.
        """
        self._budget = sweep.budget
        if sweep.budget.evaluations is not None and sweep.budget.evaluations < len(sweep.runs):
            raise UserError(
                f"the budget of {sweep.budget.evaluations} evaluations is less than one for each of the "
                f"{len(sweep.runs)} runs: raise it, or leave runs out"
            )
        tokens = (sweep.assume.prompt_tokens, sweep.assume.completion_tokens)
        demands = {run.name: run_demand(run.config) for run in sweep.runs}
        self._evaluations = {name: float(demand.evaluations) for name, demand in demands.items()}
        self._usd = {run.name: run_usd(run.config, demands[run.name], *tokens)[0] for run in sweep.runs}
        if not all(self._usd.values()):
            # Where no model has a price in the table the endpoints may still report costs; then all runs count alike.
            self._usd = dict.fromkeys(self._usd, 1.0)

    def grant(self, name: str, states: Mapping[str, RunState | None]) -> Grant:
        """What a run may use that begins now or is taken up again.

        Args:
            name: The run.
            states: How all runs stand; None for those that have not begun.
        """
        begun = {each: state for each, state in states.items() if state is not None}
        waiting = [each for each in self._usd if each == name or each not in begun]
        taken = [_taken(state) for each, state in begun.items() if each != name]
        before = begun[name].grant if name in begun else Grant()
        usd, evaluations = before.usd, before.evaluations
        if self._budget.usd is not None:
            left_usd = self._budget.usd - sum(each.usd or 0.0 for each in taken)
            usd = max(_part(left_usd, self._usd, name, waiting), before.usd or 0.0)
        if self._budget.evaluations is not None:
            left = self._budget.evaluations - sum(each.evaluations or 0 for each in taken)
            # Each run evaluates its baseline; the rest is shared.
            part = 1 + int(_part(left - len(waiting), self._evaluations, name, waiting))
            evaluations = max(part, before.evaluations or 0)
        return Grant(usd, evaluations)


def bounded(config: RunConfig, grant: Grant) -> RunConfig:
    """The configuration with a grant's bounds; a bound of its own that is lower stays."""
    search = dict(config.search)
    for name, bound in (("max_cost_usd", grant.usd), ("max_evaluations", grant.evaluations)):
        if bound is not None:
            own = search.get(name)
            search[name] = bound if own is None else min(own, bound)
    return config.model_copy(update={"search": search})


def _taken(state: RunState) -> Grant:
    """What a run has used, if it is finished, or may still use."""
    if state.status is not RunStatus.FINISHED:
        return state.grant
    return Grant(sum(each.cost_usd for each in state.outcomes), sum(each.evaluations for each in state.outcomes))


def _part(left: float, weights: Mapping[str, float], name: str, waiting: Sequence[str]) -> float:
    return max(0.0, left) * weights[name] / sum(weights[each] for each in waiting)
