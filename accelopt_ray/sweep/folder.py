"""A sweep's folder: whose it is, how each run stands, and what the next session has to do.

Layout: ``sweep.json`` says which sweep it is; each run has a folder of its own under its name, laid out as any run's,
with a ``state.json`` beside; ``summary.csv`` has a line for each run's task.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelopt_ray.config import RunConfig
from accelopt_ray.outcome import StrEnum, UserError
from accelopt_ray.sweep.file import Sweep, SweepRun

IDENTITY_NAME = "sweep.json"
STATE_NAME = "state.json"
CONFIG_NAME = "config.yaml"
SUMMARY_NAME = "summary.csv"


class RunStatus(StrEnum):
    """How a run of a sweep stands."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class TaskOutcome:
    """What one task's search came to.

    Attributes:
        task: The task's name.
        status: As :class:`~accelopt_ray.search.result.SearchStatus` has it.
        reason: One sentence where the status does not say it all.
        baseline_latency_ms: Of the kernel that the search started from; None if it was not correct.
        best_latency_ms: Of the fastest correct one.
        simulated: Whether latencies are predictions.
        evaluations: Evaluations.
        calls: Model calls.
        cost_usd: What they cost.
        tokens: Their prompt and completion tokens.
    """

    task: str
    status: str
    reason: str
    baseline_latency_ms: float | None
    best_latency_ms: float | None
    simulated: bool
    evaluations: int
    calls: int
    cost_usd: float
    tokens: int

    @property
    def speedup(self) -> float | None:
        """Baseline's latency over the best one's."""
        if self.baseline_latency_ms is None or self.best_latency_ms is None:
            return None
        return self.baseline_latency_ms / self.best_latency_ms


@dataclass(frozen=True)
class Grant:
    """A run's part of the sweep's budget; None where that has no bound.

    Attributes:
        usd: US dollars for model calls.
        evaluations: Evaluations.
    """

    usd: float | None = None
    evaluations: int | None = None


@dataclass(frozen=True)
class RunState:
    """How a run stands.

    Attributes:
        name: The run's name in the sweep.
        run_id: Its id in the trajectory.
        status: How it stands; ``running`` is also what a killed session leaves behind.
        attempts: How often it was started or taken up again.
        elapsed_s: Seconds that it has taken in all attempts that ended in order.
        error: Why it failed or was stopped; empty otherwise.
        outcomes: Its tasks', once it is finished.
        grant: What it may use in all its attempts.
    """

    name: str
    run_id: str
    status: RunStatus
    attempts: int = 0
    elapsed_s: float = 0.0
    error: str = ""
    outcomes: tuple[TaskOutcome, ...] = ()
    grant: Grant = Grant()


class SweepFolder:
    """The folder of one sweep."""

    def __init__(self, path: Path) -> None:
        """Names the folder; nothing is read or written yet."""
        self.path = path

    def claim(self, sweep: Sweep) -> None:
        """Makes the folder this sweep's, or finds that it is already.

        Runs may have been added or left out since; those that are in both must be the same.

        Raises:
            UserError: It holds something else, or a run whose configuration has changed, or cannot be written.
        """
        runs = {run.name: run.config.sha256() for run in sweep.runs}
        identity = self.path / IDENTITY_NAME
        if identity.is_file():
            held = json.loads(identity.read_text(encoding="utf-8"))
            if (held["name"], held["scale"]) != (sweep.name, sweep.scale):
                raise UserError(
                    f"{self.path} holds the sweep {held['name']} ({held['scale'] or 'one scale'}): choose another "
                    "folder with --output"
                )
            for name, sha256 in held["runs"].items():
                if runs.get(name, sha256) != sha256:
                    raise UserError(
                        f"{self.path} holds run {name} with another configuration than the file has now: choose "
                        "another folder with --output, or give the run another name"
                    )
            runs = {**held["runs"], **runs}
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UserError(f"{self.path} is not empty and holds no sweep: choose a new folder with --output")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _write(identity, json.dumps({"name": sweep.name, "scale": sweep.scale, "runs": runs}, indent=1))
        except OSError as error:
            raise UserError(
                f"cannot write {self.path} ({error.strerror}): choose another folder with --output"
            ) from None

    def state(self, name: str) -> RunState | None:
        """How a run stands; None if it has not begun."""
        path = self.path / name / STATE_NAME
        if not path.is_file():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        return RunState(
            **{
                **content,
                "status": RunStatus(content["status"]),
                "outcomes": tuple(TaskOutcome(**each) for each in content["outcomes"]),
                "grant": Grant(**content["grant"]),
            }
        )

    def write_state(self, state: RunState) -> None:
        """Saves how a run stands, whole or not at all."""
        folder = self.path / state.name
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / STATE_NAME, json.dumps(dataclasses.asdict(state), indent=1))

    def write_config(self, name: str, config: RunConfig) -> None:
        """Saves a run's configuration where ``accelopt-ray resume`` looks for it."""
        folder = self.path / name
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / CONFIG_NAME, config.to_yaml())

    def states(self, runs: Sequence[SweepRun]) -> list[RunState | None]:
        """How each run stands."""
        return [self.state(run.name) for run in runs]

    def known_runs(self) -> list[str]:
        """Names of all runs that the folder's sweep has.

        Raises:
            UserError: The folder holds no sweep.
        """
        identity = self.path / IDENTITY_NAME
        if not identity.is_file():
            raise UserError(f"{self.path} holds no sweep: give the --output of `sweep run`")
        return list(json.loads(identity.read_text(encoding="utf-8"))["runs"])


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
