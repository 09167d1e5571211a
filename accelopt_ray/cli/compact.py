"""``accelopt-ray compact``: few large part files instead of many small ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from accelopt_ray.outcome import UserError


def compact(
    runs: Annotated[list[str], typer.Argument(help="Run or sweep folders, or patterns.", metavar="RUN_OR_SWEEP...")],
) -> None:
    """Merge the part files of each run's tables, without a moment of missing rows. A run that goes on is left alone."""
    from accelopt_ray.analysis.locations import find_stores
    from accelopt_ray.trajectory import compact as merge

    stores = find_stores(runs)
    for store in stores:
        name = store.location.removeprefix(f"{Path.cwd()}/")
        try:
            done = merge(store.location)
        except OSError as error:
            raise UserError(f"cannot compact {name}: {error.strerror or error}") from None
        except UserError as error:
            if len(stores) == 1:
                raise
            print(f"accelopt-ray: warning: left {name} as it is: {error}", file=sys.stderr)
            continue
        sizes = f"{done.bytes_before / 1e6:.1f} to {done.bytes_after / 1e6:.1f} MB"
        print(f"{name}: {done.parts_before:,} to {done.parts_after:,} part files, {sizes}")
        for path in done.damaged:
            print(f"accelopt-ray: warning: left damaged part {path} as it is", file=sys.stderr)
