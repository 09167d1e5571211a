"""How long a sweep takes and what it costs, on paper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from accelopt_ray.agents.prices import Price
from accelopt_ray.cluster.instances import catalogue
from accelopt_ray.config import RunConfig
from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.demand import Demand, run_demand, total_demand
from accelopt_ray.sweep.file import Sweep

DEFAULT_EVALUATION_S: Mapping[str, float] = {"neuron": 60.0}
"""Seconds that an evaluation holds its core: compiling 1.6 to 31 s (published), five seeds, and rounds of twelve runs.
An estimate; never measured by this project."""

SIMULATED_EVALUATION_S = 4.0
"""Seconds of one simulated evaluation at the benchmark's shapes on one CPU, a rough mean."""

MODEL_CALL_S = 45.0
OFFLINE_CALL_S = 0.2


@dataclass(frozen=True)
class Estimate:
    """What is expected of a sweep.

    Attributes:
        demand: Calls and evaluations of all runs, an upper bound.
        hours: Wall-clock hours.
        bottleneck: What they are spent waiting for.
        slots: Evaluations at once that the estimate takes for granted.
        slot_utilisation: Share of the slots' time in which they evaluate.
        model_usd: Price of all model calls whose model has a price.
        fleet_usd: Price of the fleet's nodes for those hours.
        unpriced: Models and instance types without a price.
        call_s: Seconds of a model call that the estimate takes for granted.
        evaluation_s: Seconds of an evaluation that it takes for granted.
    """

    demand: Demand
    hours: float
    bottleneck: str
    slots: int
    slot_utilisation: float
    model_usd: float
    fleet_usd: float
    unpriced: tuple[str, ...]
    call_s: float
    evaluation_s: float


def estimate(sweep: Sweep, offered_slots: int) -> Estimate:
    """Estimates a sweep.

    The time is the longest of three: all evaluations over the slots, all calls over the endpoints' width, and the
    chain inside each run (plan, then kernel, then evaluation, then lessons, one iteration after another) times the
    rounds of concurrent runs.

    Args:
        sweep: The sweep.
        offered_slots: Slots where the sweep names none: this machine's CPUs.

    Raises:
        UserError: The fleet names an instance type that is not known.
    """
    demands = [run_demand(run.config) for run in sweep.runs]
    total = total_demand(demands)
    slots = sweep.slots or offered_slots
    configs = [run.config for run in sweep.runs]
    call_s = sweep.assume.call_s or _mean(MODEL_CALL_S if config.models else OFFLINE_CALL_S for config in configs)
    evaluation_s = sweep.assume.evaluation_s or _mean(
        DEFAULT_EVALUATION_S.get(config.device, SIMULATED_EVALUATION_S) for config in configs
    )
    per_iteration_s = [
        call_s * (3 if each.summarizer_calls else 2) + evaluation_s * math.ceil(each.evaluations_at_once / slots)
        for each in demands
    ]
    chains_s = [
        length * each.iterations / max(1, len(config.tasks))
        for length, each, config in zip(per_iteration_s, demands, configs, strict=True)
    ]
    candidates = {
        "profilers": total.evaluations * evaluation_s / slots,
        "models": total.calls * call_s / sweep.assume.calls_in_flight,
        "the chain of calls inside each run": max(sum(chains_s) / sweep.concurrent_runs, *chains_s),
    }
    bottleneck = max(candidates, key=lambda name: candidates[name])
    seconds = candidates[bottleneck]
    model_usd, unpriced_models = _model_usd(sweep, demands)
    fleet_usd_per_hour, unpriced_instances = _fleet_usd_per_hour(sweep.fleet)
    return Estimate(
        demand=total,
        hours=seconds / 3600,
        bottleneck=bottleneck,
        slots=slots,
        slot_utilisation=min(1.0, candidates["profilers"] / seconds),
        model_usd=model_usd,
        fleet_usd=fleet_usd_per_hour * seconds / 3600,
        unpriced=(*unpriced_models, *unpriced_instances),
        call_s=call_s,
        evaluation_s=evaluation_s,
    )


def run_usd(config: RunConfig, demand: Demand, prompt_tokens: int, completion_tokens: int) -> tuple[float, set[str]]:
    """Price of a run's model calls, and its models without a price."""
    table = config.price_table()
    usd, unpriced = 0.0, set()
    for role, calls in (
        ("planner", demand.planner_calls),
        ("executor", demand.executor_calls),
        ("summarizer", demand.summarizer_calls),
        ("fixer", demand.fixer_calls),
    ):
        endpoints = config.endpoints(role)
        weights = sum(each.weight for each in endpoints)
        for each in endpoints if calls else []:
            # What is hosted is paid by the hour, with the fleet.
            if each.hosted is not None:
                continue
            endpoint = each.model_endpoint()
            price = endpoint.price or table.price(endpoint.model)
            if isinstance(price, Price):
                usd += calls * each.weight / weights * price.cost_usd(prompt_tokens, 0, completion_tokens)
            else:
                unpriced.add(endpoint.model)
    return usd, unpriced


def _model_usd(sweep: Sweep, demands: list[Demand]) -> tuple[float, list[str]]:
    total, unpriced = 0.0, set()
    for run, demand in zip(sweep.runs, demands, strict=True):
        usd, without = run_usd(run.config, demand, sweep.assume.prompt_tokens, sweep.assume.completion_tokens)
        total += usd
        unpriced |= without
    return total, sorted(unpriced)


def _fleet_usd_per_hour(fleet: Mapping[str, int]) -> tuple[float, list[str]]:
    known = catalogue().instances
    total, unpriced = 0.0, []
    for name, count in fleet.items():
        if name not in known:
            raise UserError(f"the fleet names the unknown instance type {name!r}: known are {', '.join(known)}")
        price = known[name].usd_per_hour
        if price is None:
            unpriced.append(name)
        else:
            total += count * price
    return total, unpriced


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
