"""The figure of an ablation: configurations side by side with the uncertainty that seeds leave."""

from __future__ import annotations

import textwrap

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from accelopt_ray.analysis.figures.style import (
    BLUE,
    GREY,
    MARKERS,
    any_simulated,
    finish,
    new_figure,
    nothing_to_show,
    styled,
)

_PANELS = (
    ("speedup", "speed-up over the baseline (×)"),
    ("percent_of_peak", "percent of peak (%)"),
    ("cost_usd", "cost (US dollars)"),
    ("evaluations_to_reach", "evaluations to reach {reach:.2f}×"),
)


@styled
def ablation(comparison: pd.DataFrame) -> Figure:
    """Values and 95 % bootstrap intervals of each configuration.

    Args:
        comparison: As of :func:`accelopt_ray.analysis.comparison.compare`.
    """
    if comparison.empty:
        return nothing_to_show("nothing to compare")
    panels = [(name, label) for name, label in _PANELS if comparison[name].fillna(0).ne(0).any()]
    labels = [textwrap.fill(textwrap.shorten(str(name), 120, placeholder=" …"), 32) for name in comparison["group"]]
    lines = max(label.count("\n") for label in labels)
    figure, all_axes = new_figure(
        columns=len(panels), width=2.6 * len(panels) + 2.2, height=1.5 + (0.4 + 0.15 * lines) * len(comparison)
    )
    rows = np.arange(len(comparison))[::-1]
    reach = float(comparison["reach"].iloc[0])
    for axes, (name, label) in zip(all_axes, panels, strict=True):
        values = comparison[name].to_numpy(float)
        low = values - comparison[f"{name}_low"].to_numpy(float)
        high = comparison[f"{name}_high"].to_numpy(float) - values
        spread = np.nan_to_num(np.vstack([low, high])).clip(min=0.0)
        axes.errorbar(values, rows, xerr=spread, fmt=MARKERS[0], color=BLUE, capsize=3, markersize=6)
        axes.set_yticks(rows, labels if axes is all_axes[0] else [""] * len(rows))
        axes.set_ylim(-0.6, len(rows) - 0.4)
        axes.set_xlabel(label.format(reach=reach))
        axes.margins(x=0.15)
        if name == "speedup":
            axes.axvline(1.0, color=GREY, linewidth=0.8)
    counts = sorted(set(comparison["replicates"]))
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    all_axes[0].set_title(f"Ablation, 95 % intervals over {seeds} seed{'s' if counts[-1] != 1 else ''}")
    return finish(figure, any_simulated(comparison))
