"""``accelopt-ray prompts``: what models are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from accelopt_ray.outcome import UserError

app = typer.Typer(help="What models are sent.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps ``show`` a command of its own while it is the only one."""


@app.command()
def show(
    role: Annotated[str, typer.Argument(help="planner, executor, summarizer or fixer.", metavar="ROLE")],
    task: Annotated[str | None, typer.Option(help="Built-in task, task folder, or PATH#task.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of a run.")] = None,
    preset: Annotated[str | None, typer.Option(help="Search preset.")] = None,
    device: Annotated[str | None, typer.Option(help="Device that evaluates the baseline.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Replaces a shape parameter.", metavar="NAME=VALUE")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Folder with prompts in place of the package's, or compact.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="File with the plan that executor and fixer are shown.")] = None,
) -> None:
    """Print exactly what a role is sent first: its profile is measured, its random choices are those of the run."""
    import asyncio

    from accelopt_ray.cli.tasks import parse_shape
    from accelopt_ray.config import load_config
    from accelopt_ray.devices.registry import get_device
    from accelopt_ray.evaluation.evaluate import evaluate
    from accelopt_ray.evaluation.records import TaskRef
    from accelopt_ray.search.preview import PLACEHOLDER_PLAN, preview
    from accelopt_ray.verify.references import ReferenceCache
    from nkibench.task import TaskError

    overrides: dict[str, object] = {
        "task": task,
        "preset": preset,
        "device": device,
        "shape": parse_shape(shape or []),
        "prompts": None if prompts is None else str(prompts),
    }
    resolved = load_config(config, overrides, {"output": "unused"})
    try:
        found = resolved.load_tasks()[0]
    except TaskError as error:
        raise UserError(str(error)) from None
    used, references = get_device(resolved.device), ReferenceCache()
    prompt = asyncio.run(
        preview(
            role,
            resolved.search_settings(),
            found,
            TaskRef(found.location, tuple(resolved.shape_of(found.name).items())),
            resolved.prompt_library(),
            lambda job: evaluate(job, used, references),
            _text(plan) if plan is not None else PLACEHOLDER_PLAN,
        )
    )
    print(f"--- system (sha256 {prompt.system_sha256}) ---")
    print(prompt.system, end="")
    print("--- user ---")
    print(prompt.user, end="")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the plan {path}: {error}") from None
