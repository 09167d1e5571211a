"""Watching the runs of a cluster from outside: those who hold runs tell where they stand.

A run's folder lies on the machine that its driver lives on, which need not be the watcher's. So the driver reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from accelopt_ray.analysis.live import Snapshot
from accelopt_ray.outcome import UserError
from actors.pools import answers_of

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class HeldRun:
    """A run that goes on somewhere in the cluster.

    Attributes:
        run_id: Names it.
        folder: Its folder, on the machine of its driver.
        holder: Handle of the actor that holds it.
    """

    run_id: str
    folder: str
    holder: Any

    def snapshot(self) -> Snapshot | None:
        """Where the run stands; None before its first row.

        Raises:
            RunEndedError: It has ended, and its driver with it.
        """
        try:
            now: Snapshot = ray.get(self.holder.snapshot.remote(self.run_id), timeout=_TIMEOUT_S)
        except RayTaskError as error:
            if isinstance(error.cause, KeyError):
                raise RunEndedError(self.run_id) from None
            if isinstance(error.cause, UserError):
                return None
            raise
        except RayActorError:
            raise RunEndedError(self.run_id) from None
        return now

    def is_called(self, name: str) -> bool:
        """Whether it is this run that is meant: by its id, its folder, or the last parts of that."""
        wanted = PurePath(name).parts
        return name == self.run_id or (bool(wanted) and PurePath(self.folder).parts[-len(wanted) :] == wanted)


class RunEndedError(Exception):
    """The run has ended; what is known of it now lies in its folder."""


def held_runs() -> list[HeldRun]:
    """Finds the runs that go on in the connected cluster; a holder that does not answer is left out."""
    found = [
        HeldRun(run_id, folder, holder)
        for _, holder, folders in answers_of("held_runs", _TIMEOUT_S)
        for run_id, folder in folders.items()
    ]
    return sorted(found, key=lambda run: run.run_id)


def held_run(name: str) -> HeldRun:
    """Finds one run that goes on in the connected cluster.

    Args:
        name: Its id, its folder there, or the last part of that.

    Raises:
        UserError: None is called so, or several are.
    """
    runs = held_runs()
    fitting = [run for run in runs if run.is_called(name)]
    if len(fitting) == 1:
        return fitting[0]
    there = ", ".join(run.run_id for run in fitting or runs) or "none"
    what = "several runs of the cluster are called" if fitting else "neither a folder here nor a run of the cluster is"
    raise UserError(f"{what} {name}: runs that go on are {there}")
