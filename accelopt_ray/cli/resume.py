"""``accelopt-ray resume``: takes up a run that was stopped, killed, or is to go further."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelopt_ray.cli.options import (
    MaxDeviceMinutes,
    MaxEvaluations,
    MaxMinutes,
    MaxTotalTokens,
    MaxUsd,
    Patience,
    StopAtPercentOfPeak,
    budgets,
)
from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from accelopt_ray.config import RunConfig

_EDITABLE = (
    "iterations",
    "max_evaluations",
    "max_cost_usd",
    "max_total_tokens",
    "max_device_s",
    "max_wall_s",
    "target_percent_of_peak",
    "stop_after_no_improvement",
    "pins",
)


def resume(
    run: Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")],
    iterations: Annotated[int | None, typer.Option("--iterations", "-T", help="Iterations in total.")] = None,
    max_evaluations: MaxEvaluations = None,
    max_usd: MaxUsd = None,
    max_total_tokens: MaxTotalTokens = None,
    max_device_minutes: MaxDeviceMinutes = None,
    max_minutes: MaxMinutes = None,
    stop_at_percent_of_peak: StopAtPercentOfPeak = None,
    patience: Patience = None,
    pin: Annotated[
        list[str] | None, typer.Option(help="Carry this candidate beside every further beam.", metavar="CANDIDATE")
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Print the diff of baseline and best at the end.")] = False,
) -> None:
    """Take up a run where it stands. Nothing paid for is asked again; what is changed here is recorded."""
    from accelopt_ray.cli.optimize import check_device_and_models, new_run_id, usable_tasks
    from accelopt_ray.cli.session import CONFIG_NAME, run_and_conclude
    from accelopt_ray.config import load_config
    from accelopt_ray.search.restore import stored_run_id

    path = run / CONFIG_NAME
    if not path.is_file():
        raise UserError(f"{run} holds no run that got as far as its {CONFIG_NAME}: give the folder of a run")
    before = load_config(path, {"output": str(run.absolute())})
    stored = stored_run_id(run)
    changes: dict[str, object] = {
        "iterations": iterations,
        **budgets(
            max_evaluations,
            max_usd,
            max_total_tokens,
            max_device_minutes,
            max_minutes,
            stop_at_percent_of_peak,
            patience,
        ),
        "pins": _pins(run, stored, pin) if pin else None,
    }
    config = load_config(path, {"output": str(run.absolute()), "search": changes})
    tasks = usable_tasks(config)
    check_device_and_models(config)
    run_id = stored or new_run_id([task.name for task in tasks])
    raise typer.Exit(run_and_conclude(config, tasks, run_id, diff=diff, edits=_edits(before, config)))


def _edits(before: RunConfig, after: RunConfig) -> dict[str, tuple[object, object]]:
    pairs = {name: (before.search.get(name), after.search.get(name)) for name in _EDITABLE}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _pins(run: Path, run_id: str | None, candidate_ids: Sequence[str]) -> dict[str, int]:
    """From which iteration each candidate is carried: the first that its task has not begun.

    Raises:
        UserError: One of them is no correct kernel of the run.
    """
    from accelopt_ray.trajectory import read_table

    if run_id is None:
        raise UserError(f"{run} holds no candidates yet: resume it without --pin")
    columns = ["task", "candidate_id", "outcome"]
    rows = read_table(run, "evaluations", run_id, columns=columns).to_pylist()
    tasks = {row["candidate_id"]: row["task"] for row in rows if row["outcome"] == "correct"}
    begun = read_table(run, "call_starts", run_id, columns=["task", "iteration"]).to_pylist()
    pins: dict[str, int] = {}
    for candidate_id in candidate_ids:
        if candidate_id not in tasks:
            raise UserError(f"--pin {candidate_id!r} is no correct kernel of this run: see candidate_id in evaluations")
        task = tasks[candidate_id]
        pins[candidate_id] = 1 + max((row["iteration"] for row in begun if row["task"] == task), default=0)
    return pins
