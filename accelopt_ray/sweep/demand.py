"""How much a sweep asks for: model calls and evaluations, counted from the settings."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from accelopt_ray.config import RunConfig
from accelopt_ray.sweep.file import Sweep


@dataclass(frozen=True)
class Demand:
    """What a search asks for if every call brings a new plan or kernel.

    Failures and duplicates make evaluations fewer; samples that replace repeated plans and kernels add calls.

    Attributes:
        planner_calls: Calls of the planner.
        executor_calls: Calls of the executor.
        summarizer_calls: Calls of the summariser, at most.
        fixer_calls: Calls of the fixer, if every kernel needed all its repairs.
        evaluations: Evaluations, the baseline's and repeated measurements of parents included.
        iterations: Iterations of all searches.
        evaluations_at_once: Evaluations of one iteration, which nothing keeps from going on together.
    """

    planner_calls: int
    executor_calls: int
    summarizer_calls: int
    fixer_calls: int
    evaluations: int
    iterations: int
    evaluations_at_once: int

    @property
    def calls(self) -> int:
        """Calls of all roles."""
        return self.planner_calls + self.executor_calls + self.summarizer_calls + self.fixer_calls


def run_demand(config: RunConfig) -> Demand:
    """Counts what a run asks for.

    The first iteration has one candidate, N plans and N·K kernels; the others have B candidates.
    """
    settings = config.search_settings()
    tasks = len(config.tasks)
    plans = settings.plans_per_candidate * (1 + (settings.iterations - 1) * settings.beam_width)
    kernels = plans * settings.attempts_per_plan
    measured_again = (
        (settings.iterations - 1) * settings.beam_width
        if settings.remeasure_parents and not config.device.startswith("sim-")
        else 0
    )
    # One attempt of each plan at most becomes a lesson.
    wanted, later = settings.experiences_per_iteration, settings.beam_width * settings.plans_per_candidate
    lessons = min(wanted, settings.plans_per_candidate) + (settings.iterations - 1) * min(wanted, later)
    lessons = lessons if settings.use_memory else 0
    evaluations = tasks * (1 + kernels + measured_again + kernels * settings.fix_attempts)
    share = 1.0
    if settings.max_evaluations is not None and settings.max_evaluations < evaluations:
        share = settings.max_evaluations / evaluations
    return Demand(
        planner_calls=round(share * tasks * plans),
        executor_calls=round(share * tasks * kernels),
        summarizer_calls=round(share * tasks * lessons),
        fixer_calls=round(share * tasks * kernels * settings.fix_attempts),
        evaluations=min(evaluations, settings.max_evaluations or evaluations),
        iterations=max(1, round(share * tasks * settings.iterations)),
        evaluations_at_once=tasks * settings.beam_width * settings.plans_per_candidate * settings.attempts_per_plan,
    )


def total_demand(demands: Iterable[Demand]) -> Demand:
    """Adds up; of evaluations at once, the most of any."""
    found = list(demands)
    return Demand(
        planner_calls=sum(each.planner_calls for each in found),
        executor_calls=sum(each.executor_calls for each in found),
        summarizer_calls=sum(each.summarizer_calls for each in found),
        fixer_calls=sum(each.fixer_calls for each in found),
        evaluations=sum(each.evaluations for each in found),
        iterations=sum(each.iterations for each in found),
        evaluations_at_once=max((each.evaluations_at_once for each in found), default=0),
    )


def most_evaluations_at_once(sweep: Sweep, devices: Collection[str]) -> int:
    """Evaluations on some devices that concurrent runs together can have in flight; no more than the sweep's slots."""
    each = sorted(run_demand(run.config).evaluations_at_once for run in sweep.runs if run.config.device in devices)
    most = sum(each[-sweep.concurrent_runs :])
    return most if sweep.slots is None else min(most, sweep.slots)
