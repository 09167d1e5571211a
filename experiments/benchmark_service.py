"""Measures the profiling service on this machine: ``python -m experiments.benchmark_service [PART ...]``.

``noop``: evaluations whose stages return at once, through compile pool, run pool, recorder and Parquet.
``occupancy``: stand-in stages of realistic length, scaled down in time, with and without compile workers.
``hostile``: kernels that misbehave, on the simulator, among kernels that do not.
``node-death``: one of two nodes is killed under load; every evaluation has to end exactly once.

Prints measured values beside their targets and ends with 1 if one is missed; timings depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster as LocalNodes

from accelopt_ray.devices.protocol import Artifact, Limits
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult, TaskRef
from accelopt_ray.evaluation.store import STORE_VARIABLE
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.search.rows import result_row
from actors.cluster import connected, places_of
from actors.compile_pool import CompilePool, start_compiler
from actors.pool import ProfilerPool
from actors.pool_state import SlotState
from actors.profiler import Compiled, Evaluator, device_evaluator, start_profiler
from actors.recorder import Recorder
from nkibench.task import load_task

_IN_FLIGHT = 64
_SLOTS = 2

# Seconds on a device (compile 8 ± 6, run 2), and how much shorter they are here.
_COMPILE_S = (8.0, 6.0)
_RUN_S = 2.0
_TIME_SCALE = 0.1
_COMPILERS = 10

_HOSTILE = {
    "hang": "while True: pass",
    "fork bomb": "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(60)",
    "memory": "keep = []\nwhile True: keep.append(b'x' * (1 << 24))",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "exit without result": "import os; os._exit(0)",
    "flood": "while True: print('x' * 100_000)",
    "kill the parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "delete files": "import os\nfor name in os.listdir(MARKERS): os.unlink(os.path.join(MARKERS, name))",
    "ignore signals": (
        "import signal, time\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: time.sleep(1)"
    ),
    "leave grandchildren": (
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: pass"
    ),
}
_HOSTILE_LIMITS = Limits(timeout_s=5.0, memory_bytes=1 << 30)


_MISSED: list[str] = []


def promised(what: str, met: bool) -> None:
    """Prints whether a target is met."""
    print(f"  {'met' if met else 'MISSED'}: {what}", flush=True)
    if not met:
        _MISSED.append(what)


class StandIn:
    """An evaluator whose stages only take time, which the job's source says: seconds to compile, seconds to run."""

    def compile(self, job: EvaluationJob) -> Compiled:
        """Takes the first number of seconds."""
        _sleep(float(job.source.split()[0]))
        return Artifact("stand-in", b"")

    def __call__(self, job: EvaluationJob, compiled: Compiled | None = None) -> EvaluationResult:
        """Takes the second number of seconds, and the first as well if nobody has compiled."""
        if compiled is None:
            self.compile(job)
        started = time.perf_counter()
        _sleep(float(job.source.split()[1]))
        return EvaluationResult(
            job.evaluation_id, EvaluationOutcome.CORRECT, latency_ms=1.0, run_s=time.perf_counter() - started
        )


def make_stand_in() -> Evaluator:
    """Made in the workers."""
    return StandIn()


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def stand_in_pool(compilers: int) -> ProfilerPool:
    """A pool of stand-in slots, with so many compile workers."""
    start = partial(start_profiler, make_stand_in, False)
    compiler = partial(start_compiler, make_stand_in, 0)
    ahead = CompilePool([compiler() for _ in range(compilers)], compiler) if compilers else None
    return ProfilerPool([start(slot) for slot in range(_SLOTS)], start, compilers=ahead)


def job(number: int, source: str, limits: Limits | None = None) -> EvaluationJob:
    """An evaluation of a small task."""
    task = load_task("silu")
    reference = TaskRef("silu", tuple(task.reduced.items()))
    return EvaluationJob(
        f"e{number}", reference, source, "sim-trn1", "published", (0,), limits or Limits(), "fp32", "silu"
    )


async def measure_noop(counts: list[int]) -> None:
    """Evaluations a second, for growing numbers of them in one run's folder."""
    with tempfile.TemporaryDirectory() as folder:
        recorder = ray.remote(Recorder).options(num_cpus=0, max_concurrency=1000).remote(folder, "benchmark")
        await recorder.lock.remote()
        pool = stand_in_pool(compilers=1)
        await pool.start()
        numbers = itertools.count()
        empty = job(0, "0 0")

        async def worker(end: int) -> None:
            for number in numbers:
                if number >= end:
                    return
                each = EvaluationJob(**{**vars(empty), "evaluation_id": f"e{number}"})
                result = await pool.evaluate(each)
                await recorder.commit.remote("results", [result_row(each, result)])

        done = 0
        each_s = []
        for count in counts:
            numbers = itertools.count(done)
            started = time.perf_counter()
            await asyncio.gather(*(worker(done + count) for _ in range(_IN_FLIGHT)))
            spent_s = time.perf_counter() - started
            done += count
            each_s.append(spent_s / count)
            print(
                f"no-op: {count:6d} evaluations, {count / spent_s:7.1f} a second, {spent_s / count * 1e3:.2f} ms each",
                flush=True,
            )
        promised("no-op: at least 200 a second", 1 / min(each_s) >= 200)
        promised(
            "no-op: the last batch takes at most 1.5 times what the first does, each", each_s[-1] <= 1.5 * each_s[0]
        )
        await recorder.close.remote()
        await pool.close()
        ray.kill(recorder)


async def measure_occupancy(evaluations: int) -> None:
    """Share of the time that slots run, and throughput against workers that compile and run."""
    chance = random.Random(0)
    lengths = [max(1.0, chance.gauss(*_COMPILE_S)) for _ in range(evaluations)]
    rates = {}
    for compilers in (0, _COMPILERS):
        pool = stand_in_pool(compilers)
        await pool.start()
        await asyncio.gather(*(pool.evaluate(job(number, "0 0")) for number in range(4 * max(compilers, _SLOTS))))
        # Without compile workers it takes several times as long; a part is enough.
        jobs = [job(n, f"{s * _TIME_SCALE} {_RUN_S * _TIME_SCALE}") for n, s in enumerate(lengths)]
        jobs = jobs if compilers else jobs[: evaluations // 4]
        started = time.perf_counter()
        results = await asyncio.gather(*(pool.evaluate(each) for each in jobs))
        spent_s = time.perf_counter() - started
        rates[compilers] = len(jobs) / spent_s
        busy = sum(result.run_s for result in results) / (spent_s * _SLOTS)
        print(
            f"occupancy: {compilers:2d} compile workers, {_SLOTS} slots, {len(jobs)} evaluations: slots run "
            f"{busy * 100:.1f} % of the time, {rates[compilers]:.2f} evaluations a second",
            flush=True,
        )
        if compilers:
            promised("occupancy: slots run at least 90 % of the time", busy >= 0.9)
        await pool.close()
    print(f"occupancy: throughput {rates[_COMPILERS] / rates[0]:.2f} times")
    promised("occupancy: throughput of at least 3 times", rates[_COMPILERS] >= 3 * rates[0])


async def measure_hostile(count: int) -> None:
    """What hostile kernels leave behind and whom they hold up."""
    good = load_task("silu").baseline_source()
    start = partial(start_profiler, partial(device_evaluator, "sim-trn1"), False)
    pool = ProfilerPool([start(slot) for slot in range(_SLOTS)], start, rest_s=1.0)
    await pool.start()
    await asyncio.gather(*(pool.evaluate(job(number, good)) for number in range(2 * _SLOTS)))
    before = _processes()
    marker = Path(tempfile.mkdtemp(prefix="accelopt-ray-benchmark-")) / "kept"
    marker.write_text("kept")
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in _HOSTILE}
    longest_s = 0.0
    numbers = iter(range(count))

    async def client() -> None:
        nonlocal longest_s
        for number in numbers:
            name = list(_HOSTILE)[number % len(_HOSTILE)]
            started = time.perf_counter()
            result = await pool.evaluate(
                job(
                    number, attacked(good, _HOSTILE[name].replace("MARKERS", repr(str(marker.parent)))), _HOSTILE_LIMITS
                )
            )
            longest_s = max(longest_s, time.perf_counter() - started - result.queue_s)
            outcomes[name][str(result.outcome)] += 1

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(_SLOTS)))
    spent_s = time.perf_counter() - started
    bystanders = await asyncio.gather(*(pool.evaluate(job(number, good)) for number in range(_SLOTS)))
    await asyncio.sleep(1.0)
    left = _processes() - before
    slots = Counter(str(slot.state) for slot in pool.status().slots)
    for name, counted in outcomes.items():
        print(f"hostile: {name:<20} {dict(counted)}")
    print(
        f"hostile: {count} kernels in {spent_s:.0f} s; processes left {len(left)}; slots lost "
        f"{_SLOTS - slots[SlotState.IDLE]}; workers lost {pool.statistics.workers_lost}; longest hold of a slot "
        f"{longest_s:.1f} s with a deadline of {_HOSTILE_LIMITS.timeout_s:g} s a stage"
    )
    promised("hostile: no process left", not left)
    promised("hostile: no slot lost", slots[SlotState.IDLE] == _SLOTS)
    promised("hostile: good kernels correct afterwards", all(result.correct for result in bystanders))
    promised("hostile: others' files kept", marker.exists())
    await pool.close()


async def measure_node_death(evaluations: int) -> None:
    """How evaluations end when a node dies under them."""
    nodes = LocalNodes(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "_system_config": {"health_check_period_ms": 500, "health_check_failure_threshold": 3},
        },
    )
    workers = [nodes.add_node(num_cpus=_SLOTS) for _ in range(2)]
    ray.init(address=nodes.address, log_to_driver=False)
    start = partial(start_profiler, make_stand_in, False)
    pool = ProfilerPool([start(slot) for slot in range(2 * _SLOTS)], start, places=partial(places_of, "CPU"))
    await pool.start()
    ended: Counter[str] = Counter()

    async def one(number: int) -> EvaluationResult:
        result = await pool.evaluate(job(number, "0 0.2"))
        ended[result.evaluation_id] += 1
        return result

    started = time.perf_counter()
    tasks = [asyncio.ensure_future(one(number)) for number in range(evaluations)]
    for first in itertools.islice(asyncio.as_completed(tasks), evaluations // 4):
        await first
    await asyncio.to_thread(nodes.remove_node, workers[0], False)
    results = await asyncio.gather(*tasks)
    outcomes = dict(Counter(str(result.outcome) for result in results))
    print(
        f"node-death: {evaluations} evaluations in {time.perf_counter() - started:.1f} s; outcomes {outcomes}; workers "
        f"lost {pool.statistics.workers_lost}; dispatched again {pool.statistics.retried}; slots "
        f"{dict(Counter(str(slot.state) for slot in pool.status().slots))}"
    )
    once = len(ended) == evaluations and set(ended.values()) == {1}
    promised("node-death: every evaluation ended exactly once", once)
    promised("node-death: no kernel blamed", set(outcomes) == {"correct"})
    promised("node-death: workers were lost indeed", pool.statistics.workers_lost > 0)
    await pool.close()
    ray.shutdown()
    nodes.shutdown()


def attacked(source: str, attack: str) -> str:
    """A kernel with an attack at the start of its body."""
    lines = source.splitlines()
    head = next(index for index, line in enumerate(lines) if line.startswith("def kernel("))
    body = next(index for index in range(head, len(lines)) if lines[index].rstrip().endswith(":")) + 1
    return "\n".join([*lines[:body], *textwrap.indent(attack, "    ").splitlines(), *lines[body:]]) + "\n"


def _processes() -> set[int]:
    """All living processes below this user's Ray workers that are no workers themselves."""
    return set(_descendants(psutil.Process()))


def _descendants(process: psutil.Process) -> Iterator[int]:
    for child in process.children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE and not child.name().startswith(
                ("ray::", "raylet", "gcs_server")
            ):
                yield child.pid
        except psutil.NoSuchProcess:
            continue


def main() -> int:
    """Runs the parts that were named, or all; returns 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["noop", "occupancy", "hostile", "node-death", []])
    parser.add_argument("--noop-counts", type=int, nargs="+", default=[100, 1000, 5000, 20000])
    parser.add_argument("--occupancy-evaluations", type=int, default=120)
    parser.add_argument("--hostile-kernels", type=int, default=200)
    arguments = parser.parse_args()
    parts = arguments.parts or ["noop", "occupancy", "hostile", "node-death"]
    os.environ[STORE_VARIABLE] = "off"
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    local = {
        "noop": partial(measure_noop, arguments.noop_counts),
        "occupancy": partial(measure_occupancy, arguments.occupancy_evaluations),
        "hostile": partial(measure_hostile, arguments.hostile_kernels),
    }
    for name, measure in local.items():
        if name in parts:
            with connected(cpus=_SLOTS):
                asyncio.run(measure())
    if "node-death" in parts:
        asyncio.run(measure_node_death(100))
    return 1 if _MISSED else 0


if __name__ == "__main__":
    sys.exit(main())
