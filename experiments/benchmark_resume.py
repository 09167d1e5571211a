"""Measures resuming: kills real runs at random moments, many times over, and compares them with an undisturbed one.

    python -m experiments.benchmark_resume --kills 50

Each trial starts a run at a reduced shape, kills something outright at a random moment, takes the run up again until it
ends, and then asks: is the hash of the trajectory that of the undisturbed run, and was any journalled reply asked for,
or any finished evaluation made, once more?

Starting a cluster takes longer than such a run, so there are three kinds of trials. In most, driver, recorder and
memory live in one process, as they do in a sweep; evaluations take a moment and are answered from the undisturbed run,
and that process is killed (``process``). In others the run has actors of its own on a cluster that outlives it, and
evaluates on the simulator; killed are the ``driver``, the ``recorder``, one ``profiler``, all ``profilers`` or all of
them at once (``actors``). The last ones start ``accelopt-ray optimize`` and ``resume`` with a cluster of their own, of
which the ``command`` alone or every process (``machine``) is killed. After some of the kills, the newest file of the
trajectory is also cut short (``+torn``), as a disk may do that acknowledges what it has not written.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import ray

from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.config import RunConfig, load_config
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.evaluation.store import STORE_VARIABLE
from accelopt_ray.rewrite.server import start_background
from accelopt_ray.search.restore import stored_run_id
from accelopt_ray.trajectory import read_table, trajectory_digest
from actors.cluster import Cluster, connected
from actors.driver import Edits, SearchDriver
from actors.host import InProcess
from actors.memory import Memory
from actors.recorder import Recorder
from actors.run import Run, RunFailedError, start_run

TASK = "silu"
SHAPE = {"M": 256, "N": 2048}
SIZES = {"iterations": 3, "beam_width": 2, "plans_per_candidate": 3, "attempts_per_plan": 1}
OPTIONS = ("--shape", "M=256", "--shape", "N=2048", "-T", "3", "-B", "2", "-N", "3", "-K", "1")
MOST_SESSIONS = 5
MOST_MINUTES = 20.0

_ACTORS = {
    "driver": ("ray::SearchDriver",),
    "recorder": ("ray::Recorder",),
    "profiler": ("ray::Profiler",),
    "profilers": ("ray::Profiler",),
    "actors": ("ray::SearchDriver", "ray::Recorder", "ray::Profiler", "ray::Memory"),
}
_ACTORS_SHARE = 0.12
_COMMAND_SHARE = 0.08
_AT_ONCE = 6
_EVALUATION_S = (0.05, 0.3)
_TORN_SHARE = 0.3
_RUN_ID = "run"


@dataclass(frozen=True)
class Journal:
    """What a run has on disk: finished calls and evaluations."""

    calls: frozenset[str]
    evaluations: frozenset[str]


@dataclass(frozen=True)
class Trial:
    """One killed run.

    Attributes:
        victim: What was killed, and whether a file was cut short.
        parts: After how many writes.
        sessions: How often the run was started or taken up.
        equal: Whether its trajectory is that of the undisturbed run.
        repeated: Journalled replies and finished evaluations that were asked for once more.
        lost_calls: Calls in flight at the kill.
        wall_s: How long it took.
    """

    victim: str
    parts: int
    sessions: int
    equal: bool
    repeated: int
    lost_calls: int
    wall_s: float


@dataclass(frozen=True)
class Kill:
    """When and what to kill.

    Attributes:
        victim: ``process``, a key of :data:`_ACTORS`, ``command`` or ``machine``.
        torn: Whether the newest file is cut short afterwards.
        parts: After how many writes: a moment of the run, not of the clock, since machines are busy.
        delay_s: So long after that, which makes it fall between writes, too.
        kept: Share of the newest file that stays if it is cut short.
    """

    victim: str
    torn: bool
    parts: int
    delay_s: float
    kept: float

    @classmethod
    def drawn(cls, draw: random.Random, victims: list[str], parts: int) -> Kill:
        """Draws one."""
        victim, torn = draw.choice(victims), draw.random() < _TORN_SHARE
        # After lost profilers the run goes on, and its files are not to be touched.
        torn = torn and not victim.startswith("profiler")
        return cls(victim, torn, draw.randrange(parts), draw.uniform(0.0, 0.3), draw.random())


def main() -> int:
    """Runs the trials and prints one line each, then the sum; exits with 1 if one differs or time runs out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of files that were cut short
    os.environ[STORE_VARIABLE] = "off"  # or earlier runs' evaluations would make the kills miss most of a run
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        trials = list(_trials(Path(name), arguments.kills, random.Random(arguments.seed)))
    minutes = (time.monotonic() - started) / 60
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_minutes = sum(each.ru_utime + each.ru_stime for each in spent) / 60
    equal = sum(trial.equal for trial in trials)
    repeated = sum(trial.repeated for trial in trials)
    taken_up = sum(trial.sessions > 1 for trial in trials)
    print(
        f"{equal} of {len(trials)} equal, {repeated} repeated, {taken_up} had to be taken up, {minutes:.1f} min "
        f"(target: at most {MOST_MINUTES:g}), {cpu_minutes:.1f} CPU min, load {os.getloadavg()[2]:.1f}"
    )
    return 0 if equal == len(trials) and repeated == 0 and minutes <= MOST_MINUTES else 1


def _trials(folder: Path, kills: int, draw: random.Random) -> Iterator[Trial]:
    commands, on_actors = round(kills * _COMMAND_SHARE), round(kills * _ACTORS_SHARE)
    outputs = (folder / f"run-{number}" for number in range(kills))
    whole = folder / "whole"
    with connected(os.cpu_count()) as cluster:
        start_run(_config(whole), _RUN_ID, cluster).result()
    parts, expected = _parts(whole), trajectory_digest(whole, _RUN_ID)
    with start_background() as server, ThreadPoolExecutor(_AT_ONCE) as pool:
        session = _Session(whole, ModelEndpoint(server.base_url, server.model, max_in_flight=16))
        session.start(folder / "alone").join()
        # Fewer writes, since more rows are ready when one is made.
        parts_alone = _parts(folder / "alone")
        print(f"undisturbed: {parts} writes, {parts_alone} of one process, digest {expected[:12]}", flush=True)
        alone = [
            (next(outputs), Kill.drawn(draw, ["process"], parts_alone)) for _ in range(kills - on_actors - commands)
        ]
        yield from pool.map(lambda each: _shown(_trial_of_process(session, each[0], each[1], expected)), alone)
        commanded = [(next(outputs), Kill.drawn(draw, ["command", "machine"], parts)) for _ in range(commands)]
        yield from pool.map(lambda each: _shown(_trial_of_command(each[0], each[1], expected)), commanded)
    with connected(os.cpu_count()) as cluster:
        for output in outputs:
            yield _shown(_trial_on(cluster, output, Kill.drawn(draw, list(_ACTORS), parts), expected))


def _shown(trial: Trial) -> Trial:
    print(
        f"{trial.victim:<14} killed after {trial.parts:>3} writes  "
        f"{'equal' if trial.equal else 'DIFFERENT'}  repeated {trial.repeated}  lost {trial.lost_calls}  "
        f"sessions {trial.sessions}  {trial.wall_s:.1f} s",
        flush=True,
    )
    return trial


class _Answers:
    """A pool that answers from an earlier run's results, after a moment."""

    def __init__(self, whole: Path) -> None:
        rows = read_table(whole, "results", _RUN_ID, columns=["evaluation_id", "result_json"]).to_pylist()
        self._results = {row["evaluation_id"]: EvaluationResult.from_json(row["result_json"]) for row in rows}

    async def start(self) -> None:
        """There is nothing to start."""

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        await asyncio.sleep(random.uniform(*_EVALUATION_S))
        return self._results[job.evaluation_id]

    async def close(self) -> None:
        """There is nothing to close."""


def _run_in_this_process(output: Path, whole: Path, rewriter: ModelEndpoint) -> None:
    """One session of a run, with driver, recorder and memory in one process."""
    warnings.simplefilter("ignore")

    async def session() -> None:
        config = _config(output)
        settings = config.search_settings()
        recorder = InProcess(Recorder(str(output / "trajectory"), _RUN_ID))
        memory = InProcess(Memory(settings.memory_rule, settings.memory_capacity))
        edits: Edits | None = {} if stored_run_id(output) else None
        driver = SearchDriver(config, _RUN_ID, recorder, memory, lambda: _Answers(whole), edits, rewriter)
        await driver.run()

    asyncio.run(session())


class _Session:
    """Starts sessions of runs as one process each."""

    def __init__(self, whole: Path, rewriter: ModelEndpoint) -> None:
        self._whole = whole
        self._rewriter = rewriter
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__, "accelopt_ray.search.loop", "accelopt_ray.agents.client"])

    def start(self, output: Path) -> BaseProcess:
        """Starts a run, or takes it up."""
        process = self._context.Process(target=_run_in_this_process, args=(output, self._whole, self._rewriter))
        process.start()
        return process


def _trial_of_process(session: _Session, output: Path, kill: Kill, expected: str) -> Trial:
    """Kills the one process of a run."""
    started = time.monotonic()
    process = session.start(output)
    _wait_for(kill, output, lambda: not process.is_alive())
    process.kill()
    process.join()
    ended, sessions = process.exitcode == 0, 1
    journal = _after_the_kill(output, kill, ended)
    while not ended:
        if sessions == MOST_SESSIONS:
            raise RuntimeError(f"{output} does not come to an end; see {output / 'logs'}")
        process = session.start(output)
        process.join()
        ended, sessions = process.exitcode == 0, sessions + 1
    return _judged(kill, output, sessions, journal, expected, time.monotonic() - started)


def _trial_on(cluster: Cluster, output: Path, kill: Kill, expected: str) -> Trial:
    """Kills a run's actors on a cluster that stays."""
    started = time.monotonic()
    config = _config(output)
    run = start_run(config, _RUN_ID, cluster)
    _wait_for(kill, output, lambda: bool(ray.wait([run.finished], timeout=0)[0]))
    _kill_actors(_ACTORS[kill.victim], 1 if kill.victim == "profiler" else None)
    fault, sessions = _fault(run), 1
    journal = _after_the_kill(output, kill, not fault)
    while fault:
        if sessions == MOST_SESSIONS:
            raise RuntimeError(f"{output} does not come to an end: {fault}")
        fault = _fault(start_run(config, _RUN_ID, cluster, edits={} if stored_run_id(output) else None))
        sessions += 1
    return _judged(kill, output, sessions, journal, expected, time.monotonic() - started)


def _fault(run: Run) -> str:
    """Why a run did not come to its end, or nothing; what is left of one that did not is cleared away."""
    try:
        run.result()
    except RunFailedError as error:
        ray.kill(run.driver)
        ray.kill(run.recorder)
        return str(error)
    return ""


def _trial_of_command(output: Path, kill: Kill, expected: str) -> Trial:
    """Kills the command or all of its processes; its cluster goes with it."""
    started = time.monotonic()
    process = _start(output.parent, "optimize", TASK, *OPTIONS, "-o", str(output))
    _wait_for(kill, output, lambda: process.poll() is not None)
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    for each in family if kill.victim == "machine" else ():
        _kill(each)
    sessions, code = 1, process.wait()
    psutil.wait_procs(family, timeout=30)
    journal = _after_the_kill(output, kill, code == 0)
    while code != 0:
        if sessions == MOST_SESSIONS:
            raise RuntimeError(f"{output} does not come to an end; see {output / 'logs'}")
        if (output / "config.yaml").is_file():
            arguments = ["resume", str(output)]
        else:
            output = output.with_name(f"{output.name}-again") if output.exists() else output
            arguments = ["optimize", TASK, *OPTIONS, "-o", str(output)]
        process = _start(output.parent, *arguments)
        sessions, code = sessions + 1, process.wait()
    return _judged(kill, output, sessions, journal, expected, time.monotonic() - started)


def _start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "accelopt_ray", *arguments]
    environment = {**os.environ, "HOME": str(folder)}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def _config(output: Path) -> RunConfig:
    return load_config(None, {"task": TASK, "shape": SHAPE, "search": SIZES, "output": str(output)})


def _wait_for(kill: Kill, output: Path, ended: Callable[[], bool]) -> None:
    while _parts(output) < kill.parts and not ended():
        time.sleep(0.01)
    time.sleep(kill.delay_s)


def _kill_actors(names: tuple[str, ...], most: int | None) -> None:
    left = most
    for process in psutil.Process().children(recursive=True):
        if left == 0:
            return
        try:
            title = (process.cmdline() or [""])[0]
        except psutil.Error:
            continue
        if title.startswith(names):
            _kill(process)
            left = None if left is None else left - 1


def _kill(process: psutil.Process) -> None:
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.Error:
        return  # it has ended by itself


def _after_the_kill(output: Path, kill: Kill, ended: bool) -> Journal:
    """Cuts the newest file short where that is wanted and the run has not ended, and notes what is on disk."""
    files = sorted(_part_files(output), key=lambda path: path.stat().st_mtime_ns)
    if kill.torn and files and not ended:
        os.truncate(files[-1], int(files[-1].stat().st_size * kill.kept))
    run_id = stored_run_id(output)
    if run_id is None:
        return Journal(frozenset(), frozenset())
    calls = read_table(output, "llm_calls", run_id, columns=["call_id", "outcome"]).to_pylist()
    results = read_table(output, "results", run_id, columns=["evaluation_id"])
    return Journal(
        frozenset(row["call_id"] for row in calls if row["outcome"] not in ("lost", "error")),
        frozenset(results["evaluation_id"].to_pylist()),
    )


def _judged(kill: Kill, output: Path, sessions: int, journal: Journal, expected: str, wall_s: float) -> Trial:
    run_id = stored_run_id(output)
    if run_id is None:
        raise RuntimeError(f"{output} holds no run")
    calls = read_table(output, "llm_calls", run_id, columns=["call_id", "outcome"]).to_pylist()
    answered = Counter(row["call_id"] for row in calls if row["outcome"] not in ("lost", "error"))
    evaluated = Counter(read_table(output, "results", run_id, columns=["evaluation_id"])["evaluation_id"].to_pylist())
    starts = read_table(output, "call_starts", run_id, columns=["call_id", "asking"]).to_pylist()
    asked_again = {row["call_id"] for row in starts if row["asking"]} & journal.calls
    missing = journal.evaluations - set(evaluated)
    repeated = sum(count - 1 for count in [*answered.values(), *evaluated.values()]) + len(asked_again) + len(missing)
    lost = sum(row["outcome"] == "lost" for row in calls)
    victim = f"{kill.victim}{'+torn' if kill.torn else ''}"
    return Trial(victim, kill.parts, sessions, trajectory_digest(output, run_id) == expected, repeated, lost, wall_s)


def _parts(output: Path) -> int:
    return sum(1 for _ in _part_files(output))


def _part_files(output: Path) -> Iterator[Path]:
    return output.glob("trajectory/*/*/part-*")


if __name__ == "__main__":
    sys.exit(main())
