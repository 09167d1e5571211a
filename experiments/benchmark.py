"""Measures what the project promises on this machine: ``make bench``.

Two parts: each baseline's evaluation at full shape (one seed, references ready), and the demo run from the command line
to its end. Prints measured values beside their targets and exits with 1 if one is missed. Nothing here is a test:
timings depend on the machine; the targets are for two cores.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from accelopt_ray.devices.protocol import KernelRequest, Limits, TensorSpec
from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import evaluate
from accelopt_ray.evaluation.records import EvaluationJob, TaskRef
from accelopt_ray.verify.references import ReferenceCache
from nkibench.task import load_task

FIRST_TASKS = ("silu", "rope_single_freq_apply", "mamba", "rmsnorm_matmul", "bmm_softmax")
DEMO_SIZES = ("-T", "3", "-B", "2", "-N", "3", "-K", "1")
SEED = 0


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        name: What was measured.
        value: The value.
        target: What it is to be at most, or at least.
        at_most: Which of the two.
        unit: Unit of both.
    """

    name: str
    value: float
    target: float
    at_most: bool
    unit: str

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.value <= self.target if self.at_most else self.value >= self.target


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """Samples the memory of this process and all it started; yields a list that holds the peak in GB afterwards.

    Proportional set sizes are added up: a page that several processes map counts once. Evaluations run in
    grandchildren, which the operating system's own accounting of children does not see while their launcher lives.
    """
    peak, done = [0.0], threading.Event()

    def sample() -> None:
        me = psutil.Process()
        while not done.wait(0.05):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:  # it has ended meanwhile
                    continue
            peak[0] = max(peak[0], total / 1e9)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def evaluation_figures(task_name: str) -> Iterator[Figure]:
    """Evaluates a task's baseline at full shape in this process, which does nothing else."""
    task, device, references = load_task(task_name), get_device("sim-trn1"), ReferenceCache()
    with references.use(task, SEED) as ready:
        reference_s = ready.reference_s
    specs = tuple(TensorSpec(*spec) if isinstance(spec, tuple) else spec for spec in task.input_specs())
    started = time.perf_counter()
    artifact = device.compile(KernelRequest(task.baseline_source(), specs, task.entry), Limits())
    measured = device.measure(artifact, (), Limits())  # type: ignore[arg-type]
    latency_only_s = time.perf_counter() - started
    assert hasattr(measured, "latency_ms"), measured
    started = time.perf_counter()
    job = EvaluationJob(task_name, TaskRef(task_name), task.baseline_source(), "sim-trn1", "published", (SEED,))
    result = evaluate(job, device, references)
    evaluated_s = time.perf_counter() - started
    with peak_memory() as peak_gb:
        evaluate(job, device, references)
    yield Figure(f"{task_name}: correct", float(result.correct), 1.0, False, "")
    yield Figure(f"{task_name}: evaluation", evaluated_s, 4 * reference_s + 1.0, True, "s")
    yield Figure(f"{task_name}: latency and counters alone", latency_only_s, 2.0, True, "s")
    yield Figure(f"{task_name}: peak memory", peak_gb[0], 4.0, True, "GB")


def demo_figures() -> Iterator[Figure]:
    """Runs the demo and reads its own clock and summary."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "accelopt_ray", "optimize", "silu", *DEMO_SIZES, "-o", f"{folder}/run"]
        started = time.perf_counter()
        first_s = None
        text = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if first_s is None and "baseline:" in line:
                    first_s = time.perf_counter() - started
                text.append(line)
        total_s = time.perf_counter() - started
    speedup = re.search(r"^speed-up +([\d.]+)x", "".join(text), re.MULTILINE)
    yield Figure("demo: first progress (baseline)", first_s if first_s is not None else float("inf"), 10.0, True, "s")
    yield Figure("demo: end to end", total_s, 60.0, True, "s")
    yield Figure("demo: speed-up of silu (simulated)", float(speedup[1]) if speedup else 0.0, 1.25, False, "x")


def main() -> int:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", help="evaluate one task's baseline in this process and print JSON")
    parser.add_argument("--skip-demo", action="store_true")
    arguments = parser.parse_args()
    if arguments.task:
        print(json.dumps([vars(figure) for figure in evaluation_figures(arguments.task)]))
        return 0
    figures: list[Figure] = []
    for task in FIRST_TASKS:
        # A process for each, so that none inherits another's memory or warm caches.
        answer = subprocess.run(
            [sys.executable, "-m", "experiments.benchmark", "--task", task],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[1],
        )
        figures += [Figure(**figure) for figure in json.loads(answer.stdout)]
    if not arguments.skip_demo:
        figures += demo_figures()
    for figure in figures:
        bound = "at most" if figure.at_most else "at least"
        state = "met" if figure.met else "MISSED"
        print(f"{figure.name:<52} {figure.value:>9.2f} {figure.unit:<3} ({bound} {figure.target:.2f})  {state}")
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
