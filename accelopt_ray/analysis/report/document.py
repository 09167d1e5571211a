"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import yaml
from markupsafe import Markup

from accelopt_ray.analysis.figures import FIGURES, render
from accelopt_ray.analysis.figures.style import shows_nothing
from accelopt_ray.analysis.lineage import Step, plan_title
from accelopt_ray.analysis.outcomes import failures
from accelopt_ray.analysis.report.packing import pack_trees
from accelopt_ray.analysis.report.tree import search_tree
from accelopt_ray.analysis.trajectory import Trajectory
from accelopt_ray.devices.registry import latency_kind
from accelopt_ray.outcome import UserError
from accelopt_ray.version import code_version

MAX_TREES = 12
"""Searches of a sweep whose trees and descents are shown: the fastest of each task, then the fastest of the others."""

MAX_TREE_NODES = 6_000
MAX_FAILURES = 40
MAX_SVG_BYTES = 250_000
WIDE_INCHES = 9.0
"""A wider figure takes the page's whole width."""


@dataclass(frozen=True)
class FigureView:
    """A figure in the document."""

    name: str
    question: str
    markup: Markup
    wide: bool


@dataclass(frozen=True)
class Descent:
    """The best kernel's way in one search; ``kind`` says what its latencies are."""

    run_id: str
    task: str
    kind: str
    steps: Sequence[Step]
    titles: Sequence[str]


def write_report(trajectory: Trajectory, path: str | Path) -> Path:
    """Writes the report of a run or a sweep.

    Args:
        trajectory: What to report on.
        path: The HTML file.

    Returns:
        The path.

    Raises:
        UserError: There is no evaluation yet, or the file cannot be written.
    """
    target = Path(path)
    text = report_html(trajectory)
    try:
        target.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot write {target} ({error.strerror}): choose another file with --output") from None
    return target


def report_html(trajectory: Trajectory) -> str:
    """Renders the report.

    Raises:
        UserError: There is no evaluation yet.
    """
    searches = trajectory.summary()
    searches["kind"] = list(map(latency_kind, searches["device"].fillna(""), searches["simulated"].fillna(False)))
    states = trajectory.states()
    if searches.empty:
        raise UserError(f"{describe_empty(states)}: there is nothing to report yet")
    figures, absent = _figures(trajectory, len(states))
    chosen = _chosen_searches(searches)
    kinds = searches.set_index(["run_id", "task"])["kind"]
    trees, descents = [], []
    for run_id, task in chosen:
        one = trajectory.select([run_id])
        trees.append(search_tree(one, run_id, task))
        try:
            steps = one.lineage(run_id, task)
        except UserError:
            continue  # the search has no correct kernel: its tree and its failures tell why
        descents.append(
            Descent(run_id, task, kinds[run_id, task], steps, [plan_title(step.plan_text) for step in steps])
        )
    packed, shortened = pack_trees(trees)
    failed = failures(trajectory.evaluations)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("accelopt_ray.analysis.report", "templates"),
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=True),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    environment.filters["duration"] = _duration
    return environment.get_template("report.html.j2").render(
        title=_title(searches),
        made_at=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        version=code_version(),
        kinds=sorted(set(kinds)),
        uncalibrated=sorted(set(searches.loc[searches["kind"].str.contains("uncalibrated"), "device"])),
        searches=_records(searches),
        totals=_totals(searches),
        states=_records(states),
        figures=figures,
        absent=absent,
        descents=descents,
        packed=packed,
        shortened=shortened,
        trees=len(trees),
        failures=_records(failed.head(MAX_FAILURES)),
        failure_count=int(failed["count"].sum()),
        more_failures=max(0, len(failed) - MAX_FAILURES),
        costs=_records(trajectory.costs().drop(columns="run_id").pipe(_summed_costs)),
        runs=_run_views(trajectory),
    )


def describe_empty(states: pd.DataFrame) -> str:
    """Says of runs without evaluations what they are."""
    if states.empty:
        return "the trajectory holds no run with a row in 'runs'"
    names = ", ".join(states["run_id"].head(3)) + (", ..." if len(states) > 3 else "")
    return f"run{'s' if len(states) > 1 else ''} {names} ha{'ve' if len(states) > 1 else 's'} no evaluation"


def _figures(trajectory: Trajectory, runs: int) -> tuple[list[FigureView], list[str]]:
    views, absent = [], []
    for name, entry in FIGURES.items():
        if name == "ablation" and runs < 2:
            continue
        try:
            figure = entry.draw(trajectory)
        except UserError as error:
            absent.append(f"{name}: {error}")
            continue
        if shows_nothing(figure):
            absent.append(f"{name}: {figure.axes[0].texts[0].get_text()}")
            continue
        markup = _inline(render(figure, "svg"), figure, entry.question)
        views.append(FigureView(name, entry.question, markup, wide=figure.get_figwidth() > WIDE_INCHES))
    return views, absent


def _inline(svg: bytes, figure: Any, label: str) -> Markup:
    if len(svg) > MAX_SVG_BYTES:
        data = base64.b64encode(render(figure, "png")).decode()
        return Markup('<img alt="{}" src="data:image/png;base64,{}">').format(label, data)
    text = svg.decode()
    element = text[text.index("<svg") :]
    # Metadata is of no use here, and fixed sizes would keep the picture from fitting its place.
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", element, count=1)
    element = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", element, count=1)
    return Markup(element.replace("<svg", f'<svg role="img" aria-label="{Markup.escape(label)}"', 1))


def _chosen_searches(searches: pd.DataFrame) -> list[tuple[str, str]]:
    ranked = searches.sort_values("speedup", ascending=False, kind="stable", na_position="last")
    ordered = pd.concat([ranked.drop_duplicates("task"), ranked[ranked.duplicated("task")]])
    chosen: list[tuple[str, str]] = []
    nodes = 0
    for run_id, task, count in ordered[["run_id", "task", "evaluations"]].itertuples(index=False):
        if chosen and (len(chosen) >= MAX_TREES or nodes + int(count) > MAX_TREE_NODES):
            break
        chosen.append((str(run_id), str(task)))
        nodes += int(count)
    return chosen


def _title(searches: pd.DataFrame) -> str:
    tasks = list(dict.fromkeys(searches["task"]))
    name = tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks"
    runs = searches["run_id"].nunique()
    return f"{name}: " + (f"run {searches['run_id'].iloc[0]}" if runs == 1 else f"{runs} runs")


def _totals(searches: pd.DataFrame) -> dict[str, object]:
    best = searches.dropna(subset=["speedup"]).sort_values("speedup", ascending=False)
    fastest = _records(best.head(1))
    return {
        "fastest": fastest[0] if fastest else None,
        "searches": len(searches),
        **{
            name: float(searches[name].sum())
            for name in ("evaluations", "evaluations_run", "correct", "duplicates", "calls", "tokens", "cost_usd")
        },
        "unpriced_calls": int(searches["unpriced_calls"].sum()),
        "wall_s": float(searches["wall_s"].sum()),
    }


def _summed_costs(costs: pd.DataFrame) -> pd.DataFrame:
    sums = [name for name in costs.columns if name not in ("task", "role", "model", "mean_latency_s")]
    weighted = costs.assign(total_latency_s=costs["mean_latency_s"] * costs["calls"])
    grouped = weighted.groupby(["role", "model"], dropna=False)[[*sums, "total_latency_s"]].sum().reset_index()
    grouped["mean_latency_s"] = grouped["total_latency_s"] / grouped["calls"]
    return grouped.drop(columns="total_latency_s")


def _run_views(trajectory: Trajectory) -> list[dict[str, object]]:
    views: list[dict[str, object]] = []
    for run in _records(trajectory.runs.head(MAX_TREES)):
        config = _json(run.get("config_json"))
        views.append(
            {
                **run,
                "yaml": yaml.safe_dump(config, sort_keys=False) if config else "",
                "fingerprint": _json(run.get("fingerprint_json")),
            }
        )
    return views


def _json(text: object) -> Mapping[str, object]:
    try:
        value = json.loads(text) if isinstance(text, str) else {}
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    plain = frame.astype("object")
    records = plain.where(plain.notna(), None).to_dict(orient="records")
    return [{str(name): value for name, value in record.items()} for record in records]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _number(value: object, form: str = ",.0f", missing: str = "–") -> str:
    return format(value, form) if isinstance(value, (int, float)) else missing
