"""One session of a run: the folder it writes, the actors it starts, what it shows and what it came to."""

from __future__ import annotations

import contextlib
import difflib
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accelopt_ray.cli.progress import describe, shown
from accelopt_ray.devices.registry import latency_kind
from accelopt_ray.outcome import UserError
from accelopt_ray.search.result import SearchStatus
from accelopt_ray.search.transfer import LESSONS_NAME
from accelopt_ray.trajectory.lock import LOCK_NAME

if TYPE_CHECKING:
    from accelopt_ray.config import RunConfig
    from actors.driver import Edits, Outcome
    from nkibench.task import Task

CONFIG_NAME = "config.yaml"


@contextlib.contextmanager
def claimed(output: Path) -> Iterator[None]:
    """Makes a new run's folder; takes it away again if the run ends before anything was recorded there.

    Raises:
        UserError: It holds something already, or cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is not empty and may hold another run: choose a new folder with --output")
    made = not output.exists()
    trajectory = output / "trajectory"
    try:
        output.mkdir(parents=True, exist_ok=True)
        trajectory.mkdir()
    except OSError as error:
        raise UserError(f"cannot write {output} ({error.strerror}): choose another folder with --output") from None
    try:
        yield
    finally:
        if not any(trajectory.glob("*/*/part-*")):
            (trajectory / LOCK_NAME).unlink(missing_ok=True)
            (output / CONFIG_NAME).unlink(missing_ok=True)
            (output / LESSONS_NAME).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what is not empty stays
            trajectory.rmdir()
            if made:
                output.rmdir()


def write_config(config: RunConfig) -> None:
    """Saves the configuration, whole or not at all."""
    path = config.output / CONFIG_NAME
    temporary = path.with_suffix(".tmp")
    temporary.write_text(config.to_yaml(), encoding="utf-8")
    temporary.replace(path)


def run_and_conclude(
    config: RunConfig, tasks: Sequence[Task], run_id: str, *, diff: bool = False, edits: Edits | None = None
) -> int:
    """Runs the searches of a run, shows them and prints what they came to.

    Args:
        config: The resolved configuration.
        tasks: Its tasks, loaded.
        run_id: Names the run.
        diff: Whether to print the difference between baseline and best.
        edits: What was changed before the run is taken up again; None for a new run.

    Returns:
        The exit code.

    Raises:
        UserError: Something proved wrong in the user's set-up.
        KeyboardInterrupt: The run was stopped; what was recorded is on disk.
    """
    with terminated_like_interrupted():
        outcomes = _run(config, tasks, run_id, edits)
    if outcomes is None:
        print(f"take it up again with: accelopt-ray resume {config.output}")
        return 1
    codes = [_conclude(config, task, outcomes[task.name], diff) for task in tasks]
    print(f"trajectory  {config.output / 'trajectory'}")
    if len(tasks) > 1:
        _summarise(tasks, outcomes)
    return max(codes)


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Lets SIGTERM end a run as Ctrl-C does: processes gone, trajectory whole."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(config: RunConfig, tasks: Sequence[Task], run_id: str, edits: Edits | None) -> Mapping[str, Outcome] | None:
    """Returns how each task's search ended, or None if the run failed by a fault that is not the user's."""
    settings = config.search_settings()
    with shown(settings.iterations, [task.name for task in tasks]) as progress:
        models = ", ".join(sorted({each.model for role in config.models.values() for each in role}))
        names = f"task {tasks[0].name} ({tasks[0].shape_text})" if len(tasks) == 1 else f"{len(tasks)} tasks"
        progress.say(
            f"{names} on {config.device}, model {models or 'offline rewriter'}, "
            f"T={settings.iterations} B={settings.beam_width} N={settings.plans_per_candidate} "
            f"K={settings.attempts_per_plan}, preset {settings.preset}, run {run_id}"
        )
        if edits is None:
            progress.say(expectation(config))
        from actors.cluster import connected
        from actors.run import RunFailedError, start_run

        with connected(config.slots and config.slots + config.compile_slots) as cluster:
            progress.say(f"{'local Ray cluster' if cluster.local else 'Ray cluster'} ready, {cluster.cpus} CPUs")
            run = start_run(config, run_id, cluster, edits=edits)
            write_config(config)
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


def expectation(config: RunConfig) -> str:
    """What a run will ask for and cost, in one line, said before anything is spent."""
    from accelopt_ray.sweep.demand import run_demand
    from accelopt_ray.sweep.estimate import run_usd
    from accelopt_ray.sweep.file import Assumptions

    demand = run_demand(config)
    text = f"about {demand.calls:,} model calls and {demand.evaluations:,} evaluations"
    if config.replay is not None:
        return f"{text}, all answered from {config.replay}, nothing is spent"
    if not config.models:
        return text
    tokens = Assumptions()
    usd, unpriced = run_usd(config, demand, tokens.prompt_tokens, tokens.completion_tokens)
    text += f", {usd:.2f} USD at {tokens.prompt_tokens:,} + {tokens.completion_tokens:,} tokens a call"
    if unpriced:
        text += f" (no price known, counted as 0: {', '.join(sorted(unpriced))})"
    if any(endpoint.hosted is not None for role in config.models.values() for endpoint in role):
        text += ", and the hours of the GPUs that hosted models take"
    limit = config.search_settings().max_cost_usd
    return text + (f"; the budget ends it at {limit:.2f} USD" if limit is not None and limit < usd else "")


def _conclude(config: RunConfig, task: Task, outcome: Outcome, diff: bool) -> int:
    """Prints what one task's search came to and returns its exit code."""
    tally = outcome.tally
    baseline, best = tally.baseline, tally.best
    print()
    if baseline is None or best is None or tally.speedup is None:
        print(no_result(config, task, outcome.status, outcome.reason))
        return 1
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in tally.outcomes.most_common())
    if outcome.status != "completed":
        print(f"ended early: {outcome.reason or outcome.status}")
    print(f"task        {task.name} ({task.shape_text})")
    print(f"baseline    {describe(baseline)}")
    print(f"best        {describe(best)}")
    doubt = "" if tally.predicted_to_differ else "; no predicted difference: within the model's confidence"
    kind = latency_kind(best.device, best.simulated)
    print(f"speed-up    {tally.speedup:.2f}x" + (f" ({kind}{doubt})" if best.simulated else ""))
    print(f"evaluations {tally.evaluations}: {outcomes}")
    print(f"model calls {sum(tally.calls.values())}, {tally.tokens:,} tokens, {tally.cost_usd:.2f} USD")
    print(f"best kernel {config.output / 'best' / task.name}.py")
    if diff and tally.baseline_source is not None and tally.best_source is not None:
        print()
        lines = difflib.unified_diff(
            tally.baseline_source.splitlines(), tally.best_source.splitlines(), "baseline", "best", lineterm=""
        )
        print("\n".join(lines))
    return 1 if outcome.status == "no_model_reply" else 0


def no_result(config: RunConfig, task: Task, status: str, reason: str) -> str:
    """Why a search has found nothing, and what its user may have to do about it."""
    text = f"no result for {task.name}: {reason or status}"
    if status != SearchStatus.BASELINE_FAILED or not config.shape:
        return text
    return f"{text}\n{task.shape_text} is not the task's own shape; {task.baseline_path} says what shapes it takes"


def _summarise(tasks: Sequence[Task], outcomes: Mapping[str, Outcome]) -> None:
    """Prints one line for each task and their geometric mean; a task without a result counts as 1."""
    from nkibench.roofline import geometric_mean

    width = max(len(task.name) for task in tasks)
    print(f"\n{'task':<{width}}  baseline ms      best ms  speed-up  % of peak  evaluations")
    kinds: set[str] = set()
    for task in tasks:
        tally = outcomes[task.name].tally
        if tally.baseline is None or tally.best is None or tally.speedup is None:
            print(f"{task.name:<{width}}  no result")
            continue
        kinds.add(latency_kind(tally.best.device, tally.best.simulated))
        before, after = (
            "-" if kernel.percent_of_peak is None else f"{kernel.percent_of_peak:.1f}"
            for kernel in (tally.baseline, tally.best)
        )
        print(
            f"{task.name:<{width}}  {tally.baseline.latency_ms:>11.4f}  {tally.best.latency_ms:>11.4f}"
            f"  {tally.speedup:>7.3f}x  {before + ' > ' + after:>11}  {tally.evaluations:>5}"
        )
    # The least trustworthy kind comes last in the alphabet.
    mean = geometric_mean(outcomes[task.name].tally.speedup or 1.0 for task in tasks)
    print(f"geometric mean of the speed-ups {mean:.3f}x" + (f" ({max(kinds)})" if kinds - {"measured"} else ""))
