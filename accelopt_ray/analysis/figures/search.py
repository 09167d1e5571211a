"""Figures of the search's advance."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
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


def _name_ends(axes: Axes, ends: Mapping[Hashable, float]) -> None:
    """Writes the names of lines beside where they end, moved apart as little as keeps them from overlapping."""
    low, high = axes.get_ylim()
    gap = (high - low) / 28
    ordered = sorted(ends.items(), key=lambda item: item[1])
    # Places a gap apart, nearest to the values by least squares: pooling adjacent violators.
    pools: list[list[float]] = []
    for number, (_, value) in enumerate(ordered):
        pools.append([value - number * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    places = [float(np.mean(pool)) for pool in pools for _ in pool]
    for number, ((name, value), place) in enumerate(zip(ordered, places, strict=True)):
        where = (1.01, place + number * gap)
        axes.annotate(f"{name} {value:.2f}×", where, xycoords=axes.get_yaxis_transform(), fontsize=7.0, va="center")


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
    searches = list(points.groupby(["run_id", "task"], sort=False))
    several_tasks = points["task"].nunique() > 1
    named = len(searches) <= _NAMED_LINES
    figure, (axes,) = new_figure(height=3.6 if named else 4.4)
    curves: list[pd.Series] = []
    for number, ((run_id, task), rows) in enumerate(searches):
        curve = rows[[by, "best_speedup"]].astype("float64").groupby(by)["best_speedup"].max()
        curves.append(curve)
        if named:
            look: dict[str, Any] = {"color": CYCLE[number % len(CYCLE)], "linestyle": LINES[number % len(LINES)]}
            axes.step(curve.index, curve, where="post", label=f"{task}, {run_id}" if several_tasks else run_id, **look)
            improved = rows[rows["improved"]]
            marker = MARKERS[number % len(MARKERS)]
            axes.plot(improved[by].astype("float64"), improved["best_speedup"], marker, color=look["color"])
        else:
            axes.step(curve.index, curve, where="post", color=GREY, linewidth=0.9)
    if not named:
        mean = np.exp(np.log(pd.concat(curves, axis=1).sort_index().ffill().fillna(1.0)).mean(axis=1))
        axes.step(mean.index, mean, where="post", color=CYCLE[0], linewidth=2.2, label="geometric mean")
        if points["run_id"].nunique() == 1:
            _name_ends(axes, {task: curve.iloc[-1] for ((_, task), _), curve in zip(searches, curves, strict=True)})
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
        axes.legend(loc="lower right" if named else "upper right")
    return finish(figure, any_simulated(points))
