"""Figures: each a function from frames to a matplotlib figure, and a name by which the command line finds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure

from accelopt_ray.analysis.comparison import compare, configuration_groups
from accelopt_ray.analysis.figures.ablation import ablation
from accelopt_ray.analysis.figures.hardware import (
    device_utilisation,
    engine_activity,
    percent_of_peak,
    traffic_efficiency,
)
from accelopt_ray.analysis.figures.kernels import fast_at_p, memory_effect, outcome_mix, plan_categories
from accelopt_ray.analysis.figures.search import best_so_far, speedup_by_iteration
from accelopt_ray.analysis.figures.spending import spending_by_role
from accelopt_ray.analysis.figures.style import any_simulated, render
from accelopt_ray.analysis.memory_use import memory_size
from accelopt_ray.analysis.plan_categories import plan_effects
from accelopt_ray.analysis.trajectory import Trajectory
from accelopt_ray.analysis.utilisation import stays, utilisation

__all__ = [
    "FIGURES",
    "Entry",
    "ablation",
    "best_so_far",
    "device_utilisation",
    "engine_activity",
    "fast_at_p",
    "memory_effect",
    "outcome_mix",
    "percent_of_peak",
    "plan_categories",
    "render",
    "speedup_by_iteration",
    "spending_by_role",
    "traffic_efficiency",
]


@dataclass(frozen=True)
class Entry:
    """A figure that can be made of any trajectory.

    Attributes:
        question: What it answers; its caption in the report.
        draw: Makes it.
    """

    question: str
    draw: Callable[[Trajectory], Figure]


def _utilisation(trajectory: Trajectory) -> Figure:
    evaluations = trajectory.evaluations
    busy = utilisation(stays(evaluations, trajectory.results), trajectory.llm_calls)
    return device_utilisation(busy, any_simulated(evaluations))


def _ablation(trajectory: Trajectory) -> Figure:
    return ablation(compare(trajectory, configuration_groups(trajectory)))


FIGURES: Mapping[str, Entry] = {
    "speedup-by-iteration": Entry(
        "How does the best kernel advance, and how wide is the beam?",
        lambda trajectory: speedup_by_iteration(trajectory.progress()),
    ),
    "best-so-far": Entry(
        "What did how many evaluations bring?", lambda trajectory: best_so_far(trajectory.best_so_far())
    ),
    "cost-benefit": Entry(
        "What did how many dollars bring?",
        lambda trajectory: best_so_far(trajectory.best_by_cost(), "cost_usd", trajectory.frontier("cost_usd")),
    ),
    "percent-of-peak": Entry(
        "How far from the hardware's limit are the kernels, before and after?",
        lambda trajectory: percent_of_peak(trajectory.profiles()),
    ),
    "fast-at-p": Entry(
        "What share of kernels is correct and at least p times as fast?",
        lambda trajectory: fast_at_p(trajectory.summary(), trajectory.evaluations),
    ),
    "traffic-efficiency": Entry(
        "How much of the HBM traffic is unavoidable?", lambda trajectory: traffic_efficiency(trajectory.profiles())
    ),
    "engine-activity": Entry(
        "Which engines are busy, before and after?", lambda trajectory: engine_activity(trajectory.profiles())
    ),
    "outcome-mix": Entry(
        "How do generated kernels end, by iteration and model?", lambda trajectory: outcome_mix(trajectory.outcomes())
    ),
    "spending": Entry(
        "Which role takes the tokens and dollars?", lambda trajectory: spending_by_role(trajectory.costs())
    ),
    "device-utilisation": Entry("Were the devices kept busy?", _utilisation),
    "memory-effect": Entry(
        "Is the experience memory used, and do plans that saw it do better?",
        lambda trajectory: memory_effect(
            trajectory.memory_use(), memory_size(trajectory.memory_items, trajectory.iterations)
        ),
    ),
    "plan-categories": Entry(
        "What do planners propose, and what does it bring?",
        lambda trajectory: plan_categories(plan_effects(trajectory.evaluations, trajectory.plans)),
    ),
    "ablation": Entry("Which configuration does better, beyond the chance of seeds?", _ablation),
}
"""All figures by their names on the command line."""
