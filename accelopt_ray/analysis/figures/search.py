"""Figures of the search's advance."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from accelopt_ray.analysis.figures.style import (
    CYCLE,
    GREY,
    LINES,
    MARKERS,
    any_simulated,
    finish,
    new_figure,
    nothing_to_show,
    styled,
)

_NAMED_LINES = len(CYCLE)
_COST_LABELS = {
    "evaluations": "evaluations run",
    "cost_usd": "spent on model calls (US dollars)",
    "tokens": "prompt and completion tokens",
}


@styled
def speedup_by_iteration(progress: pd.DataFrame) -> Figure:
    """Best speed-up and the beam's spread by iteration.

    Args:
        progress: As of ``Trajectory.progress()``. One search is drawn with its beam; several by their median and
            quartiles.
    """
    if progress.empty:
        return nothing_to_show("no evaluations yet")
    figure, (axes,) = new_figure()
    if len(progress[["run_id", "task"]].drop_duplicates()) == 1:
        x = progress["iteration"].to_numpy(int)
        axes.fill_between(
            x,
            progress["beam_worst_speedup"].to_numpy(float),
            progress["beam_best_speedup"].to_numpy(float),
            color=CYCLE[0],
            alpha=0.2,
            linewidth=0,
            label="beam, slowest to fastest",
        )
        axes.plot(x, progress["beam_mean_speedup"].to_numpy(float), LINES[1], color=CYCLE[0], label="beam, mean")
        axes.plot(x, progress["best_speedup"].to_numpy(float), "o-", color=CYCLE[1], label="best so far")
    else:
        table = progress.pivot_table(index="iteration", columns=["run_id", "task"], values="best_speedup").ffill()
        low, middle, high = np.nanquantile(table.to_numpy(float), [0.25, 0.5, 0.75], axis=1)
        x = table.index.to_numpy(int)
        axes.fill_between(x, low, high, color=CYCLE[0], alpha=0.2, linewidth=0, label="middle half of the searches")
        axes.plot(x, middle, "o-", color=CYCLE[0], label=f"median of {table.shape[1]} searches")
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    axes.set_xlabel("iteration")
    axes.set_ylabel("speed-up over the baseline (×)")
    axes.set_title("Speed-up by iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower right")
    return finish(figure, any_simulated(progress))


@styled
def best_so_far(points: pd.DataFrame, by: str = "evaluations", frontier: pd.DataFrame | None = None) -> Figure:
    """Best speed-up against what it took.

    Args:
        points: As of ``Trajectory.best_so_far()``, or ``best_by_cost()`` for dollars and tokens.
        by: ``evaluations``, ``cost_usd`` or ``tokens``.
        frontier: As of ``Trajectory.frontier(by)``: points that nothing beats are marked.
    """
    if points.empty:
        return nothing_to_show("no evaluations yet")
    if by == "cost_usd" and not points["cost_usd"].gt(0).any():
        return nothing_to_show("no dollars were spent, or no price of the models is known")
    figure, (axes,) = new_figure()
    searches = list(points.groupby(["run_id", "task"], sort=False))
    several_tasks = points["task"].nunique() > 1
    for number, ((run_id, task), rows) in enumerate(searches):
        named = len(searches) <= _NAMED_LINES
        steps = rows[[by, "best_speedup"]].astype("float64").groupby(by, as_index=False)["best_speedup"].max()
        axes.step(
            steps[by],
            steps["best_speedup"],
            where="post",
            color=CYCLE[number % len(CYCLE)] if named else GREY,
            linestyle=LINES[number % len(LINES)] if named else "-",
            alpha=1.0 if named else 0.35,
            linewidth=1.6 if named else 0.8,
            label=(f"{task}, {run_id}" if several_tasks else str(run_id)) if named else None,
        )
        improved = rows[rows["improved"]]
        if named:
            axes.plot(
                improved[by].astype("float64"),
                improved["best_speedup"],
                MARKERS[number % len(MARKERS)],
                color=CYCLE[number % len(CYCLE)],
            )
    if frontier is not None and len(searches) > 1 and not frontier.empty:
        axes.plot(
            frontier[by].astype("float64"), frontier["best_speedup"], "*", color="black", markersize=8, label="unbeaten"
        )
    axes.axhline(1.0, color=GREY, linewidth=0.8)
    axes.set_xlabel(_COST_LABELS[by])
    axes.set_ylabel("best speed-up so far (×)")
    axes.set_title("Best so far against " + {"cost_usd": "dollars", "tokens": "tokens"}.get(by, by))
    if by != "evaluations":
        axes.set_xlim(left=0)
    if axes.get_legend_handles_labels()[0] and len(searches) > 1:
        axes.legend(loc="lower right")
    return finish(figure, any_simulated(points))
