"""``accelopt-ray bench``: the baselines of the benchmark, evaluated one after the other."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from nkibench.task import Task

_MEAN = "geometric mean of percent of peak"


def bench(
    tasks: Annotated[list[str] | None, typer.Argument(help="Tasks; all built-in ones by default.")] = None,
    suite: Annotated[Path | None, typer.Option(help="Folder in the published layout, instead of built-ins.")] = None,
    device: Annotated[str, typer.Option(help="Device that evaluates.")] = "sim-trn1",
    check: Annotated[str, typer.Option(help="Correctness check: published or strict.")] = "published",
    seed: Annotated[list[int] | None, typer.Option(help="Input seeds, instead of the check's own.", min=0)] = None,
    reduced: Annotated[bool, typer.Option("--reduced", help="Use each task's reduced shape.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for each stage.", min=0.001)] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate the baselines: outcome, latency, percent of peak, and their geometric mean."""
    from accelopt_ray.devices.registry import get_device, latency_kind
    from accelopt_ray.verify.references import ReferenceCache
    from accelopt_ray.verify.registry import get_check

    get_check(check)
    chosen = _chosen(tasks or [], suite)
    if reduced:
        chosen = [task.at_reduced_shape() for task in chosen]
    target, references = get_device(device), ReferenceCache()
    rows = []
    if not as_json:
        print(f"{'task':<24} {'outcome':<20} {'latency ms':>12} {'% of peak':>10} {'evaluated in s':>15}")
    for task in chosen:
        row = _row(task, target, references, check, tuple(seed or ()), timeout_s, reduced)
        rows.append(row)
        if not as_json:
            _print(row)
    mean = _mean(chosen, rows)
    if as_json:
        record = {"device": device, "check": check, "tasks": rows, "geometric_mean_percent_of_peak": mean}
        print(json.dumps(record, indent=2))
    else:
        kind = latency_kind(device, target.simulated)
        print(f"latencies: {kind} on {device}" if mean is None else f"{_MEAN}: {mean:.2f} % ({kind} on {device})")
    if any(row["outcome"] != "correct" for row in rows):
        raise typer.Exit(1)


def _chosen(names: list[str], suite: Path | None) -> list[Task]:
    from nkibench.task import TaskError, list_tasks, load_suite, load_task

    try:
        if suite is None:
            return [load_task(name) for name in names or list_tasks()]
        found = {task.name: task for task in load_suite(suite)}
    except TaskError as error:
        raise UserError(str(error)) from None
    for name in names:
        if name not in found:
            raise UserError(f"{suite} has no task {name!r}: it has {', '.join(found)}")
    return [found[name] for name in names or found]


def _row(
    task: Task, device: Any, references: Any, check: str, seeds: tuple[int, ...], timeout_s: float, reduced: bool
) -> dict[str, Any]:
    from accelopt_ray.devices.protocol import Limits
    from accelopt_ray.devices.registry import latency_kind
    from accelopt_ray.evaluation.evaluate import evaluate
    from accelopt_ray.evaluation.records import EvaluationJob, TaskRef

    started = time.perf_counter()
    job = EvaluationJob(
        evaluation_id=task.name,
        task=TaskRef(task.location, tuple(task.reduced.items()) if reduced else ()),
        source=task.baseline_source(),
        device=device.name,
        check=check,
        seeds=seeds,
        limits=Limits(timeout_s=timeout_s),
    )
    result = evaluate(job, device, references)
    return {
        "task": task.name,
        "shape": dict(task.parameters),
        "outcome": str(result.outcome),
        "reason": result.reason,
        "error_text": result.error_text,
        "latency_ms": result.latency_ms,
        "percent_of_peak": result.percent_of_peak,
        "simulated": result.simulated,
        "latency_kind": latency_kind(result.device, result.simulated),
        "device": result.device,
        "check": result.check,
        "in_average": task.in_average,
        "counters": dict(result.counters),
        "compile_s": result.compile_s,
        "run_s": result.run_s,
        "evaluated_s": time.perf_counter() - started,
    }


def _print(row: dict[str, Any]) -> None:
    latency = "" if row["latency_ms"] is None else f"{row['latency_ms']:.4f}"
    percent = "" if row["percent_of_peak"] is None else f"{row['percent_of_peak']:.2f}"
    line = f"{row['task']:<24} {row['outcome']:<20} {latency:>12} {percent:>10} {row['evaluated_s']:>15.2f}"
    print(line, flush=True)
    if row["outcome"] != "correct":
        print("    " + " ".join(f"{row['reason']}: {row['error_text']}".split())[:400], flush=True)


def _mean(tasks: list[Task], rows: list[dict[str, Any]]) -> float | None:
    """The benchmark's average over the tasks that count and passed; None without any."""
    from nkibench.roofline import geometric_mean

    values = [
        row["percent_of_peak"]
        for task, row in zip(tasks, rows, strict=True)
        if task.in_average and row["outcome"] == "correct" and row["percent_of_peak"] is not None
    ]
    return geometric_mean(values) if values else None
