"""How runs share a sweep's budget: each is given its part before it starts, so none can spend another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accelopt_ray.config import RunConfig
from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.demand import run_demand
from accelopt_ray.sweep.estimate import run_usd
from accelopt_ray.sweep.file import Sweep, SweepRun


def within_budget(sweep: Sweep) -> tuple[SweepRun, ...]:
    """The runs with bounds on money and evaluations that add up to no more than the sweep's.

    A run's part is in proportion to what it is expected to take. A bound of its own that is lower stays. The parts
    depend on the file alone, so a resumed run has the same.

    Raises:
        UserError: The budget has fewer evaluations than the sweep has runs.
    """
    if sweep.budget.evaluations is not None and sweep.budget.evaluations < len(sweep.runs):
        raise UserError(
            f"the budget of {sweep.budget.evaluations} evaluations is less than one for each of the {len(sweep.runs)} "
            "runs: raise it, or leave runs out"
        )
    demands = [run_demand(run.config) for run in sweep.runs]
    usd = [
        run_usd(run.config, demand, sweep.assume.prompt_tokens, sweep.assume.completion_tokens)[0]
        for run, demand in zip(sweep.runs, demands, strict=True)
    ]
    # Where no model has a price in the table the endpoints may still report costs; then all runs count alike.
    money = _parts(sweep.budget.usd, usd if all(usd) else [1.0] * len(usd))
    # Each run evaluates its baseline; the rest is shared.
    rest = None if sweep.budget.evaluations is None else sweep.budget.evaluations - len(sweep.runs)
    evaluations = _parts(rest, [demand.evaluations for demand in demands])
    return tuple(
        replace(run, config=_bounded(run.config, part_usd, None if part is None else 1 + int(part)))
        for run, part_usd, part in zip(sweep.runs, money, evaluations, strict=True)
    )


def _parts(total: float | None, weights: Sequence[float]) -> list[float | None]:
    if total is None:
        return [None] * len(weights)
    return [total * weight / sum(weights) for weight in weights]


def _bounded(config: RunConfig, usd: float | None, evaluations: int | None) -> RunConfig:
    search = dict(config.search)
    for name, bound in (("max_cost_usd", usd), ("max_evaluations", evaluations)):
        if bound is not None:
            own = search.get(name)
            search[name] = bound if own is None else min(own, bound)
    return config.model_copy(update={"search": search})
