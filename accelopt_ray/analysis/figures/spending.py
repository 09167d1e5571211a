"""Figures of what it cost."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from accelopt_ray.analysis.figures.style import BLUE, GREEN, ORANGE, SKY, finish, new_figure, nothing_to_show, styled

_ROLES = ("planner", "executor", "summarizer", "fixer")


@styled
def spending_by_role(costs: pd.DataFrame) -> Figure:
    """Tokens and dollars by role.

    Args:
        costs: As of ``Trajectory.costs()``.
    """
    if costs.empty:
        return nothing_to_show("no model call yet")
    columns = ["prompt_tokens", "cached_tokens", "completion_tokens", "cost_usd", "unpriced_calls"]
    sums = costs.groupby("role")[columns].sum()
    order = [role for role in _ROLES if role in sums.index] + sorted(set(sums.index) - set(_ROLES))
    sums = sums.reindex(order).fillna(0)
    figure, (tokens, dollars) = new_figure(columns=2, width=7.4, height=3.9)
    x = np.arange(len(sums))
    largest = float((sums["prompt_tokens"] + sums["completion_tokens"]).max())
    scale, unit = (1e6, "millions") if largest >= 2e6 else (1e3, "thousands")
    floor = np.zeros(len(sums))
    parts = [
        ("prompt, from the cache", sums["cached_tokens"], SKY, "||"),
        ("prompt", sums["prompt_tokens"] - sums["cached_tokens"], BLUE, ""),
        ("completion", sums["completion_tokens"], ORANGE, "///"),
    ]
    for name, values, colour, hatch in parts:
        heights = values.to_numpy(float) / scale
        tokens.bar(x, heights, 0.7, floor, color=colour, hatch=hatch, edgecolor="white", label=name)
        floor += heights
    tokens.set_ylabel(f"tokens ({unit})")
    tokens.set_title("Tokens by role")
    tokens.legend(loc="best")
    dollars.bar(x, sums["cost_usd"].to_numpy(float), 0.7, color=GREEN)
    dollars.set_ylabel("cost (US dollars)")
    dollars.set_title("Dollars by role")
    unpriced = int(sums["unpriced_calls"].sum())
    notes = [] if sums["cost_usd"].any() else ["no dollars were spent"]
    notes += [f"{unpriced} calls without a known price\ncount as 0 dollars"] if unpriced else []
    if notes:
        text = "\n".join(notes)
        dollars.text(0.98, 0.95, text, transform=dollars.transAxes, ha="right", va="top", fontsize=8, color="#555555")
    if not sums["cost_usd"].any():
        dollars.set_yticks([0])
        dollars.set_ylim(0, 1)
    for axes in (tokens, dollars):
        axes.set_xticks(x, order)
        axes.grid(axis="x", visible=False)
    return finish(figure, False)
