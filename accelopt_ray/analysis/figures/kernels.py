"""Figures of what the kernels came to: fast@p, outcomes, plans, memory."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from accelopt_ray.analysis.figures.style import (
    BLUE,
    GREEN,
    GREY,
    LINES,
    ORANGE,
    OUTCOME_LOOKS,
    VERMILION,
    any_simulated,
    finish,
    new_figure,
    nothing_to_show,
    styled,
)
from accelopt_ray.outcome import EvaluationOutcome


@styled
def fast_at_p(summary: pd.DataFrame, evaluations: pd.DataFrame) -> Figure:
    """fast@p: the share that is correct and at least p times as fast as the baseline, over p.

    Args:
        summary: As of ``Trajectory.summary()``: the best kernel of each search.
        evaluations: Their evaluations: each generated kernel, failed ones included, duplicates left out.
    """
    attempts = evaluations[evaluations["call_id"].notna() & ~evaluations["outcome"].isin(["duplicate", "cancelled"])]
    kernels = attempts["speedup_vs_baseline"].fillna(0.0).to_numpy(float)
    best = summary["speedup"].fillna(0.0).to_numpy(float)
    if not len(best):
        return nothing_to_show("no evaluations yet")
    figure, (axes,) = new_figure()
    highest = max(1.2, float(np.max(best)) * 1.08)
    axes.step(*_shares(best, 0.5, highest), color=BLUE, label=f"best kernel of each search ({len(best)})")
    if len(kernels):
        label = f"every generated kernel ({len(kernels)})"
        axes.step(*_shares(kernels, 0.5, highest), linestyle=LINES[1], color=VERMILION, label=label)
    axes.axvline(1.0, color=GREY, linewidth=0.8)
    axes.set_ylim(0, 104)
    axes.set_xlim(0.5, highest)
    axes.set_xlabel("p: speed-up over the baseline (×)")
    axes.set_ylabel("correct and at least p times as fast (%)")
    axes.set_title("fast@p")
    axes.legend(loc="lower left")
    return finish(figure, any_simulated(evaluations))


def _shares(speedups: np.ndarray, lowest: float, highest: float) -> tuple[np.ndarray, np.ndarray]:
    """Values of p where the share of speed-ups of at least p falls, and that share in percent up to each of them."""
    p = np.unique(np.concatenate([speedups[(speedups > lowest) & (speedups < highest)], [lowest, highest]]))
    below = np.searchsorted(np.sort(speedups), p, side="left")
    return p, 100 * (1 - below / len(speedups))


@styled
def outcome_mix(outcomes: pd.DataFrame) -> Figure:
    """Shares of outcomes by iteration and by the model that wrote the kernels.

    Args:
        outcomes: As of ``Trajectory.outcomes()``.
    """
    written = outcomes[outcomes["model"].ne("")]
    if written.empty:
        return nothing_to_show("no kernel was generated yet")
    figure, (left, right) = new_figure(columns=2, width=7.4, height=3.9)
    order = [name for name in OUTCOME_LOOKS if name in set(written["outcome"])]
    order += sorted(set(written["outcome"]) - set(order))
    _stack(left, written, "iteration", order)
    _stack(right, written, "model", order)
    left.set_xlabel("iteration")
    left.set_ylabel("share of the generated kernels (%)")
    left.set_title("Outcomes by iteration")
    right.set_title("Outcomes by model")
    right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return finish(figure, False)


def _stack(axes: Axes, outcomes: pd.DataFrame, by: str, order: list[str]) -> None:
    table = outcomes.pivot_table(index=by, columns="outcome", values="count", aggfunc="sum", fill_value=0)
    totals = table.sum(axis=1)
    shares = table.div(totals, axis=0) * 100
    x = np.arange(len(shares))
    floor = np.zeros(len(shares))
    for name in order:
        if name not in shares.columns:
            continue
        colour, hatch = OUTCOME_LOOKS.get(name, (GREY, ""))
        heights = shares[name].to_numpy(float)
        axes.bar(x, heights, 0.8, floor, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, label=name)
        floor += heights
    few = len(shares) <= 8
    labels = [f"{value}\nn={int(total)}" if few else str(value) for value, total in totals.items()]
    step = 1 + len(labels) // 17
    axes.set_xticks(x[::step], labels[::step])
    axes.set_ylim(0, 100)
    axes.set_xlim(-0.6, max(len(x), 2) - 0.4)
    axes.grid(axis="x", visible=False)


@styled
def memory_effect(memory_use: pd.DataFrame, memory_size: pd.DataFrame) -> Figure:
    """Size of the experience memory, and the speed-ups of attempts whose planners saw it.

    Args:
        memory_use: As of ``Trajectory.memory_use()``.
        memory_size: As of :func:`accelopt_ray.analysis.memory_use.memory_size`.
    """
    if memory_use.empty:
        return nothing_to_show("no attempts yet")
    figure, (size, effect) = new_figure(columns=2, width=7.4, height=3.9)
    means = memory_size.groupby("iteration")[["positive", "negative"]].mean()
    x = means.index.to_numpy(int)
    size.bar(x, means["positive"], 0.7, color=GREEN, label="positive")
    size.bar(
        x, means["negative"], 0.7, means["positive"], color=ORANGE, hatch="///", edgecolor="white", label="negative"
    )
    size.set_xlabel("iteration")
    size.set_ylabel("items held at the iteration's end (mean)")
    size.set_title("Experience memory")
    size.xaxis.set_major_locator(MaxNLocator(integer=True))
    size.yaxis.set_major_locator(MaxNLocator(integer=True))
    size.legend(loc="upper left")
    known = memory_use.dropna(subset=["speedup_vs_parent"])
    levels = [("none", known["memory_items"].eq(0)), ("1 to 4", known["memory_items"].between(1, 4))]
    levels += [("5 to 8", known["memory_items"].between(5, 8)), ("9 or more", known["memory_items"].ge(9))]
    used = [(name, known.loc[rows.to_numpy(bool), "speedup_vs_parent"].to_numpy(float)) for name, rows in levels]
    used = [(name, values) for name, values in used if len(values)]
    if used:
        _boxes(effect, used)
    effect.set_xlabel("experience items that the planner was shown")
    effect.set_ylabel("speed-up over the parent (×)")
    effect.set_title("Attempts that proved correct")
    return finish(figure, any_simulated(memory_use))


@styled
def plan_categories(effects: pd.DataFrame) -> Figure:
    """How often plans of each category were tried, and what they brought.

    Args:
        effects: As of :func:`accelopt_ray.analysis.plan_categories.plan_effects`.
    """
    if effects.empty:
        return nothing_to_show("no attempts at plans yet")
    order = effects["category"].value_counts()
    figure, (counts, gains) = new_figure(columns=2, width=7.4, height=1.5 + 0.34 * len(order))
    rows = np.arange(len(order))[::-1]
    correct = effects[effects["outcome"].eq(EvaluationOutcome.CORRECT)]["category"].value_counts().reindex(order.index)
    duplicate = effects[effects["outcome"].eq("duplicate")]["category"].value_counts().reindex(order.index)
    good, same = correct.fillna(0).to_numpy(float), duplicate.fillna(0).to_numpy(float)
    rest = order.to_numpy(float) - good - same
    counts.barh(rows, good, 0.7, color=GREEN, label="correct")
    counts.barh(rows, same, 0.7, good, color="#BBBBBB", hatch="||", edgecolor="white", label="duplicate")
    counts.barh(rows, rest, 0.7, good + same, color=VERMILION, hatch="///", edgecolor="white", label="failed")
    counts.set_yticks(rows, list(order.index))
    counts.set_xlabel("attempts")
    counts.set_title("Plan categories (by key words)")
    counts.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*counts.get_legend_handles_labels(), loc="outside upper right", ncols=3)
    known = effects.dropna(subset=["speedup_vs_parent"])
    used = [
        (row, known[known["category"].eq(name)]["speedup_vs_parent"].to_numpy(float))
        for row, name in zip(rows, order.index, strict=True)
    ]
    used = [(row, values) for row, values in used if len(values)]
    if used:
        gains.boxplot(
            [values for _, values in used],
            positions=[int(row) for row, _ in used],
            orientation="horizontal",
            widths=0.55,
            showfliers=False,
            medianprops={"color": VERMILION},
        )
        for row, values in used:
            gains.plot(
                values, np.full(len(values), row) + _jitter(len(values)), "o", color=BLUE, alpha=0.4, markersize=3
            )
    gains.axvline(1.0, color=GREY, linewidth=0.8)
    gains.set_yticks(rows, [""] * len(rows))
    gains.set_ylim(counts.get_ylim())
    gains.set_xlabel("speed-up over the parent (×)")
    gains.set_title("What they brought")
    return finish(figure, any_simulated(effects))


def _boxes(axes: Axes, groups: list[tuple[str, np.ndarray]]) -> None:
    positions = list(range(len(groups)))
    axes.boxplot(
        [values for _, values in groups],
        positions=positions,
        widths=0.5,
        showfliers=False,
        medianprops={"color": VERMILION},
    )
    for position, (_, values) in zip(positions, groups, strict=True):
        axes.plot(position + _jitter(len(values)), values, "o", color=BLUE, alpha=0.4, markersize=3, rasterized=True)
    axes.set_xticks(positions, [f"{name}\nn={len(values)}" for name, values in groups])
    axes.axhline(1.0, color=GREY, linewidth=0.8)


def _jitter(count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.16, 0.16, count)
