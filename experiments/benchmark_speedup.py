"""Measures what searches find for how many evaluations: ``python -m experiments.benchmark_speedup``.

Runs presets over the 14 tasks of the benchmark at full shape with the offline rewriter as the model. The search engine,
prompts and rewriter are those of a run; instead of an evaluation, each kernel is only traced and its latency predicted
by the simulator's cost model, without executing it. A kernel that does not trace fails as in a run, but **nothing is
checked for correctness**: for that, run ``accelopt-ray optimize all`` (its check is ``strict``). Every latency is
simulated.

Evaluations are counted as the search spends them: the baseline's too, answers for duplicates not.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelopt_ray.devices.protocol import TensorSpec
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.nki_sim.cost import predict
from accelopt_ray.nki_sim.errors import KernelError
from accelopt_ray.nki_sim.tracer import trace_kernel
from accelopt_ray.outcome import CallOutcome, EvaluationOutcome
from accelopt_ray.rewrite.replies import answers
from accelopt_ray.search.loop import run_search
from accelopt_ray.search.presets import preset_settings
from accelopt_ray.search.services import ModelCall, ModelReply
from nkibench.hardware import HARDWARE
from nkibench.roofline import geometric_mean, percent_of_peak
from nkibench.task import Task, list_tasks, load_task

DEVICE, HARDWARE_NAME = "sim-trn1", "trn1"
NOT_BENCHMARKED = frozenset({"conv2d"})
TARGET_SHARE = 0.6


@dataclass
class PredictingServices:
    """Services of one search in this process: the rewriter as the model, predictions as evaluations.

    Attributes:
        task: The task.
        cache: Folder of known predictions, or None.
        latencies_ms: Predicted latency of each evaluation spent, None for a failed one.
        planning_s: CPU seconds of each planner's reply.
        failures: Outcome and message of kernels that failed.
    """

    task: Task
    cache: Path | None
    latencies_ms: list[float | None] = field(default_factory=list)
    planning_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    async def complete(self, call: ModelCall) -> ModelReply:
        started = time.process_time()
        messages = [
            {"role": "system", "content": call.system_prompt},
            {"role": "user", "content": call.user_prompt},
        ]
        [text] = answers(messages, call.seed, 1)
        if call.role == "planner":
            self.planning_s.append(time.process_time() - started)
        return ModelReply(call.call_id, CallOutcome.OK, reply_text=text, finish_reason="stop")

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        found = self._predicted(job.source)
        if "error" in found:
            self.failures.append(str(found["error"]))
            self.latencies_ms.append(None)
            return EvaluationResult(
                job.evaluation_id, EvaluationOutcome.COMPILE_ERROR, error_text=str(found["error"]), simulated=True
            )
        latency_ms = float(found["latency_ms"])
        self.latencies_ms.append(latency_ms)
        assert self.task.counts is not None
        return EvaluationResult(
            job.evaluation_id,
            EvaluationOutcome.CORRECT,
            device=DEVICE,
            simulated=True,
            latency_ms=latency_ms,
            percent_of_peak=percent_of_peak(self.task.counts, HARDWARE[HARDWARE_NAME], latency_ms),
            counters=found["counters"],
            explanation=found["explanation"],
        )

    async def record(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Keeps nothing."""

    def progress(self, event: str, **values: object) -> None:
        """Tells nobody."""

    def _predicted(self, source: str) -> dict[str, Any]:
        key = hashlib.sha256(f"{self.task.name}\n{self.task.shape_text}\n{source}".encode()).hexdigest()
        path = self.cache / f"{key}.json" if self.cache is not None else None
        if path is not None and path.exists():
            known: dict[str, Any] = json.loads(path.read_text())
            return known
        specs = [TensorSpec(*spec) if isinstance(spec, tuple) else spec for spec in self.task.input_specs()]
        try:
            prediction = predict(trace_kernel(source, specs, entry=self.task.entry), HARDWARE_NAME)
            found: dict[str, Any] = {
                "latency_ms": prediction.latency_ms,
                "counters": dict(prediction.counters),
                "explanation": prediction.explanation,
            }
        except KernelError as error:
            found = {"error": f"{error.outcome}: {error}"}
        if path is not None:
            path.write_text(json.dumps(found))
        return found


@dataclass(frozen=True)
class Found:
    """What one preset's search of one task has come to.

    Attributes:
        speedups: Best speed-up after each evaluation.
        percents: Percent of peak of baseline and best kernel.
        failed: Share of the evaluations whose kernel failed.
        planning_s: CPU seconds of each planner's reply.
        best: The best kernel.
        failures: Messages of failed kernels.
    """

    speedups: tuple[float, ...]
    percents: tuple[float, float]
    failed: float
    planning_s: tuple[float, ...]
    best: str
    failures: tuple[str, ...]

    def after(self, evaluations: int) -> float:
        """Best speed-up once so many evaluations are spent."""
        return self.speedups[min(evaluations, len(self.speedups)) - 1]


def search(task_name: str, preset: str, sizes: Mapping[str, int], cache: Path | None) -> Found:
    """Runs one search to its end."""
    task = load_task(task_name)
    services = PredictingServices(task, cache)
    result = asyncio.run(run_search(preset_settings(preset, **sizes), task, services))
    assert result.best is not None and result.baseline.latency_ms is not None, result.reason
    best, speedups = result.baseline.latency_ms, []
    for latency_ms in services.latencies_ms:
        best = min(best, latency_ms or best)
        speedups.append(result.baseline.latency_ms / best)
    return Found(
        tuple(speedups),
        (result.baseline.percent_of_peak or 0.0, result.best.result.percent_of_peak or 0.0),
        len(services.failures) / len(services.latencies_ms),
        tuple(services.planning_s),
        result.best.source.text,
        tuple(services.failures),
    )


def curve(found: Sequence[Found]) -> list[tuple[int, float]]:
    """Evaluations spent in all and geometric mean reached, when all tasks spend one evaluation in turns."""
    longest = max(len(each.speedups) for each in found)
    return [
        (
            sum(min(number, len(each.speedups)) for each in found),
            geometric_mean(each.after(number) for each in found),
        )
        for number in range(1, longest + 1)
    ]


def evaluations_to(goal: float, found: Sequence[Found]) -> int | None:
    """Evaluations spent in all until a geometric mean is reached; None if it never is."""
    return next((spent for spent, reached in curve(found) if reached >= goal - 1e-9), None)


def report(tasks: Sequence[str], results: Mapping[str, Sequence[Found]]) -> bool:
    """Prints the tables; returns whether the target holds or was not asked for."""
    print("Simulated latencies (sim-trn1), predictions only: no kernel was checked for correctness.\n")
    heads = "".join(f"{preset:>12} {'% of peak':>13} {'evals':>6} {'failed':>7}" for preset in results)
    print(f"{'task':<24}{heads}")
    for number, task in enumerate(tasks):
        cells = ""
        for found in results.values():
            each = found[number]
            percents = f"{each.percents[0]:.1f} > {each.percents[1]:.1f}"
            cells += f"{each.speedups[-1]:>11.3f}x {percents:>13} {len(each.speedups):>6} {each.failed:>7.0%}"
        print(f"{task:<24}{cells}")
    for preset, found in results.items():
        points = curve(found)
        spent, reached = points[-1]
        planning = [seconds for each in found for seconds in each.planning_s]
        print(
            f"\n{preset}: geometric mean {reached:.4f}x after {spent} evaluations; planning took "
            f"{sum(planning) / len(planning):.2f} CPU s each, {max(planning):.1f} at most, {sum(planning):.0f} in all"
        )
        step = max(1, len(points) // 12)
        print("  evaluations: " + "  ".join(f"{s}: {g:.3f}x" for s, g in points[step - 1 :: step]))
    if not {"beyond", "published"} <= set(results):
        return True
    goal_spent, goal = curve(results["published"])[-1]
    needed = evaluations_to(goal, results["beyond"])
    share = needed / goal_spent if needed is not None else float("inf")
    state = "met" if share <= TARGET_SHARE else "MISSED"
    print(
        f"\nbeyond reaches published's final {goal:.4f}x after {needed} of published's {goal_spent} evaluations: "
        f"{share:.0%} (at most {TARGET_SHARE:.0%})  {state}\n"
        f"published itself was there after {evaluations_to(goal, results['published'])}"
    )
    return share <= TARGET_SHARE


def main() -> int:
    """Runs the searches and prints the tables; returns 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help="tasks; all 14 by default")
    parser.add_argument("--presets", default="published,beyond", help="comma-separated")
    parser.add_argument("-T", "--iterations", type=int, default=6)
    parser.add_argument("-B", "--beam-width", type=int, default=3)
    parser.add_argument("-N", "--plans-per-candidate", type=int, default=4)
    parser.add_argument("-K", "--attempts-per-plan", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=2, help="searches at once")
    parser.add_argument("--cache", type=Path, help="folder to keep predictions in; not told apart by version")
    parser.add_argument("--best", type=Path, help="folder to write the best kernels to, as PRESET/TASK.py")
    arguments = parser.parse_args()
    tasks = arguments.tasks or [name for name in list_tasks() if name not in NOT_BENCHMARKED]
    presets = arguments.presets.split(",")
    names = ("iterations", "beam_width", "plans_per_candidate", "attempts_per_plan", "seed")
    sizes = {name: getattr(arguments, name) for name in names}
    if arguments.cache is not None:
        arguments.cache.mkdir(parents=True, exist_ok=True)
    # A process for each search, so that no planner profits from what another has worked out.
    with multiprocessing.get_context("spawn").Pool(arguments.slots, maxtasksperchild=1) as workers:
        jobs = {
            (preset, task): workers.apply_async(search, (task, preset, sizes, arguments.cache))
            for task in tasks
            for preset in presets
        }
        results = {preset: [jobs[preset, task].get() for task in tasks] for preset in presets}
    met = report(tasks, results)
    for preset, found in results.items():
        for task, each in zip(tasks, found, strict=True):
            for message in sorted(set(each.failures)):
                print(f"failed: {preset} {task}: {message.splitlines()[-1][:160]}")
            if arguments.best is not None:
                (arguments.best / preset).mkdir(parents=True, exist_ok=True)
                (arguments.best / preset / f"{task}.py").write_text(each.best)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
