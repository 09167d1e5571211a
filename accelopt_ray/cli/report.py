"""``accelopt-ray report``: one HTML file, or single figures, of a run or a sweep."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelopt_ray.cli.trajectories import opened, require_matplotlib
from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from accelopt_ray.analysis import Trajectory


class FigureFormat(str, Enum):
    """File formats of figures."""

    SVG = "svg"
    PNG = "png"
    PDF = "pdf"


def report(
    runs: Annotated[list[str], typer.Argument(help="Run or sweep folders, or patterns.", metavar="RUN_OR_SWEEP...")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The HTML file.", show_default="report.html in the run's folder"),
    ] = None,
    run_id: Annotated[list[str] | None, typer.Option(help="Only this run of a sweep; may be repeated.")] = None,
    figure: Annotated[
        list[str] | None, typer.Option(help="Writes this figure instead of the report; may be repeated, or 'all'.")
    ] = None,
    to: Annotated[Path, typer.Option(help="Folder for figures.")] = Path(),
    kind: Annotated[FigureFormat, typer.Option("--format", help="Format of figures.")] = FigureFormat.SVG,
) -> None:
    """Write a self-contained HTML report of a run or a sweep, or single figures."""
    require_matplotlib()
    from accelopt_ray.analysis.report import write_report

    with opened(runs, run_id) as trajectory:
        if figure:
            _write_figures(trajectory, figure, to, kind.value)
            return
        path = write_report(trajectory, output or _default_path(runs))
    print(f"report {path} ({path.stat().st_size / 1e6:.1f} MB)")


def _default_path(runs: list[str]) -> Path:
    """Beside the trajectory when there is one local folder, else here."""
    folder = Path(runs[0])
    return folder / "report.html" if len(runs) == 1 and folder.is_dir() else Path("report.html")


def _write_figures(trajectory: Trajectory, names: list[str], folder: Path, kind: str) -> None:
    from accelopt_ray.analysis.figures import FIGURES, render
    from accelopt_ray.analysis.report import describe_empty

    chosen = list(FIGURES) if "all" in names else list(dict.fromkeys(names))
    unknown = [name for name in chosen if name not in FIGURES]
    if unknown:
        raise UserError(f"there is no figure {unknown[0]!r}: choose among all, {', '.join(FIGURES)}")
    if trajectory.evaluations.empty:
        raise UserError(f"{describe_empty(trajectory.states())}: there is nothing to draw yet")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in chosen:
            path = folder / f"{name}.{kind}"
            path.write_bytes(render(FIGURES[name].draw(trajectory), kind))
            print(f"figure {path}")
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error.strerror}): choose another folder with --to") from None
