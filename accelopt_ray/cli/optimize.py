"""``accelopt-ray optimize``: the search for a faster kernel."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
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
    from nkibench.task import Task

ALL_TASKS = "all"
"""Stands for every built-in task that counts in the benchmark's average."""

OFFLINE_SIZES = {"iterations": 3, "beam_width": 2, "plans_per_candidate": 3, "attempts_per_plan": 1}
"""Sizes of a search with the offline rewriter, which has only so many ideas, where nothing else is asked for."""


def optimize(
    tasks: Annotated[
        list[str] | None,
        typer.Argument(
            help="Built-in task, task folder, PATH#task, or all; several run at once.", metavar="TASK_OR_DIR..."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; options win over it.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The run's folder, new or empty.")] = None,
    device: Annotated[str | None, typer.Option(help="Device that evaluates.", show_default="sim-trn1")] = None,
    check: Annotated[str | None, typer.Option(help="Correctness check, published or strict.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Replaces a shape parameter.", metavar="NAME=VALUE")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Model endpoint, like http://host:8000/v1.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name at the endpoint.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Variable that holds the key.", metavar="NAME")] = None,
    preset: Annotated[str | None, typer.Option(help="Search preset.")] = None,
    iterations: Annotated[int | None, typer.Option("--iterations", "-T", help="Search iterations.")] = None,
    beam_width: Annotated[int | None, typer.Option("--beam-width", "-B", help="Candidates kept.")] = None,
    plans: Annotated[int | None, typer.Option("--plans-per-candidate", "-N", help="Plans for each candidate.")] = None,
    attempts: Annotated[
        int | None, typer.Option("--attempts-per-plan", "-K", help="Implementations of each plan.")
    ] = None,
    positive_threshold: Annotated[float | None, typer.Option(help="Speed-up worth remembering.")] = None,
    negative_threshold: Annotated[float | None, typer.Option(help="Slow-down worth remembering.")] = None,
    experiences: Annotated[
        int | None, typer.Option("--experiences-per-iteration", help="New experience items an iteration.")
    ] = None,
    memory_capacity: Annotated[int | None, typer.Option(help="Experience items kept.")] = None,
    seed: Annotated[int | None, typer.Option(help="Root of every random choice.")] = None,
    max_evaluations: MaxEvaluations = None,
    max_usd: MaxUsd = None,
    max_total_tokens: MaxTotalTokens = None,
    max_device_minutes: MaxDeviceMinutes = None,
    max_minutes: MaxMinutes = None,
    stop_at_percent_of_peak: StopAtPercentOfPeak = None,
    patience: Patience = None,
    allocate: Annotated[str | None, typer.Option(help="Budgets of several tasks: even or adaptive.")] = None,
    memory_from: Annotated[
        Path | None, typer.Option(help="Start with the lessons of another run.", metavar="RUN")
    ] = None,
    slots: Annotated[int | None, typer.Option(help="Evaluations at once.")] = None,
    compile_slots: Annotated[int | None, typer.Option(help="Compile workers beside them.")] = None,
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Seconds for each stage.")] = None,
    fix_attempts: Annotated[
        int | None, typer.Option("--fix-attempts", "-F", help="Repairs asked for of a kernel that fails.")
    ] = None,
    prices: Annotated[Path | None, typer.Option(help="Price table in place of the package's.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Folder with prompts in place of the package's, or compact.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Answer every call from this run's recorded replies.", metavar="RUN")
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Print the diff of baseline and best at the end.")] = False,
) -> None:
    """Search for a faster kernel. Without a model the built-in offline rewriter plays it."""
    from accelopt_ray.cli.session import claimed, run_and_conclude
    from accelopt_ray.cli.tasks import parse_shape
    from accelopt_ray.config import load_config
    from accelopt_ray.search.transfer import final_lessons

    named = _named_tasks(tasks or [])
    run_id = new_run_id(named if named or replay is None else ["replay"])
    defaults: dict[str, object] = {"output": f"runs/{run_id}"}
    if replay is not None and config is None:
        config = _recorded_config(replay)
        output = output or Path(f"runs/{run_id}")
    if endpoint is None and config is None and preset is None:
        defaults["search"] = OFFLINE_SIZES
    overrides: dict[str, object] = {
        "task": ",".join(_absolute(each) for each in named) or None,
        "shape": parse_shape(shape or []),
        "device": device,
        "check": check,
        "preset": preset,
        "seed": seed,
        "search": {
            "iterations": iterations,
            "beam_width": beam_width,
            "plans_per_candidate": plans,
            "attempts_per_plan": attempts,
            "positive_threshold": positive_threshold,
            "negative_threshold": negative_threshold,
            "experiences_per_iteration": experiences,
            "memory_capacity": memory_capacity,
            "fix_attempts": fix_attempts,
            **budgets(
                max_evaluations,
                max_usd,
                max_total_tokens,
                max_device_minutes,
                max_minutes,
                stop_at_percent_of_peak,
                patience,
            ),
        },
        "models": _models(endpoint, model, api_key_env),
        "prices": None if prices is None else str(prices),
        "prompts": None if prompts is None else str(prompts.absolute() if prompts.is_dir() else prompts),
        "memory_from": None if memory_from is None else str(memory_from.absolute()),
        "replay": None if replay is None else str(replay.absolute()),
        "evaluation": {"timeout_s": timeout_s},
        "slots": slots,
        "compile_slots": compile_slots,
        "allocate": allocate,
        "output": None if output is None else str(output),
    }
    resolved = load_config(config, overrides, defaults)
    limits = resolved.search_settings()
    if resolved.allocate == "adaptive" and limits.max_cost_usd is None and limits.max_evaluations is None:
        raise UserError("--allocate adaptive moves a budget and there is none: give --max-usd or --max-evaluations")
    found = usable_tasks(resolved)
    locations = ",".join(task.location for task in found)
    run_config = resolved.model_copy(update={"task": locations, "output": resolved.output.absolute()})
    check_device_and_models(run_config)
    if run_config.memory_from is not None:
        final_lessons(run_config.output.parent / run_config.memory_from)  # complains before anything starts
    with claimed(run_config.output):
        raise typer.Exit(run_and_conclude(run_config, found, run_id, diff=diff))


def _recorded_config(run: Path) -> Path:
    """A replay is the run that is replayed, where the command line does not say otherwise."""
    from accelopt_ray.cli.session import CONFIG_NAME

    path = run / CONFIG_NAME
    if not path.is_file():
        raise UserError(f"{run} has no {CONFIG_NAME} and cannot be replayed: give the folder of a run")
    return path


def _named_tasks(arguments: Sequence[str]) -> list[str]:
    """Spells out commas and ``all``."""
    named: list[str] = []
    for argument in arguments:
        parts = [argument] if Path(argument.partition("#")[0]).exists() else argument.split(",")
        named += [part.strip() for part in parts if part.strip()]
    if ALL_TASKS not in named:
        return named
    from nkibench.task import list_tasks, load_task

    every = [name for name in list_tasks() if load_task(name).in_average]
    return list(dict.fromkeys(name for each in named for name in (every if each == ALL_TASKS else [each])))


def usable_tasks(config: RunConfig) -> list[Task]:
    """Loads the tasks and runs each one's reference once at its reduced shape.

    Raises:
        UserError: There is no such task, or one of its files is missing or broken.
    """
    from nkibench.task import TaskError

    try:
        tasks = config.load_tasks()
        for task in tasks:
            task.check()
    except TaskError as error:
        raise UserError(str(error)) from None
    return tasks


def new_run_id(tasks: Sequence[str]) -> str:
    """A name that sorts by time and is unique without asking anyone."""
    task = tasks[0] if len(tasks) == 1 else f"{len(tasks)}-tasks" if tasks else "run"
    label = re.sub(r"\W+", "-", Path(task.rpartition("#")[2]).name) or "run"
    return f"{label}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"


def _absolute(location: str) -> str:
    """A task's location as every process of the run finds it, wherever it runs."""
    path, separator, name = location.rpartition("#")
    return f"{Path(path).resolve()}#{name}" if separator else location


def _models(endpoint: str | None, model: str | None, api_key_env: str | None) -> dict[str, object]:
    if endpoint is None:
        if model is not None or api_key_env is not None:
            raise UserError("--model and --api-key-env belong to an endpoint: name it with --endpoint")
        return {}
    if model is None:
        raise UserError("--endpoint needs --model: name the model that answers there")
    named: dict[str, object] = {"base_url": endpoint, "model": model}
    return {"default": named if api_key_env is None else {**named, "api_key_env": api_key_env}}


def check_device_and_models(config: RunConfig) -> None:
    """Asks everything outside this machine that the run depends on whether it is there.

    Raises:
        UserError: It is not.
    """
    from accelopt_ray.devices.registry import get_device

    if config.device != "neuron":  # whether there are cores is known to the cluster, not to this machine
        get_device(config.device)
    config.prompt_library()
    if config.replay is not None:
        from accelopt_ray.agents.replay import replay_client

        replay_client(config.replay)
        return
    config.hosted_models()  # complains of those that cannot be started; they are not up yet
    there = {
        role: [each for each in endpoints if each.base_url] for role, endpoints in config.model_endpoints({}).items()
    }
    if any(there.values()):
        import asyncio

        from accelopt_ray.agents.client import ModelClient

        client = ModelClient({role: endpoints for role, endpoints in there.items() if endpoints})
        asyncio.run(client.probe())
