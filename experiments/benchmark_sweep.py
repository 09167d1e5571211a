"""Measures what the machinery of sweeps costs: ``python -m experiments.benchmark_sweep``.

Starts a Ray head, submits ``presets.yaml`` at its small scale (24 runs) as a job, then makes exactly the evaluations
that the sweep has made (the first or the rest of a kernel's check) on as many processes, with nothing around them, and
compares the two, in wall-clock time and in CPU time of the whole machine, which ought to be idle otherwise. The offline
rewriter shares the machine with the sweep, as a language model would not; so a third time is that of the evaluations
while another process answers the sweep's prompts once more. Results of earlier runs are not used. Prints the memory of
the processes over time as well.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import evaluate
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult, TaskRef
from accelopt_ray.rewrite.server import ChatRequest, complete
from accelopt_ray.search.identifiers import Identifiers
from accelopt_ray.sweep.file import load_sweep
from accelopt_ray.trajectory import read_table
from accelopt_ray.verify.references import ReferenceCache

SWEEP = Path(__file__).with_name("presets.yaml")
TARGET_RATIO = 1.15
TARGET_GROWTH_MIB = 16

_SAMPLED_S = 5.0
_START_S = 120.0
_Result = TypeVar("_Result")
_ROLES = {"-m accelopt_ray sweep run": "sweep", "ray::RunHost": "runs", "ray::PoolHost": "pool"}
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


def answered_prompts(output: Path) -> list[ChatRequest]:
    """What a sweep has asked the rewriter."""
    asked = []
    for run in load_sweep(SWEEP).runs:
        rows = read_table(output / run.name, "llm_calls").to_pylist()
        systems = {
            row["system_prompt_sha256"]: row["system_prompt"] for row in rows if row["system_prompt"] is not None
        }
        for row in rows:
            texts = {"system": systems[row["system_prompt_sha256"]], "user": row["user_prompt"]}
            messages = tuple({"role": role, "content": text} for role, text in texts.items())
            asked.append(ChatRequest(messages, 1, row["seed"] or 0, None))
    return asked


def _answer(asked: list[ChatRequest]) -> None:
    for request in asked:
        complete(request)


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
            elapsed_s = time.monotonic() - started
            with suppress(psutil.NoSuchProcess):
                for process in self.root.children(recursive=True):
                    self._sample(process, elapsed_s)

    def stop(self) -> None:
        """Ends the sampling."""
        self._end.set()

    def _sample(self, process: psutil.Process, elapsed_s: float) -> None:
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            for part, role in _ROLES.items():
                if part in command and not command.startswith("/bin/"):  # the shell that waits for it
                    resident = process.memory_info().rss / 2**20
                    self.memory_mib.setdefault(role, []).append((elapsed_s, resident))


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


def _alone(jobs: list[EvaluationJob], slots: int, asked: list[ChatRequest]) -> float:
    """Evaluates with nothing around it but a process that answers prompts; returns the seconds it took."""
    spawn = multiprocessing.get_context("spawn")
    started = time.monotonic()
    with ProcessPoolExecutor(slots, mp_context=spawn) as workers, ProcessPoolExecutor(1, mp_context=spawn) as answering:
        answers = answering.submit(_answer, asked)
        list(workers.map(_run, jobs))
        answers.result()
    return time.monotonic() - started


def _with_cpu_s(work: Callable[[], _Result]) -> tuple[_Result, float]:
    """Also returns the CPU seconds of the whole machine: evaluations live too briefly to be counted one by one."""
    before = psutil.cpu_times()
    result = work()
    after = psutil.cpu_times()
    spent = (getattr(after, name) - getattr(before, name) for name in ("user", "nice", "system"))
    return result, float(sum(spent))


def main() -> int:
    """Prints times, their ratio and memory; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=2, help="evaluations at once")
    slots = parser.parse_args().slots
    os.environ |= {"ACCELOPT_RAY_STORE": "off", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="accelopt-ray-") as name:
        (sweep_s, watch), sweep_cpu_s = _with_cpu_s(lambda: _submitted(slots, Path(name)))
        jobs, asked = evaluated_jobs(Path(name) / "sweep"), answered_prompts(Path(name) / "sweep")
    alone_s, alone_cpu_s = _with_cpu_s(lambda: _alone(jobs, slots, []))
    answered_s, answered_cpu_s = _with_cpu_s(lambda: _alone(jobs, slots, asked))
    ratio = sweep_s / answered_s
    print(f"\n{len(jobs)} evaluations, {len(asked)} answers, {slots} slots, load {load:.0f} before")
    print(f"sweep as a job             {sweep_s:7.1f} s, {sweep_cpu_s:7.1f} s of CPU")
    print(f"evaluations alone          {alone_s:7.1f} s, {alone_cpu_s:7.1f} s of CPU, ratio {sweep_s / alone_s:.2f}")
    print(f"evaluations and answers    {answered_s:7.1f} s, {answered_cpu_s:7.1f} s of CPU, ratio {ratio:.2f}")
    print(f"target       the last ratio at most {TARGET_RATIO} on an idle machine")
    print("memory MiB   at 25 %, 50 %, 75 % and 100 % of the time")
    flat = True
    for role, found in watch.memory_mib.items():
        samples = found[:-1] or found  # the last may have caught it as it ended
        quarters = [samples[min(len(samples) - 1, len(samples) * part // 4)][1] for part in (1, 2, 3, 4)]
        print(f"  {role:<10} {', '.join(f'{each:.0f}' for each in quarters)}")
        flat &= quarters[3] - quarters[1] <= TARGET_GROWTH_MIB
    print(f"target       at most {TARGET_GROWTH_MIB} MiB more in the second half")
    return 0 if ratio <= TARGET_RATIO and flat else 1


if __name__ == "__main__":
    sys.exit(main())
