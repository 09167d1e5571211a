"""Configurations against each other: geometric means over tasks, bootstrap intervals over seeds.

A replicate is what one seed did in all tasks of a group. Its speed-up and percent of peak are geometric means over the
tasks, as NKIBench reports averages; its cost and evaluations are sums. The group's value is the mean over its
replicates (geometric for the first two), the interval a percentile bootstrap over replicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from accelopt_ray.analysis.trajectory import Trajectory
from accelopt_ray.devices.registry import latency_kind
from accelopt_ray.outcome import UserError

RESAMPLES = 10_000
CONFIDENCE = 0.95

_NOT_COMPARED = ("seed", "output", "task", "slots")
_NOT_COMPARED_BELOW = ("shape.", "prices.")
_GEOMETRIC = ("speedup", "percent_of_peak", "baseline_percent_of_peak")
MEASURES = (*_GEOMETRIC, "cost_usd", "tokens", "evaluations", "evaluations_to_reach", "cost_usd_to_reach")


def bootstrap_interval(
    values: np.ndarray, *, geometric: bool = False, resamples: int = RESAMPLES, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """Percentile bootstrap interval of a mean; the same for the same values, since its stream is fixed.

    Args:
        values: One value a replicate; NaN are left out.
        geometric: Whether the mean is geometric; values are then positive.
        resamples: Bootstrap samples.
        confidence: Probability that the interval is to cover.

    Returns:
        Its ends; NaN with fewer than two values, which tell nothing of the spread.
    """
    known = np.asarray(values, float)
    known = known[~np.isnan(known)]
    if len(known) < 2:
        return float("nan"), float("nan")
    scaled = np.log(known) if geometric else known
    draws = np.random.default_rng(0).integers(0, len(scaled), (resamples, len(scaled)))
    low, high = np.quantile(scaled[draws].mean(axis=1), [(1 - confidence) / 2, (1 + confidence) / 2])
    return (float(np.exp(low)), float(np.exp(high))) if geometric else (float(low), float(high))


def configuration_groups(trajectory: Trajectory, by: str | None = None) -> dict[str, str]:
    """Sorts runs by how they were configured.

    Args:
        trajectory: The runs.
        by: A setting (``preset``, ``search.beam_width``, ``models.executor``); by default all that differ, apart from
            seed, task and where the run was written.

    Returns:
        Run to the name of its group, which tells the settings that make it.

    Raises:
        UserError: No run has such a setting.
    """
    configurations = trajectory.configurations
    names = list(dict.fromkeys(name for each in configurations.values() for name in each))
    if by is not None and by not in names:
        close = sorted(name for name in names if by.rpartition(".")[2] in name)
        hint = f": did you mean {' or '.join(close[:3])}?" if close else ": see Trajectory.settings for all"
        raise UserError(f"no run has a setting {by}{hint}")
    chosen = [by] if by is not None else _differing(list(configurations.values()), names)
    return {
        run_id: ", ".join(f"{name.rpartition('.')[2]}={_text(each, name)}" for name in chosen) or "all runs"
        for run_id, each in configurations.items()
    }


def _differing(configurations: Sequence[Mapping[str, object]], names: Sequence[str]) -> list[str]:
    """Settings that make a difference. One that some runs lack, being of an older version, does not by that alone."""
    compared = [name for name in names if name not in _NOT_COMPARED and not name.startswith(_NOT_COMPARED_BELOW)]
    differing = [name for name in compared if len({_text(each, name) for each in configurations if name in each}) > 1]
    presets = {_text(each, "preset") for each in configurations}
    # A preset stands for the settings that it fixes: with it they would only repeat themselves.
    repeats = all(
        len({_text(each, name) for each in configurations if _text(each, "preset") == preset}) == 1
        for preset in presets
        for name in differing
    )
    return ["preset"] if "preset" in differing and repeats else differing


def _text(configuration: Mapping[str, object], name: str) -> str:
    value = configuration.get(name)
    return "none" if value is None else str(value)


def compare(trajectory: Trajectory, groups: Mapping[str, str], reach: float | None = None) -> pd.DataFrame:
    """Compares groups of runs.

    Args:
        trajectory: The runs.
        groups: Run to the name of its group; other runs are left out.
        reach: Speed-up for ``evaluations_to_reach``; by default the least that any group has come to, rounded down to
            two decimals, so that every group has a number.

    Returns:
        One row a group, in the order of ``groups``, with ``group``, ``replicates``, ``tasks``, ``simulated``,
        ``latency_kind`` (the least trustworthy of its runs), ``reach``, ``reached`` (share of the searches that got
        there), and for each of :data:`MEASURES` the value and its interval in ``<measure>_low`` and
        ``<measure>_high``. ``evaluations_to_reach`` and ``cost_usd_to_reach`` are means over the searches that got
        there.

    Raises:
        UserError: None of the runs has a correct kernel.
    """
    searches = trajectory.summary()
    searches = searches[searches["run_id"].isin(list(groups)) & searches["speedup"].notna()].copy()
    if searches.empty:
        raise UserError("none of the runs has a correct kernel yet: there is nothing to compare")
    searches["group"] = searches["run_id"].map(dict(groups))
    seeds = trajectory.runs.set_index("run_id")["seed"]
    searches["seed"] = searches["run_id"].map(seeds).fillna(-1).astype("int64")
    # A seed that was run twice is two replicates.
    searches["repetition"] = searches.groupby(["group", "task", "seed"]).cumcount()
    searches = searches.rename(columns={"best_percent_of_peak": "percent_of_peak"})
    searches["evaluations"] = searches["evaluations_run"]
    if reach is None:
        final = searches.groupby("group")["speedup"].apply(_geometric_mean)
        reach = float(np.floor(final.min() * 100) / 100)
    searches = searches.merge(_reaching(trajectory, reach), on=["run_id", "task"], how="left")
    names = list(dict.fromkeys(groups.values()))
    rows = [_row(name, searches[searches["group"].eq(name)], reach) for name in names]
    return pd.DataFrame([row for row in rows if row])


def _row(name: str, searches: pd.DataFrame, reach: float) -> dict[str, object]:
    if searches.empty:
        return {}
    replicates = searches.groupby(["seed", "repetition"], sort=True)
    row: dict[str, object] = {
        "group": name,
        "replicates": replicates.ngroups,
        "tasks": searches["task"].nunique(),
        "simulated": bool(searches["simulated"].fillna(False).any()),
        # The least trustworthy kind comes last in the alphabet.
        "latency_kind": max(map(latency_kind, searches["device"].fillna(""), searches["simulated"].fillna(False))),
        "reach": reach,
        "reached": float(searches["evaluations_to_reach"].notna().mean()),
    }
    for measure in MEASURES:
        geometric = measure in _GEOMETRIC
        if geometric:
            values = replicates[measure].apply(_geometric_mean).to_numpy(float)
            row[measure] = _geometric_mean(pd.Series(values))
        else:
            sums = measure in ("cost_usd", "tokens", "evaluations")
            values = (replicates[measure].sum() if sums else replicates[measure].mean()).to_numpy(float)
            row[measure] = float(np.nanmean(values)) if not np.isnan(values).all() else float("nan")
        row[f"{measure}_low"], row[f"{measure}_high"] = bootstrap_interval(values, geometric=geometric)
    return row


def _reaching(trajectory: Trajectory, reach: float) -> pd.DataFrame:
    points = trajectory.best_by_cost()
    there = points[points["best_speedup"].ge(reach)].drop_duplicates(["run_id", "task"])
    columns = {"evaluations": "evaluations_to_reach", "cost_usd": "cost_usd_to_reach"}
    return there[["run_id", "task", *columns]].rename(columns=columns)


def _geometric_mean(values: pd.Series[float]) -> float:
    known = values.dropna()
    return float(np.exp(np.log(known.astype("float64")).mean())) if len(known) else float("nan")
