"""Measures what the machinery of sweeps costs: ``python -m experiments.benchmark_sweep``.

Starts a Ray head, submits ``presets.yaml`` at its small scale (24 runs) as a job, then makes exactly the evaluations
that the sweep has made (the first or the rest of a kernel's check) on as many processes, with nothing around them, and
compares the two, in wall-clock time and in CPU time of the whole machine, which ought to be idle otherwise. Results of
earlier runs are not used. Prints the memory of the processes over time as well.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import evaluate
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult, TaskRef
from accelopt_ray.search.identifiers import Identifiers
from accelopt_ray.sweep.file import load_sweep
from accelopt_ray.trajectory import read_table
from accelopt_ray.verify.references import ReferenceCache

SWEEP = Path(__file__).with_name("presets.yaml")
TARGET_RATIO = 1.15
TARGET_GROWTH_MIB = 16

_SAMPLED_S = 2.0
_START_S = 120.0
_ROLES = {"accelopt_ray sweep run": "sweep", "ray::RunHost": "runs", "ray::PoolHost": "pool"}
"""What the processes are called that live as long as the sweep, by a part of their command line."""


@functools.cache
def _references() -> ReferenceCache:
    """One cache for each worker process."""
    return ReferenceCache()


def _run(job: EvaluationJob) -> str:
    return str(evaluate(job, get_device(job.device), _references()).outcome)


def evaluated_jobs(output: Path) -> list[EvaluationJob]:
    """What a sweep has evaluated, in the order of the results; duplicates were not evaluated."""
    jobs = []
    for run in load_sweep(SWEEP).runs:
        folder = output / run.name
        sources = {row["source_sha256"]: row["source"] for row in read_table(folder, "sources").to_pylist()}
        candidates = read_table(folder, "evaluations").to_pylist()
        source_of = {row["evaluation_id"]: sources[row["source_sha256"]] for row in candidates if row["source_sha256"]}
        [task] = run.config.load_tasks()
        reference = TaskRef(task.location, tuple(run.config.shape.items()))
        for row in read_table(folder, "results").to_pylist():
            result = EvaluationResult.from_json(row["result_json"])
            source = source_of.get(row["evaluation_id"].removesuffix(Identifiers.rest("")))
            if source is not None and not result.answered_from:
                stage, config = result.check_stage, run.config
                job = EvaluationJob(row["evaluation_id"], reference, source, config.device, config.check, stage=stage)
                jobs.append(job)
    return jobs


@dataclass
class Watch:
    """Memory of a process and all that descend from it, sampled until told to end.

    Attributes:
        memory_mib: Time and resident MiB of each sample, by role.
    """

    root: psutil.Process
    memory_mib: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    _end: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Samples until :meth:`stop`."""
        started = time.monotonic()
        while not self._end.wait(_SAMPLED_S):
            self._sample(self.root, time.monotonic() - started)

    def stop(self) -> None:
        """Ends the sampling."""
        self._end.set()

    def _sample(self, process: psutil.Process, elapsed_s: float) -> None:
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            for part, role in _ROLES.items():
                if part in command:
                    resident = process.memory_info().rss / 2**20
                    self.memory_mib.setdefault(role, []).append((elapsed_s, resident))
            for child in process.children():
                self._sample(child, elapsed_s)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def _head(cpus: int, log: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Starts a Ray head with a dashboard; yields its process and the dashboard's address."""
    dashboard_port = _free_port()
    options = {
        "port": _free_port(), "dashboard-port": dashboard_port, "dashboard-agent-listen-port": _free_port(),
        "metrics-export-port": _free_port(), "ray-client-server-port": _free_port(), "num-cpus": cpus,
        "object-store-memory": 200 << 20,
    }  # fmt: skip
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{name}={value}" for name, value in options.items()]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "RAY_memory_monitor_refresh_ms": "0"}
    with log.open("wb") as stream:
        head = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
    process = psutil.Process(head.pid)
    address = f"http://127.0.0.1:{dashboard_port}"
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                urllib.request.urlopen(f"{address}/api/version", timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                if head.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the Ray head did not start: {log.read_text()}") from None
                time.sleep(0.5)
        yield process, address
    finally:
        family = process.children(recursive=True)
        head.send_signal(signal.SIGTERM)
        for each in psutil.wait_procs(family, timeout=15)[1]:
            each.kill()
        head.kill()
        head.wait()


def _submitted(slots: int, folder: Path) -> tuple[float, Watch]:
    """Submits the sweep and follows it to its end; returns the seconds from submission to end."""
    with _head(slots, folder / "head.log") as (head, address):
        watch = Watch(head)
        sampling = threading.Thread(target=watch.run)
        command = [sys.executable, "-m", "accelopt_ray", "sweep", "submit", str(SWEEP), "--address", address]
        started = time.monotonic()
        sampling.start()
        try:
            subprocess.run([*command, "--output", str(folder / "sweep")], check=True)
            return time.monotonic() - started, watch
        finally:
            watch.stop()
            sampling.join()


def _alone(jobs: list[EvaluationJob], slots: int) -> float:
    """Evaluates with nothing around it; returns the seconds it took."""
    started = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(slots, mp_context=spawn) as workers:
        list(workers.map(_run, jobs))
    return time.monotonic() - started


def _machine_cpu_s() -> float:
    """CPU seconds of all processes so far; those of evaluations live too briefly to be counted one by one."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def main() -> int:
    """Prints times, their ratio and memory; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=2, help="evaluations at once")
    slots = parser.parse_args().slots
    os.environ |= {"ACCELOPT_RAY_STORE": "off", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="accelopt-ray-") as name:
        before = _machine_cpu_s()
        sweep_s, watch = _submitted(slots, Path(name))
        sweep_cpu_s = _machine_cpu_s() - before
        jobs = evaluated_jobs(Path(name) / "sweep")
    before = _machine_cpu_s()
    alone_s = _alone(jobs, slots)
    alone_cpu_s = _machine_cpu_s() - before
    print(f"\n{len(jobs)} evaluations on {slots} slots, load {load:.0f} before, {os.getloadavg()[0]:.0f} after")
    print(f"wall-clock   sweep as a job {sweep_s:7.1f} s, alone {alone_s:7.1f} s, ratio {sweep_s / alone_s:.2f}")
    print(f"CPU          sweep as a job {sweep_cpu_s:7.1f} s, alone {alone_cpu_s:7.1f} s")
    print(f"target       ratio of wall-clock times at most {TARGET_RATIO} on an idle machine")
    print("memory MiB   at 25 %, 50 %, 75 % and 100 % of the time")
    flat = True
    for role, found in watch.memory_mib.items():
        samples = found[:-1] or found  # the last may have caught it as it ended
        quarters = [samples[min(len(samples) - 1, len(samples) * part // 4)][1] for part in (1, 2, 3, 4)]
        print(f"  {role:<10} {', '.join(f'{each:.0f}' for each in quarters)}")
        flat &= quarters[3] - quarters[1] <= TARGET_GROWTH_MIB
    print(f"target       at most {TARGET_GROWTH_MIB} MiB more in the second half")
    return 0 if sweep_s / alone_s <= TARGET_RATIO and flat else 1


if __name__ == "__main__":
    sys.exit(main())
