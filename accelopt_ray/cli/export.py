"""``accelopt-ray export``: best kernels and slow-fast pairs, to be used elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from accelopt_ray.cli.trajectories import opened


def export(
    runs: Annotated[list[str], typer.Argument(help="Run or sweep folders, or patterns.", metavar="RUN...")],
    to: Annotated[Path, typer.Option(help="Folder to write, new or empty.")],
    run_id: Annotated[list[str] | None, typer.Option(help="Only this run of a sweep; may be repeated.")] = None,
) -> None:
    """Write each task's best kernel with its provenance and a PyTorch module, and all slow-fast pairs as JSON lines."""
    from accelopt_ray.analysis.export import PAIRS
    from accelopt_ray.analysis.export import export as write

    with opened(runs, run_id) as trajectory:
        written = write(trajectory, to)
    for each in written:
        label = "" if each.kind == "measured" else f" ({each.kind})"
        print(f"{each.task}: {each.speedup:.2f}x{label}, {each.folder}")
        if each.no_module:
            print(f"{each.task}: no PyTorch module, {each.no_module}")
    pairs = to / PAIRS
    with pairs.open(encoding="utf-8") as stream:
        print(f"pairs: {sum(1 for _ in stream)}, {pairs}")
