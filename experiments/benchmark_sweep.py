"""Measures what the machinery of sweeps costs: ``python -m experiments.benchmark_sweep``.

Runs ``presets.yaml`` at its small scale (24 runs), then evaluates exactly the kernels that it evaluated on as many
profilers, with nothing around them, and compares the two times. Results of earlier runs are not used.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import evaluate
from accelopt_ray.evaluation.records import EvaluationJob, TaskRef
from accelopt_ray.sweep.file import load_sweep
from accelopt_ray.trajectory import read_table
from accelopt_ray.verify.references import ReferenceCache

SWEEP = Path(__file__).with_name("presets.yaml")
TARGET_RATIO = 1.15


@functools.cache
def _references() -> ReferenceCache:
    """One cache for each worker process."""
    return ReferenceCache()


def _run(job: EvaluationJob) -> str:
    return str(evaluate(job, get_device(job.device), _references()).outcome)


def evaluated_jobs(output: Path) -> list[EvaluationJob]:
    """The kernels that a sweep has evaluated, in the order of their results; duplicates were not evaluated."""
    jobs = []
    for run in load_sweep(SWEEP).runs:
        folder = output / run.name
        sources = {row["source_sha256"]: row["source"] for row in read_table(folder, "sources").to_pylist()}
        [task] = run.config.load_tasks()
        reference = TaskRef(task.location, tuple(run.config.shape.items()))
        evaluated = {row["evaluation_id"] for row in read_table(folder, "results").to_pylist()}
        for row in read_table(folder, "evaluations").to_pylist():
            if row["evaluation_id"] in evaluated and row["source_sha256"] is not None:
                source = sources[row["source_sha256"]]
                job = EvaluationJob(row["evaluation_id"], reference, source, run.config.device, run.config.check)
                jobs.append(job)
    return jobs


def main() -> int:
    """Prints both times and their ratio; returns 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=os.cpu_count() or 1, help="evaluations at once")
    arguments = parser.parse_args()
    os.environ["ACCELOPT_RAY_STORE"] = "off"
    with tempfile.TemporaryDirectory(prefix="accelopt-ray-") as name:
        output = Path(name) / "sweep"
        command = [sys.executable, "-m", "accelopt_ray", "sweep", "run", str(SWEEP), "--output", str(output)]
        started = time.monotonic()
        subprocess.run([*command, "--slots", str(arguments.slots)], check=True)
        sweep_s = time.monotonic() - started
        driver_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        jobs = evaluated_jobs(output)
    started = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.slots, mp_context=spawn) as workers:
        list(workers.map(_run, jobs))
    bare_s = time.monotonic() - started
    ratio = sweep_s / bare_s
    print(f"{len(jobs)} evaluations on {arguments.slots} slots: sweep {sweep_s:.1f} s, alone {bare_s:.1f} s")
    print(f"ratio {ratio:.2f} (at most {TARGET_RATIO}), largest process {driver_mib:.0f} MiB")
    return 0 if ratio <= TARGET_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
