"""Profiles before and after: counters of baseline and best kernel beside the least that the task needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from accelopt_ray.analysis.progress import SEARCH, correct_latency_ms
from accelopt_ray.analysis.tasks import run_task
from nkibench.hardware import HARDWARE
from nkibench.roofline import Bound, Counts, bound
from nkibench.task import TaskError

BASELINE, BEST = "baseline", "best"


@dataclass(frozen=True)
class Need:
    """What a task cannot avoid.

    Attributes:
        counts: Operations and elements.
        roofline: The roofline time and what sets it; None when the device's peak rates are not known.
    """

    counts: Counts
    roofline: Bound | None


def task_need(settings: Mapping[str, object], task: str, device: str) -> Need | None:
    """Looks a task's unavoidable work up.

    Args:
        settings: The run's settings, as a row of ``Trajectory.settings``.
        task: The task's name.
        device: Device that evaluated (``sim-trn1``, ``trn1``); peak rates are found by the part behind ``sim-``.

    Returns:
        None when the task's files are not here or declare no counts.
    """
    try:
        counts = run_task(settings, task).counts
    except (TaskError, OSError):
        return None
    if counts is None:
        return None
    hardware = HARDWARE.get(device.removeprefix("sim-"))
    return Need(counts, None if hardware is None else bound(counts, hardware))


def profiles(evaluations: pd.DataFrame, counters: pd.DataFrame, settings: pd.DataFrame) -> pd.DataFrame:
    """Puts the profiles of each search's baseline and best kernel side by side.

    Returns:
        Two rows for each run and task, ``kernel`` being ``baseline`` or ``best``: ``run_id``, ``task``, ``kernel``,
        ``candidate_id``, ``latency_ms``, ``percent_of_peak``, ``simulated``, ``roofline_ms``, ``limit`` (what sets the
        roofline: ``memory``, ``matmul`` or ``vector``), ``minimum_hbm_bytes``, ``hbm_bytes``, ``traffic_efficiency``
        (minimum over actual HBM traffic; NaN when either is unknown), and one column for each counter.
    """
    columns = [*SEARCH, "iteration", "evaluation_id", "candidate_id", "percent_of_peak", "device", "simulated"]
    frame = evaluations[columns].assign(latency_ms=correct_latency_ms(evaluations)).dropna(subset=["latency_ms"])
    first = frame[frame["iteration"].eq(0)].drop_duplicates(SEARCH).assign(kernel=BASELINE)
    best = frame.sort_values("latency_ms", kind="stable").drop_duplicates(SEARCH).assign(kernel=BEST)
    rows = pd.concat([first, best[best["run_id"].isin(first["run_id"])]], ignore_index=True)
    rows["order"] = rows["kernel"].eq(BEST)
    rows = rows.sort_values([*SEARCH, "order"], kind="stable", ignore_index=True).drop(columns="order")
    by_run = settings.to_dict(orient="index")
    needs = {
        (run_id, task, device): task_need({str(k): v for k, v in by_run.get(run_id, {}).items()}, task, device)
        for run_id, task, device in rows[[*SEARCH, "device"]].fillna("").drop_duplicates().itertuples(index=False)
    }
    found = [needs[key] for key in rows[[*SEARCH, "device"]].fillna("").itertuples(index=False, name=None)]
    rows["roofline_ms"] = [need.roofline.latency_ms if need and need.roofline else float("nan") for need in found]
    rows["limit"] = [need.roofline.limit if need and need.roofline else "" for need in found]
    rows["minimum_hbm_bytes"] = [need.counts.hbm_bytes if need else float("nan") for need in found]
    known = counters[counters["evaluation_id"].isin(rows["evaluation_id"])]
    rows = rows.merge(known.drop_duplicates(["run_id", "evaluation_id"]), on=["run_id", "evaluation_id"], how="left")
    missing = pd.Series(float("nan"), index=rows.index)
    rows["hbm_bytes"] = rows.get("hbm_read_bytes", missing) + rows.get("hbm_write_bytes", missing)
    rows["traffic_efficiency"] = rows["minimum_hbm_bytes"] / rows["hbm_bytes"].where(rows["hbm_bytes"].gt(0))
    return rows.drop(columns=["iteration", "evaluation_id", "device"])
