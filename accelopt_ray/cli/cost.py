"""``accelopt-ray cost``: where the tokens and dollars of runs went, and what they bought."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accelopt_ray.cli.trajectories import opened

if TYPE_CHECKING:
    import pandas as pd

_VIEWS: Mapping[str, tuple[str, ...]] = {
    "role and model": ("role", "model"),
    "iteration": ("iteration",),
    "model": ("model",),
}


def cost(
    runs: Annotated[list[str], typer.Argument(help="Run or sweep folders, or patterns.", metavar="RUN...")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show tokens and dollars by role, model and iteration, and dollars for each point of speed-up."""
    from accelopt_ray.analysis.spending import price_of_speedup, spending

    with opened(runs) as trajectory:
        calls = trajectory.llm_calls
        tables = {name: spending(calls, columns) for name, columns in _VIEWS.items()}
        total = spending(calls, ())
        bought = price_of_speedup(trajectory.summary())
        dates = _price_dates(trajectory.configurations)
    if as_json:
        views: dict[str, Any] = {name.replace(" ", "_"): _records(table) for name, table in tables.items()}
        answer = {
            "prices_as_of": dates,
            "total": next(iter(_records(total)), None),
            **views,
            "searches": _records(bought),
        }
        print(json.dumps(answer, indent=2))
        return
    for name, table in tables.items():
        print(f"by {name}")
        print(_text(table))
        print()
    print(_text(total))
    print()
    print("a point of speed-up is one hundredth of the baseline's speed")
    print(_text(bought))
    for note in _notes(_records(total), dates):
        print(note)


def _price_dates(configurations: Mapping[str, Mapping[str, object]]) -> list[str]:
    dates = [config.get("prices.as_of") for config in configurations.values()]
    return sorted({str(date) for date in dates if date is not None})


def _notes(totals: list[dict[str, Any]], dates: list[str]) -> list[str]:
    notes: list[str] = []
    total = totals[0] if totals else {"unpriced_calls": 0, "estimated_calls": 0, "lost_calls": 0}
    if dates:
        notes.append(f"token prices as of {', '.join(dates)}, stored with the run")
    if total["unpriced_calls"]:
        notes.append(f"{total['unpriced_calls']} calls have no known price and count as 0: give one with --prices")
    if total["estimated_calls"]:
        notes.append(f"{total['estimated_calls']} calls came without usage: their tokens were counted here")
    if total["lost_calls"]:
        notes.append(f"{total['lost_calls']} calls were in flight at a kill and are priced at the mean of their role")
    return notes


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = json.loads(table.to_json(orient="records"))
    return records


def _text(table: pd.DataFrame) -> str:
    shown = table.copy()
    for name in shown.columns:
        if name.endswith("_tokens"):
            shown[name] = shown[name].map("{:,}".format)
        elif name.endswith("_usd") or name == "usd_per_point":
            shown[name] = shown[name].map("{:.4f}".format)
        elif name == "speedup":
            shown[name] = shown[name].map("{:.3f}x".format)
    text: str = shown.to_string(index=False, na_rep="-")
    return text
