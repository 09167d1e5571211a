"""Measures what correctness checks cost at full shape: ``python -m experiments.benchmark_checks [TASK...]``.

For each task's baseline, with references ready: CPU seconds under ``published`` with one and with five seeds and under
``strict``, and what the strict references take in the cache. CPU time, unlike time on the clock, hardly depends on what
else the machine does. Prints measured values beside their targets and exits with 1 if one is missed. The first run
computes the references, which takes many times longer than what is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from accelopt_ray.devices.protocol import Limits
from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import evaluate
from accelopt_ray.evaluation.records import EvaluationJob, TaskRef
from accelopt_ray.verify.references import DEFAULT_CAP_BYTES, ReferenceCache
from accelopt_ray.verify.strict import StrictCheck
from nkibench.task import Task, list_tasks, load_task

DEVICE = "sim-trn1"
PUBLISHED_SEEDS = 5
MOST_TIMES_PUBLISHED = 3.0


@contextmanager
def cpu_seconds() -> Iterator[list[float]]:
    """Adds up user and system time of this process and all it starts, sampled; yields a list that holds it afterwards.

    Evaluations run in grandchildren that nobody waits for in the operating system's sense, so its own accounting of
    children does not see them. What a process does after its last sample, some 20 ms, is missed.
    """
    total, done, seen = [0.0], threading.Event(), dict[tuple[int, float], float]()
    me = psutil.Process()

    def sample() -> None:
        for process in me.children(recursive=True):
            try:
                spent = process.cpu_times()
                seen[process.pid, process.create_time()] = spent.user + spent.system
            except psutil.Error:  # it has ended meanwhile
                continue

    def keep_sampling() -> None:
        while not done.wait(0.02):
            sample()
        total[0] -= time.thread_time()

    sample()
    before, began = dict(seen), time.process_time()
    thread = threading.Thread(target=keep_sampling)
    thread.start()
    try:
        yield total
    finally:
        done.set()
        thread.join()
        total[0] += time.process_time() - began
        total[0] += sum(spent - before.get(identity, 0.0) for identity, spent in seen.items())


def references_bytes(task: Task, cache: ReferenceCache) -> int:
    """Builds the strict check's references where they are missing, and returns the bytes of their files."""
    files: dict[Path, int] = {}
    for trial in StrictCheck().trials(task, (), cache, repeatable=True):
        with cache.use(task, trial.seed, trial.distribution, trial.whole, trial.accuracy) as reference:
            inputs = [path for path in reference.kernel_inputs if isinstance(path, Path)]
            folders = {path.parent for path in inputs if path.is_relative_to(cache.folder)}
            folders |= {output.path.parent for output in reference.outputs}
            files |= {path: path.stat().st_size for folder in folders for path in folder.iterdir()}
    return sum(files.values())


def measure(name: str, cache: ReferenceCache) -> dict[str, float]:
    """Evaluates a task's baseline under both checks."""
    task, device = load_task(name), get_device(DEVICE)
    with cache.use(task, 0):
        size_bytes = references_bytes(task, cache)
    measured: dict[str, float] = {"references_bytes": size_bytes}
    # The same seed several times costs what several seeds cost and needs one reference.
    for label, check, seeds in (
        ("published_1", "published", (0,)),
        ("published_5", "published", (0,) * PUBLISHED_SEEDS),
        ("strict", "strict", ()),
    ):
        job = EvaluationJob(name, TaskRef(name), task.baseline_source(), DEVICE, check, seeds, limits=Limits(1800.0))
        started = time.perf_counter()
        with cpu_seconds() as spent_s:
            result = evaluate(job, device, cache)
        if not result.correct:
            raise SystemExit(f"{name}: {result.outcome} {result.reason}: {result.error_text}")
        measured |= {f"{label}_cpu_s": spent_s[0], f"{label}_s": time.perf_counter() - started}
    return measured


def main() -> int:
    """Runs the measurement, a process for each task, and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=list_tasks())
    parser.add_argument("--one", action="store_true", help="measure one task in this process and print JSON")
    parser.add_argument("--cap-gib", type=float, default=DEFAULT_CAP_BYTES / (1 << 30), help="size cap of the cache")
    arguments = parser.parse_args()
    cache = ReferenceCache(cap_bytes=int(arguments.cap_gib * (1 << 30)))
    if arguments.one:
        print(json.dumps(measure(arguments.tasks[0], cache)))
        return 0
    columns = ("task", "published", "5 seeds", "strict", "strict / 5 seeds", "references")
    print("{:<24} {:>10} {:>10} {:>10} {:>17} {:>12}".format(*columns))
    total: dict[str, float] = {}
    missed = False
    for name in arguments.tasks:
        command = [sys.executable, "-m", "experiments.benchmark_checks", "--one", name]
        command += ["--cap-gib", str(arguments.cap_gib)]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
        if answer.returncode:
            print(answer.stderr.strip() or f"{name}: ended by signal {-answer.returncode}")
            return 1
        measured = json.loads(answer.stdout)
        missed |= _print(name, measured)
        total = {key: total.get(key, 0.0) + value for key, value in measured.items()}
    missed |= _print("all", total)
    print(f"CPU seconds; strict may cost {MOST_TIMES_PUBLISHED:g} times five seeds: {'MISSED' if missed else 'met'}")
    return int(missed)


def _print(name: str, measured: dict[str, float]) -> bool:
    times = measured["strict_cpu_s"] / measured["published_5_cpu_s"]
    print(
        f"{name:<24} {measured['published_1_cpu_s']:>10.1f} {measured['published_5_cpu_s']:>10.1f} "
        f"{measured['strict_cpu_s']:>10.1f} {times:>17.2f} {measured['references_bytes'] / 1e9:>9.2f} GB",
        flush=True,
    )
    return times > MOST_TIMES_PUBLISHED


if __name__ == "__main__":
    sys.exit(main())
