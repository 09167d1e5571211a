"""Measures resuming: kills a real run at random moments, many times over, and compares it with an undisturbed one.

    python -m experiments.benchmark_resume --kills 50

Each trial starts ``accelopt-ray optimize`` at a reduced shape, sends SIGKILL to its command, to its driver actor or to
a profiler at a random moment, takes the run up again until it ends, and then asks: is the hash of the trajectory that
of the undisturbed run, and was any journalled reply asked for, or any finished evaluation made, once more?
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from accelopt_ray.search.restore import stored_run_id
from accelopt_ray.trajectory import read_table, trajectory_digest

SIZES = ("--shape", "M=256", "--shape", "N=2048", "-T", "3", "-B", "2", "-N", "3", "-K", "1")
TASK = "silu"
VICTIMS = ("command", "driver", "profiler")
_PROCESS_NAMES = {"driver": "ray::SearchDriver", "profiler": "ray::Profiler"}


@dataclass(frozen=True)
class Trial:
    """One killed run.

    Attributes:
        victim: Which process was killed.
        parts: After how many writes.
        sessions: How often the run was started or taken up.
        equal: Whether its trajectory is that of the undisturbed run.
        repeated: Journalled replies and finished evaluations that were asked for once more.
        lost_calls: Calls in flight at the kill.
    """

    victim: str
    parts: int
    sessions: int
    equal: bool
    repeated: int
    lost_calls: int


def main() -> int:
    """Runs the trials and prints one line each, then the sum; exits with 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if _start(folder, "optimize", TASK, *SIZES, "-o", str(folder / "whole")).wait() != 0:
            raise RuntimeError("the undisturbed run failed: try it by hand")
        parts = _parts(folder / "whole")
        expected = _digest(folder / "whole")
        trials = []
        for number in range(arguments.kills):
            victim = draw.choice(VICTIMS)
            # A moment of the run, not of the clock: machines are busy. The delay makes it fall between writes, too.
            trial = _trial(folder, number, victim, draw.randrange(parts), draw.uniform(0.0, 0.3), expected)
            trials.append(trial)
            print(
                f"{number + 1:>3}  {trial.victim:<8} killed after {trial.parts:>3} of {parts} writes  "
                f"{'equal' if trial.equal else 'DIFFERENT'}  repeated {trial.repeated}  lost {trial.lost_calls}  "
                f"sessions {trial.sessions}",
                flush=True,
            )
    equal = sum(trial.equal for trial in trials)
    repeated = sum(trial.repeated for trial in trials)
    taken_up = sum(trial.sessions > 1 for trial in trials)
    minutes = (time.monotonic() - started) / 60
    print(f"{equal} of {len(trials)} equal, {repeated} repeated, {taken_up} had to be taken up, {minutes:.1f} min")
    return 0 if equal == len(trials) and repeated == 0 else 1


def _trial(folder: Path, number: int, victim: str, parts: int, delay_s: float, expected: str) -> Trial:
    output = folder / f"killed-{number}"
    process = _start(folder, "optimize", TASK, *SIZES, "-o", str(output))
    while process.poll() is None and _parts(output) < parts:
        time.sleep(0.005)
    time.sleep(delay_s)
    _kill(process, victim)
    sessions, code = 1, process.wait()
    while code != 0:
        resumable = (output / "config.yaml").is_file()
        arguments = ("resume", str(output)) if resumable else ("optimize", TASK, *SIZES, "-o", str(output))
        if not resumable and output.exists():
            output = folder / f"killed-{number}-{sessions}"
            arguments = ("optimize", TASK, *SIZES, "-o", str(output))
        process = _start(folder, *arguments)
        sessions, code = sessions + 1, process.wait()
        if sessions > 5:
            raise RuntimeError(f"{output} does not come to an end; see {output / 'logs'}")
    run_id = stored_run_id(output)
    calls = read_table(output, "llm_calls", run_id, columns=["call_id", "outcome"]).to_pylist()
    answered = Counter(row["call_id"] for row in calls if row["outcome"] not in ("lost", "error"))
    evaluated = Counter(read_table(output, "results", run_id, columns=["evaluation_id"])["evaluation_id"].to_pylist())
    repeated = sum(count - 1 for count in [*answered.values(), *evaluated.values()])
    lost = sum(row["outcome"] == "lost" for row in calls)
    return Trial(victim, parts, sessions, _digest(output) == expected, repeated, lost)


def _start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    # Evaluations that a store of earlier runs answers would make the kills miss most of a run.
    environment = {**os.environ, "ACCELOPT_RAY_STORE": "off", "HOME": str(folder)}
    command = [sys.executable, "-m", "accelopt_ray", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


def _parts(output: Path) -> int:
    return sum(1 for _ in output.glob("trajectory/*/*/part-*"))


def _kill(process: subprocess.Popen[bytes], victim: str) -> None:
    """Kills the command, or one of its actors if it has come up by now."""
    if victim == "command":
        process.kill()
        return
    try:
        family = psutil.Process(process.pid).children(recursive=True)
        actors = [
            each for each in family if each.cmdline()[:1] and each.cmdline()[0].startswith(_PROCESS_NAMES[victim])
        ]
    except psutil.Error:
        return
    if actors:
        os.kill(actors[0].pid, signal.SIGKILL)


def _digest(output: Path) -> str:
    run_id = stored_run_id(output)
    if run_id is None:
        raise RuntimeError(f"{output} holds no run")
    return trajectory_digest(output, run_id)


if __name__ == "__main__":
    sys.exit(main())
