"""``accelopt-ray compare``: the ablation table."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from accelopt_ray.cli.trajectories import opened

if TYPE_CHECKING:
    import pandas as pd


class TableFormat(str, Enum):
    """Formats of the table."""

    MD = "md"
    CSV = "csv"
    JSON = "json"


def compare(
    runs: Annotated[list[str], typer.Argument(help="Run or sweep folders, or patterns.", metavar="RUN...")],
    by: Annotated[
        str | None, typer.Option(help="One row for each value of this setting, like preset or search.beam_width.")
    ] = None,
    reach: Annotated[
        float | None,
        typer.Option(help="Speed-up for the column 'evaluations to reach'.", show_default="what all rows came to"),
    ] = None,
    kind: Annotated[TableFormat, typer.Option("--format", help="Format of the table.")] = TableFormat.MD,
) -> None:
    """Compare runs: speed-up, percent of peak, cost, evaluations to reach a speed-up, with intervals over seeds.

    Several arguments make one row each; one argument (a sweep) makes one row for each configuration in it.
    """
    from accelopt_ray.analysis import load
    from accelopt_ray.analysis.comparison import compare as compared
    from accelopt_ray.analysis.comparison import configuration_groups
    from accelopt_ray.outcome import UserError

    if reach is not None and not reach > 0:
        raise UserError(f"--reach is {reach}: give a speed-up above 0")
    with opened(runs) as trajectory:
        if by is None and len(runs) > 1:
            names = _short_names(runs)
            groups = {run_id: name for path, name in names.items() for run_id in load(path).run_ids}
        else:
            groups = configuration_groups(trajectory, by)
        table = compared(trajectory, groups, reach)
        without = sorted(set(groups.values()) - set(table["group"]))
    if kind is TableFormat.MD:
        print(markdown(table))
    elif kind is TableFormat.CSV:
        print(table.to_csv(index=False), end="")
    else:
        records = json.loads(table.to_json(orient="records", double_precision=10))
        print(json.dumps(records, indent=2))
    for name in without:
        typer.echo(f"accelopt-ray: warning: {name} has no correct kernel yet and is not in the table", err=True)


def _short_names(paths: list[str]) -> dict[str, str]:
    """Names of the arguments: their last part, or all of it where that is not enough to tell them apart."""
    last = [Path(path).name or path for path in paths]
    return {path: name if last.count(name) == 1 else path for path, name in zip(paths, last, strict=True)}


_COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "speedup": ("speed-up", lambda value: f"{value:.3f}×"),
    "percent_of_peak": ("% of peak", lambda value: f"{value:.1f}"),
    "cost_usd": ("USD", lambda value: f"{value:.2f}"),
    "tokens": ("tokens", lambda value: f"{value:,.0f}"),
    "evaluations": ("evaluations", lambda value: f"{value:,.0f}"),
    "evaluations_to_reach": ("evaluations to {reach:.2f}×", lambda value: f"{value:,.0f}"),
    "cost_usd_to_reach": ("USD to {reach:.2f}×", lambda value: f"{value:.2f}"),
}


def markdown(table: pd.DataFrame) -> str:
    """Renders a comparison as a Markdown table with 95 % intervals in brackets."""
    reach = float(table["reach"].iloc[0])
    heads = ["configuration", "seeds", "tasks"]
    heads += [name.format(reach=reach) for name, _ in _COLUMNS.values()]
    heads += ["reached"]
    rows = []
    for _, row in table.iterrows():
        cells = [str(row["group"]).replace("|", "\\|"), str(row["replicates"]), str(row["tasks"])]
        for name, (_, form) in _COLUMNS.items():
            cells.append(_cell(float(row[name]), float(row[f"{name}_low"]), float(row[f"{name}_high"]), form))
        rows.append([*cells, f"{100 * row['reached']:.0f} %"])
    widths = [max(len(line[column]) for line in [heads, *rows]) for column in range(len(heads))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in rows
    ]
    head = "| " + " | ".join(cell.ljust(width) for cell, width in zip(heads, widths, strict=True)) + " |"
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    notes = ["Geometric means over tasks; brackets: 95 % bootstrap intervals over seeds, where there are two or more."]
    for kind in sorted(set(table["latency_kind"]) - {"measured"}):
        names = ", ".join(table.loc[table["latency_kind"].eq(kind), "group"])
        notes.append(f"{kind.capitalize()} ({names}): predictions of a model, not results of a Trainium device.")
    return "\n".join([head, rule, *lines, "", *notes])


def _cell(value: float, low: float, high: float, form: Callable[[float], str]) -> str:
    if math.isnan(value):
        return "–"
    return form(value) if math.isnan(low) else f"{form(value)} [{form(low)}, {form(high)}]"
