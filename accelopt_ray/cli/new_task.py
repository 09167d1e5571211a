"""``accelopt-ray new-task``: a folder that is already a working task, to be changed into one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from accelopt_ray.outcome import UserError


def new_task(
    name: Annotated[str, typer.Argument(help="The task's name: small letters, digits and underscores.")],
    to: Annotated[Path, typer.Option(help="Folder in which the task's folder is made.", file_okay=False)] = Path("."),
) -> None:
    """Write the skeleton of a task: task.yaml, reference.py and baseline.py, which run as they are."""
    from nkibench.skeleton import write_skeleton
    from nkibench.task import TaskError

    try:
        folder = write_skeleton(to, name)
    except TaskError as error:
        raise UserError(str(error)) from None
    print(f"wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"try:  accelopt-ray profile {folder}/baseline.py --task {folder}")
    print(f"then: accelopt-ray optimize {folder}")
