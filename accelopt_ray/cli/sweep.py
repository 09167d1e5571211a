"""``accelopt-ray sweep``: many runs from one file, planned, run, watched."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from accelopt_ray.sweep.file import Sweep, SweepRun

_RUNS_SHOWN = 40

app = typer.Typer(help="Many runs from one file.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="Sweep file.", metavar="SWEEP.yaml")]
Address = Annotated[
    str, typer.Option(help="The cluster's dashboard, like http://127.0.0.1:8265.", envvar="RAY_API_SERVER_ADDRESS")
]
SubmissionId = Annotated[str, typer.Argument(help="The job, as `sweep submit` named it.", metavar="ID")]
ScaleName = Annotated[str | None, typer.Option("--scale", help="One of the file's scales.", show_default="small")]


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
    print(f"about       {demand.calls:,} model calls, {demand.evaluations:,} evaluations")
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


@app.command()
def run(
    file: File,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The sweep's folder or URI (s3://...), new or this sweep's.")
    ],
    scale: ScaleName = None,
    slots: Annotated[int | None, typer.Option(help="Evaluations at once, of all runs.", min=1)] = None,
    concurrent_runs: Annotated[int | None, typer.Option("--concurrent", help="Runs at once.", min=1)] = None,
) -> None:
    """Run a sweep, or what is left of it. Finished runs are not repeated, unfinished ones are taken up again.

    Exit code 1 if a run failed or is left unfinished.
    """
    from accelopt_ray.cli.session import terminated_like_interrupted
    from accelopt_ray.sweep.budget import SweepBudget
    from accelopt_ray.sweep.file import load_sweep
    from accelopt_ray.sweep.folder import RunStatus, SweepFolder
    from accelopt_ray.sweep.mirror import Mirror
    from accelopt_ray.sweep.submission import outside_working_dir, work_folder
    from accelopt_ray.sweep.summary import comparison_lines, summary_lines, write_summary
    from accelopt_ray.trajectory.lock import RunLock

    sweep = load_sweep(file, scale)
    sweep = dataclasses.replace(
        sweep, slots=slots or sweep.slots, concurrent_runs=concurrent_runs or sweep.concurrent_runs
    )
    SweepBudget(sweep)  # complains of one that is too small
    _check(sweep)
    mirror = None
    path = outside_working_dir(output)
    if "://" in output:
        path = work_folder(sweep, output)
        mirror = Mirror(path, output)
        mirror.pull()
    folder = SweepFolder(path)
    folder.claim(sweep)
    lock = RunLock(folder.path)
    lock.acquire()
    runs = tuple(_located(each) for each in sweep.runs)
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:7.1f} s] {text}", flush=True)

    from actors.cluster import connected
    from actors.sweep import SweepSession

    with terminated_like_interrupted(), connected(sweep.slots) as cluster:
        say(
            f"sweep {sweep.name}, {len(runs)} runs, {sweep.concurrent_runs} at once, on "
            f"{'a local Ray cluster' if cluster.local else 'the Ray cluster'} of {cluster.cpus} CPUs and "
            f"{cluster.neuron_cores} NeuronCores"
        )
        session = SweepSession(sweep, runs, folder, cluster, say, keeper=mirror)
        try:
            session.run()
        finally:
            summary = write_summary(folder.path, runs, session.states)
            if mirror is not None:
                mirror.push()
    for line in (*summary_lines([each.name for each in runs], session.states), *comparison_lines(runs, session.states)):
        print(line)
    print(f"summary {summary}")
    if any(state is None or state.status is not RunStatus.FINISHED for state in session.states.values()):
        print("take up what is left with the same command")
        raise typer.Exit(1)


@app.command()
def status(
    sweep: Annotated[
        str, typer.Argument(help="The sweep's folder, or with --address its job.", metavar="OUTPUT_OR_ID")
    ],
    address: Annotated[str | None, typer.Option(help="The cluster's dashboard.")] = None,
) -> None:
    """Show how each run of a sweep stands, from its folder alone, or how its job does."""
    if address is not None:
        from actors.jobs import Jobs

        print(Jobs(address).status(sweep))
        return
    from accelopt_ray.sweep.folder import SweepFolder
    from accelopt_ray.sweep.summary import summary_lines

    folder = SweepFolder(Path(sweep))
    names = folder.known_runs()
    for line in summary_lines(names, {name: folder.state(name) for name in names}):
        print(line)


@app.command()
def submit(
    file: File,
    output: Annotated[str, typer.Option("--output", "-o", help="The sweep's folder on the cluster, absolute.")],
    address: Address,
    scale: ScaleName = None,
    working_dir: Annotated[Path, typer.Option(help="Checkout that travels to the cluster.")] = Path("."),
    env: Annotated[
        list[str] | None, typer.Option(help="Variable to hand on; whoever sees the job sees it.", metavar="NAME")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the job's output.")] = True,
) -> None:
    """Run a sweep as a job of a cluster. Asked again, it follows the job that is there instead of starting another.

    Exit code 1 if the job ends badly.
    """
    import os
    import shlex

    from accelopt_ray.sweep.file import load_sweep
    from accelopt_ray.sweep.submission import entrypoint, submission_id

    plan = load_sweep(file, scale)
    command = entrypoint(file, working_dir, output, plan.scale)
    handed_on = {}
    for name in env or []:
        if name not in os.environ:
            raise UserError(f"--env {name}: there is no such variable here, set it first")
        handed_on[name] = os.environ[name]
    from actors.jobs import Jobs

    jobs = Jobs(address)
    submission = jobs.submit(submission_id(plan, output), shlex.join(command), working_dir.resolve(), handed_on)
    verb = "submitted" if submission.new else f"is there already ({submission.status})"
    print(f"job {submission.submission_id} {verb}")
    follow_up = f"{submission.submission_id} --address {address}"
    print(f"follow it with `accelopt-ray sweep logs {follow_up}`, end it with `accelopt-ray sweep stop {follow_up}`")
    if not wait:
        return
    jobs.follow(submission.submission_id)
    print(f"job {submission.submission_id}: {jobs.status(submission.submission_id)}")
    if not jobs.succeeded(submission.submission_id):
        raise typer.Exit(1)


@app.command()
def logs(
    submission: SubmissionId,
    address: Address,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
) -> None:
    """Print what a sweep's job has printed."""
    from actors.jobs import Jobs

    jobs = Jobs(address)
    if follow:
        jobs.follow(submission)
    else:
        print(jobs.logs(submission), end="")


@app.command()
def stop(submission: SubmissionId, address: Address) -> None:
    """Stop a sweep's job. What it recorded stays; submitted again, it goes on from there."""
    from actors.jobs import Jobs

    stopped = Jobs(address).stop(submission)
    print(f"job {submission} {'is stopping' if stopped else 'had ended already'}")


def _check(sweep: Sweep) -> None:
    """Asks everything that the runs depend on whether it is there, each thing once.

    Raises:
        UserError: It is not.
    """
    from accelopt_ray.cli.optimize import check_device_and_models, usable_tasks

    tasks = {(each.config.task, *sorted(each.config.shape.items())): each.config for each in sweep.runs}
    for config in tasks.values():
        usable_tasks(config)
    outside = {(each.config.device, repr(each.config.models)): each.config for each in sweep.runs}
    for config in outside.values():
        check_device_and_models(config)


def _located(run: SweepRun) -> SweepRun:
    """The run with its tasks where every process of the cluster finds them."""
    locations = ",".join(task.location for task in run.config.load_tasks())
    return dataclasses.replace(run, config=run.config.model_copy(update={"task": locations}))


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
