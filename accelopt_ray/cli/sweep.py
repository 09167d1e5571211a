"""``accelopt-ray sweep``: many runs from one file, planned, run, watched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from accelopt_ray.sweep.file import Sweep

_RUNS_SHOWN = 40

app = typer.Typer(help="Many runs from one file.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="Sweep file.", metavar="SWEEP.yaml")]
ScaleName = Annotated[str | None, typer.Option("--scale", help="One of the file's scales [small].")]


@app.command()
def plan(file: File, scale: ScaleName = None) -> None:
    """Show the runs and what they are expected to take, before anything is spent."""
    import os

    from accelopt_ray.sweep.estimate import estimate
    from accelopt_ray.sweep.file import load_sweep

    sweep = load_sweep(file, scale)
    expected = estimate(sweep, os.cpu_count() or 1)
    _print_runs(sweep)
    demand, assume = expected.demand, sweep.assume
    print(f"at most     {demand.calls:,} model calls, {demand.evaluations:,} evaluations")
    print(
        f"            planner {demand.planner_calls:,}, executor {demand.executor_calls:,}, "
        f"summarizer {demand.summarizer_calls:,}, fixer {demand.fixer_calls:,}"
    )
    print(
        f"time        {expected.hours:.2f} hours, most of it for {expected.bottleneck}; {expected.slots} slots busy "
        f"{100 * expected.slot_utilisation:.0f} % of it"
    )
    print(
        f"cost        {expected.model_usd:.2f} USD for model calls, {expected.fleet_usd:.2f} USD for nodes"
        + (f" ({', '.join(f'{count} x {name}' for name, count in sweep.fleet.items())})" if sweep.fleet else "")
    )
    if expected.unpriced:
        print(f"            without a price, counted as 0: {', '.join(expected.unpriced)}")
    print(
        f"assumed     {expected.call_s:g} s a call, {expected.evaluation_s:g} s an evaluation, "
        f"{assume.prompt_tokens} + {assume.completion_tokens} tokens a call, {assume.calls_in_flight} calls at once "
        "(the file's assume changes it)"
    )
    budget = ", ".join(f"{name} {value:g}" for name, value in sweep.budget.model_dump().items() if value is not None)
    print(f"budget      {budget or 'none: name one under budget in the file'}")


def _print_runs(sweep: Sweep) -> None:
    from accelopt_ray.sweep.demand import run_demand

    title = f"{sweep.name} ({sweep.scale})" if sweep.scale else sweep.name
    print(f"sweep       {title}: {len(sweep.runs)} runs, {sweep.concurrent_runs} at once")
    if sweep.description:
        print(f"            {' '.join(sweep.description.split())}")
    width = max(len(run.name) for run in sweep.runs)
    print(f"{'run':<{width}}  {'device':<9} {'preset':<17} {'T':>4} {'B':>3} {'N':>4} {'K':>3}  calls  evaluations")
    for run in sweep.runs[:_RUNS_SHOWN]:
        settings, demand = run.config.search_settings(), run_demand(run.config)
        print(
            f"{run.name:<{width}}  {run.config.device:<9} {run.config.preset:<17} {settings.iterations:>4} "
            f"{settings.beam_width:>3} {settings.plans_per_candidate:>4} {settings.attempts_per_plan:>3} "
            f"{demand.calls:>6} {demand.evaluations:>12}"
        )
    if len(sweep.runs) > _RUNS_SHOWN:
        print(f"... and {len(sweep.runs) - _RUNS_SHOWN} more")
