"""Figures of what the hardware did: roofline, traffic, engines, utilisation."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from accelopt_ray.analysis.figures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    any_simulated,
    finish,
    new_figure,
    nothing_to_show,
    styled,
)
from accelopt_ray.analysis.traffic import BASELINE, BEST

ENGINES = {
    "tensor_engine_active_time_percent": "tensor",
    "vector_engine_active_time_percent": "vector",
    "scalar_engine_active_time_percent": "scalar",
    "gpsimd_engine_active_time_percent": "gpsimd",
    "dma_active_time_percent": "DMA",
}
"""Counters of active time to engines. The profiler gives shares of the total time, from 0 to 1."""


@styled
def percent_of_peak(profiles: pd.DataFrame) -> Figure:
    """Percent of the roofline's peak before and after, by task.

    Args:
        profiles: As of ``Trajectory.profiles()``; of several runs of a task the fastest is drawn.
    """
    pairs = _pairs(profiles, "percent_of_peak")
    if pairs.empty:
        return nothing_to_show("no percent of peak is known: the tasks declare no roofline counts")
    figure, (axes,) = new_figure(height=1.5 + 0.38 * len(pairs))
    rows = np.arange(len(pairs))[::-1]
    axes.hlines(rows, pairs[BASELINE], pairs[BEST], color=GREY, linewidth=2)
    axes.plot(pairs[BASELINE], rows, "s", color=ORANGE, markersize=7, label="baseline")
    axes.plot(pairs[BEST], rows, "o", color=BLUE, markersize=8, label="best kernel")
    for row, (_, pair) in zip(rows, pairs.iterrows(), strict=True):
        change = f"{pair[BASELINE]:.0f} → {pair[BEST]:.0f} %"
        axes.annotate(change, (1.01, row), xycoords=axes.get_yaxis_transform(), va="center")
    axes.axvline(100, color="black", linewidth=1.0, label="roofline")
    axes.set_yticks(rows, [f"{task} ({limit} bound)" if limit else task for task, limit in pairs["label"]])
    axes.set_xlim(0, max(108, pairs[[BASELINE, BEST]].max().max() * 1.12))
    axes.set_ylim(-0.6, len(pairs) - 0.4)
    axes.set_xlabel("percent of the roofline's peak (%)")
    axes.set_title("Percent of peak, before and after")
    axes.legend(loc="upper left")
    return finish(figure, any_simulated(profiles))


@styled
def traffic_efficiency(profiles: pd.DataFrame) -> Figure:
    """Least possible HBM traffic over actual traffic, before and after, by task.

    Args:
        profiles: As of ``Trajectory.profiles()``.
    """
    pairs = _pairs(profiles, "traffic_efficiency")
    if pairs.empty:
        return nothing_to_show("no HBM traffic is recorded, or the tasks declare no counts")
    figure, (axes,) = new_figure(height=1.5 + 0.42 * len(pairs))
    rows = np.arange(len(pairs))[::-1]
    axes.barh(rows + 0.19, pairs[BASELINE] * 100, 0.36, color=ORANGE, hatch="///", edgecolor="white", label="baseline")
    axes.barh(rows - 0.19, pairs[BEST] * 100, 0.36, color=BLUE, label="best kernel")
    axes.axvline(100, color="black", linewidth=1.0)
    axes.set_yticks(rows, [task for task, _ in pairs["label"]])
    axes.set_xlim(0, max(105, pairs[[BASELINE, BEST]].max().max() * 105))
    axes.set_xlabel("traffic efficiency: least possible over actual HBM bytes (%)")
    axes.set_title("HBM traffic, before and after")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return finish(figure, any_simulated(profiles))


@styled
def engine_activity(profiles: pd.DataFrame, task: str | None = None) -> Figure:
    """Active time of each engine, before and after, as a share of the kernel's own time.

    Args:
        profiles: As of ``Trajectory.profiles()``.
        task: The task to draw; means over all of them by default.
    """
    chosen = profiles if task is None else profiles[profiles["task"].eq(task)]
    names = [name for name in ENGINES if name in chosen.columns and chosen[name].notna().any()]
    if not names:
        return nothing_to_show("no engine counters are recorded")
    means = chosen.groupby("kernel")[names].mean() * 100
    figure, (axes,) = new_figure()
    x = np.arange(len(names))
    looks = {BASELINE: (-0.19, ORANGE, "///", "baseline"), BEST: (0.19, BLUE, "", "best kernel")}
    for kernel, (shift, colour, hatch, label) in looks.items():
        if kernel in means.index:
            heights = means.loc[kernel].to_numpy(float)
            axes.bar(x + shift, heights, 0.36, color=colour, hatch=hatch, edgecolor="white", label=label)
            for position, height in zip(x + shift, heights, strict=True):
                axes.annotate(
                    f"{height:.0f}", (position, height), xytext=(0, 2), textcoords="offset points", ha="center"
                )
    axes.set_xticks(x, [ENGINES[name] for name in names])
    axes.set_ylim(0, 112)
    axes.set_ylabel("active share of the kernel's time (%)")
    several = chosen["task"].nunique()
    subject = f"mean of {several} tasks" if several > 1 else str(chosen["task"].iloc[0])
    axes.set_title(f"Engine activity, before and after: {subject}")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return finish(figure, any_simulated(chosen))


@styled
def device_utilisation(utilisation: pd.DataFrame, simulated: bool = False) -> Figure:
    """Busy evaluation slots and model calls under way over time.

    Args:
        utilisation: As of :func:`accelopt_ray.analysis.utilisation.utilisation`.
        simulated: Whether the slots simulated.
    """
    if utilisation.empty:
        return nothing_to_show("no timed evaluations or calls")
    figure, (busy, calls) = new_figure(rows=2, height=4.2)
    longest = float(utilisation["elapsed_s"].max())
    scale, unit = (3600.0, "hours") if longest > 7200 else (60.0, "minutes") if longest > 180 else (1.0, "seconds")
    time = utilisation["elapsed_s"].to_numpy(float) / scale
    slots = int(utilisation["slots"].iloc[0])
    busy.stackplot(
        time,
        utilisation["running"].to_numpy(float),
        utilisation["compiling"].to_numpy(float),
        colors=[BLUE, SKY],
        labels=["running and checking", "compiling"],
    )
    busy.axhline(slots, color="black", linewidth=1.0, linestyle="--", label=f"slots seen: {slots}")
    busy.set_ylabel("busy slots")
    busy.set_title("Device utilisation and model calls over time")
    busy.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    calls.fill_between(time, utilisation["calling"].to_numpy(float), color=GREEN, step="mid", alpha=0.6, linewidth=0)
    calls.set_ylabel("model calls\nunder way")
    calls.set_xlabel(f"time since the first call or evaluation ({unit})")
    for axes in (busy, calls):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
    return finish(figure, simulated)


def _pairs(profiles: pd.DataFrame, column: str) -> pd.DataFrame:
    """One row a task with the values of baseline and best kernel; of several runs, that with the fastest kernel."""
    known = profiles.dropna(subset=[column])
    best = known[known["kernel"].eq(BEST)].sort_values("latency_ms", kind="stable").drop_duplicates("task")
    first = known[known["kernel"].eq(BASELINE)].set_index(["run_id", "task"])[column]
    keys = list(best[["run_id", "task"]].itertuples(index=False, name=None))
    pairs = pd.DataFrame(
        {
            "label": list(best[["task", "limit"]].itertuples(index=False, name=None)),
            BASELINE: [float(first.get(key, float("nan"))) for key in keys],
            BEST: best[column].to_numpy(float),
        }
    )
    return pairs.sort_values(BEST, ascending=False, ignore_index=True)
