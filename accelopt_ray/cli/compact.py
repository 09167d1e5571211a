"""``accelopt-ray compact``: few large part files instead of many small ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from accelopt_ray.outcome import UserError


def compact(
    runs: Annotated[list[Path], typer.Argument(help="Run or sweep folders.", metavar="RUN...")],
) -> None:
    """Merge the part files of each run's tables, without a moment of missing rows. Not while the run goes on."""
    from accelopt_ray.trajectory import compact as merge

    for run in runs:
        if not run.is_dir():
            raise UserError(f"there is no folder {run}: give the output folder of a run or sweep")
        try:
            done = merge(run)
        except OSError as error:
            raise UserError(f"cannot compact {run}: {error.strerror or error}") from None
        sizes = f"{done.bytes_before / 1e6:.1f} to {done.bytes_after / 1e6:.1f} MB"
        print(f"{run}: {done.parts_before} to {done.parts_after} part files, {sizes}")
        for path in done.damaged:
            print(f"accelopt-ray: warning: left damaged part {path} as it is", file=sys.stderr)
