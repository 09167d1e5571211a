"""``accelopt-ray profile``: one kernel file, evaluated in this process without Ray."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult


def profile(
    kernel: Annotated[Path, typer.Argument(help="Kernel file.", metavar="KERNEL.py")],
    task: Annotated[str | None, typer.Option(help="Built-in task, task folder, or PATH#task.")] = None,
    reference: Annotated[
        Path | None, typer.Option(help="NumPy reference file, instead of a task.", metavar="FILE.py")
    ] = None,
    device: Annotated[str, typer.Option(help="Device that evaluates.")] = "sim-trn1",
    check: Annotated[str, typer.Option(help="Correctness check: published or strict.")] = "published",
    shape: Annotated[list[str] | None, typer.Option(help="Replaces a shape parameter.", metavar="NAME=VALUE")] = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for each stage.", min=0.001)] = 120.0,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what bounds the kernel: engines, critical path, traffic, SBUF.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write the predicted schedule for Perfetto.", metavar="FILE.json")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate one kernel file: outcome, latency, percent of peak, counters. Exit code 1 if it is not correct."""
    from accelopt_ray.cli.tasks import kernel_text, parse_shape, task_around, usable_task

    if (task is None) == (reference is None):
        raise UserError("say what the kernel computes: give either --task NAME or --reference FILE.py")
    source = kernel_text(kernel, ("kernel", "optimized_kernel") if task is None else _entries(task))
    with tempfile.TemporaryDirectory(prefix="accelopt-ray-") as folder:
        location = task if task is not None else task_around(Path(str(reference)), kernel, Path(folder))
        parameters = parse_shape(shape or [])
        found = usable_task(location, parameters)
        job = _job(found.location, parameters, source, device, check, timeout_s)
        result = _evaluated(job)
        if trace is not None:
            from accelopt_ray.cli.explanation import write_schedule

            write_schedule(job, trace)
    if as_json:
        print(json.dumps(as_record(result), indent=2))
    else:
        _print(result)
        if explain:
            _print_explanation(result, source)
        if trace is not None:
            print(f"schedule         {trace} (simulated; open it in https://ui.perfetto.dev)")
    if not result.correct:
        raise typer.Exit(1)


def as_record(result: EvaluationResult) -> dict[str, Any]:
    """A result as plain data, enumerations as text."""
    import dataclasses

    record = dataclasses.asdict(result)
    record["outcome"] = str(result.outcome)
    return record


def _entries(location: str) -> tuple[str, ...]:
    from nkibench.task import TaskError, load_task

    try:
        entry = load_task(location).entry
    except TaskError as error:
        raise UserError(str(error)) from None
    return (entry, "optimized_kernel") if entry == "kernel" else (entry,)


def _job(
    location: str, parameters: dict[str, int], source: str, device_name: str, check: str, timeout_s: float
) -> EvaluationJob:
    from accelopt_ray.devices.protocol import Limits
    from accelopt_ray.evaluation.records import EvaluationJob, TaskRef

    return EvaluationJob(
        evaluation_id="profile",
        task=TaskRef(location, tuple(parameters.items())),
        source=source,
        device=device_name,
        check=check,
        limits=Limits(timeout_s=timeout_s),
    )


def _evaluated(job: EvaluationJob) -> EvaluationResult:
    from accelopt_ray.devices.registry import get_device
    from accelopt_ray.evaluation.evaluate import evaluate
    from accelopt_ray.verify.references import ReferenceCache

    return evaluate(job, get_device(job.device), ReferenceCache())


def _print_explanation(result: EvaluationResult, source: str) -> None:
    from accelopt_ray.cli.explanation import lines

    if result.latency_ms is None or "busy_ms" not in result.explanation:
        print("explanation      none: the kernel was not priced by the simulator")
        return
    print("\n".join(lines(result.explanation, result.latency_ms, source)))


def _print(result: EvaluationResult) -> None:
    from accelopt_ray.devices.registry import latency_kind

    kind = latency_kind(result.device, result.simulated)
    print(f"outcome          {result.outcome}" + (f" ({result.reason})" if result.reason else ""))
    if result.error_text:
        print("\n".join("  " + line for line in result.error_text.splitlines()))
    if result.latency_ms is not None:
        print(f"latency          {result.latency_ms:.4f} ms {kind} on {result.device}")
    if result.percent_of_peak is not None:
        print(f"percent of peak  {result.percent_of_peak:.1f} % {kind}")
    print(
        f"check            {result.check}" + (f", precision {result.precision_tier}" if result.precision_tier else "")
    )
    if result.counters:
        print(f"counters ({kind})")
        width = max(map(len, result.counters))
        for name, value in sorted(result.counters.items()):
            print(
                f"  {name:<{width}}  {value:,.0f}" if float(value).is_integer() else f"  {name:<{width}}  {value:,.6g}"
            )
