"""``accelopt-ray optimize``: the search for a faster kernel."""

from __future__ import annotations

import contextlib
import difflib
import re
import signal
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelopt_ray.cli.progress import describe, shown
from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from accelopt_ray.config import RunConfig
    from actors.driver import Outcome
    from nkibench.task import Task

OFFLINE_SIZES = {"iterations": 3, "beam_width": 2, "plans_per_candidate": 3, "attempts_per_plan": 1}
"""Sizes of a search with the offline rewriter, which has only so many ideas, where nothing else is asked for."""


def optimize(
    task: Annotated[
        str | None, typer.Argument(help="Built-in task, task folder, or PATH#task.", metavar="TASK_OR_DIR")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file; options win over it.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The run's folder, new or empty.")] = None,
    device: Annotated[str | None, typer.Option(help="Device that evaluates [sim-trn1].")] = None,
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
    slots: Annotated[int | None, typer.Option(help="Evaluations at once.")] = None,
    timeout_s: Annotated[float | None, typer.Option("--timeout", help="Seconds for each stage.")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Print the diff of baseline and best at the end.")] = False,
) -> None:
    """Search for a faster kernel. Without a model the built-in offline rewriter plays it."""
    from accelopt_ray.cli.tasks import parse_shape, usable_task
    from accelopt_ray.config import load_config

    run_id = _new_run_id(task)
    defaults: dict[str, object] = {"output": f"runs/{run_id}"}
    if endpoint is None and config is None and preset is None:
        defaults["search"] = OFFLINE_SIZES
    overrides: dict[str, object] = {
        "task": _absolute(task),
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
        },
        "models": _models(endpoint, model, api_key_env),
        "evaluation": {"timeout_s": timeout_s},
        "slots": slots,
        "output": None if output is None else str(output),
    }
    resolved = load_config(config, overrides, defaults)
    found = usable_task(resolved.task, resolved.shape)
    run_config = resolved.model_copy(update={"task": found.location, "output": resolved.output.absolute()})
    _check_device_and_models(run_config)
    with _claimed(run_config.output), _terminated_like_interrupted():
        outcome = _run(run_config, found, run_id)
    if outcome is None:
        raise typer.Exit(1)
    raise typer.Exit(_conclude(run_config, found, outcome, diff))


def _new_run_id(task: str | None) -> str:
    """A name that sorts by time and is unique without asking anyone."""
    label = re.sub(r"\W+", "-", Path((task or "run").rpartition("#")[2]).name) or "run"
    return f"{label}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:4]}"


def _absolute(location: str | None) -> str | None:
    """A task's location as every process of the run finds it, wherever it runs."""
    if location is None:
        return None
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


def _check_device_and_models(config: RunConfig) -> None:
    """Asks everything outside this machine that the run depends on whether it is there.

    Raises:
        UserError: It is not.
    """
    from accelopt_ray.devices.registry import get_device

    get_device(config.device)
    if config.models:
        import asyncio

        from accelopt_ray.agents.client import ModelClient
        from accelopt_ray.config import ROLES

        client = ModelClient({role: [each.model_endpoint() for each in config.endpoints(role)] for role in ROLES})
        asyncio.run(client.probe())


@contextlib.contextmanager
def _claimed(output: Path) -> Iterator[None]:
    """Makes the run's folder; takes it away again if the run ends before anything was written there.

    Raises:
        UserError: It holds something already, or cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not empty and may hold another run: choose a new folder with --output")
    made = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / "trajectory").mkdir()
    except OSError as error:
        raise UserError(f"cannot write {output} ({error.strerror}): choose another folder with --output") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # what is not empty stays
            (output / "trajectory").rmdir()
            if made:
                output.rmdir()


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Lets SIGTERM end a run as Ctrl-C does: processes gone, trajectory whole."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(config: RunConfig, task: Task, run_id: str) -> Outcome | None:
    """Runs the search and shows it.

    Returns:
        How it ended, or None if it failed by a fault that is not the user's, which has been told.

    Raises:
        UserError: Something proved wrong in the user's set-up.
        KeyboardInterrupt: The run was stopped; what was recorded is on disk.
    """
    settings = config.search_settings()
    with shown(settings.iterations) as progress:
        models = ", ".join(sorted({each.model for role in config.models.values() for each in role}))
        progress.say(
            f"task {task.name} ({task.shape_text}) on {config.device}, model {models or 'offline rewriter'}, "
            f"T={settings.iterations} B={settings.beam_width} N={settings.plans_per_candidate} "
            f"K={settings.attempts_per_plan}, preset {settings.preset}, run {run_id}"
        )
        from actors.cluster import connected
        from actors.run import RunFailedError, start_run

        with connected(config.slots) as cluster:
            progress.say(f"{'local Ray cluster' if cluster.local else 'Ray cluster'} ready, {cluster.cpus} CPUs")
            run = start_run(config, run_id, cluster)
            (config.output / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
            try:
                for events in run.events():
                    for event in events:
                        progress.event(event.name, event.values)
                return run.result()
            except RunFailedError as error:
                first_line = str(error).strip().splitlines()[0]
                progress.say(f"the run failed: {first_line}; see {config.output / 'logs' / 'driver.log'}")
                return None
            except KeyboardInterrupt:
                progress.say("stopping")
                run.stop()
                progress.say(f"stopped; everything so far is in {config.output}")
                raise


def _conclude(config: RunConfig, task: Task, outcome: Outcome, diff: bool) -> int:
    """Prints what the run came to and returns the exit code."""
    best_path = config.output / "best" / f"{task.name}.py"
    trajectory = config.output / "trajectory"
    tally = outcome.tally
    baseline, best = tally.baseline, tally.best
    print()
    if baseline is None or best is None or tally.speedup is None:
        print(f"no result: {outcome.reason or outcome.status}; see {trajectory}")
        return 1
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in tally.outcomes.most_common())
    if outcome.status != "completed":
        print(f"ended early: {outcome.reason or outcome.status}")
    print(f"task        {task.name} ({task.shape_text})")
    print(f"baseline    {describe(baseline)}")
    print(f"best        {describe(best)}")
    print(f"speed-up    {tally.speedup:.2f}x" + (" (simulated)" if best.simulated else ""))
    print(f"evaluations {tally.evaluations}: {outcomes}")
    print(f"model calls {sum(tally.calls.values())}, {tally.tokens:,} tokens, {tally.cost_usd:.2f} USD")
    print(f"best kernel {best_path}")
    print(f"trajectory  {trajectory}")
    if diff and tally.baseline_source is not None and tally.best_source is not None:
        print()
        lines = difflib.unified_diff(
            tally.baseline_source.splitlines(), tally.best_source.splitlines(), "baseline", "best", lineterm=""
        )
        print("\n".join(lines))
    return 1 if outcome.status == "no_model_reply" else 0
