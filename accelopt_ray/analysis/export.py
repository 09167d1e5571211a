"""What leaves a trajectory to be used elsewhere: best kernels with their provenance, and slow-fast pairs as data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from accelopt_ray.analysis.lineage import Step
from accelopt_ray.analysis.tasks import run_task
from accelopt_ray.analysis.torch_module import LayoutError, torch_module
from accelopt_ray.analysis.trajectory import Trajectory
from accelopt_ray.devices.registry import latency_kind
from accelopt_ray.outcome import UserError
from nkibench.task import TaskError

KERNEL, MODULE, PROVENANCE, PAIRS = "kernel.py", "module.py", "provenance.json", "pairs.jsonl"


@dataclass(frozen=True)
class Exported:
    """What was written for one task.

    Attributes:
        task: The task.
        run_id: The run with the fastest kernel.
        folder: Where it is.
        speedup: Over the baseline.
        kind: Whether that is ``measured`` or what kind of prediction, see
            :func:`~accelopt_ray.devices.registry.latency_kind`.
        no_module: Why there is no PyTorch module; empty when there is one.
    """

    task: str
    run_id: str
    folder: Path
    speedup: float
    kind: str
    no_module: str


def export(trajectory: Trajectory, folder: str | Path) -> list[Exported]:
    """Writes the best kernel of each task into a folder of its own, and all slow-fast pairs beside them.

    Each task's folder holds ``kernel.py``, ``provenance.json`` (run, configuration, check results, profile, descent
    with plans) and ``module.py`` (a PyTorch module for torch-neuronx); ``pairs.jsonl`` has a line for each experience
    item; see :func:`slow_fast_pairs`.

    Args:
        trajectory: One or many runs; of each task the fastest kernel of all runs is taken.
        folder: New or empty.

    Returns:
        What was written, by task.

    Raises:
        UserError: There is no correct kernel, or the folder cannot be used.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not empty: choose a new folder with --to")
    searches = trajectory.summary().dropna(subset=["speedup"])
    if searches.empty:
        raise UserError("there is no correct kernel to export yet")
    best = searches.sort_values("speedup", ascending=False, kind="stable").drop_duplicates("task").sort_values("task")
    try:
        target.mkdir(parents=True, exist_ok=True)
        exported = [
            _export_kernel(trajectory.select([str(run_id)]), str(run_id), str(task), target / str(task))
            for run_id, task in best[["run_id", "task"]].itertuples(index=False)
        ]
        with (target / PAIRS).open("w", encoding="utf-8") as stream:
            for pair in slow_fast_pairs(trajectory):
                stream.write(json.dumps(pair, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {target} ({error.strerror}): choose another folder with --to") from None
    return exported


def slow_fast_pairs(trajectory: Trajectory) -> Iterator[dict[str, object]]:
    """Yields the experience of all runs as pairs of kernels.

    Yields:
        ``run_id``, ``task``, ``iteration``, ``item_id``, ``kind``, ``speedup`` (slower latency over faster),
        ``slow_latency_ms``, ``fast_latency_ms``, ``slow_source``, ``fast_source``, ``title``, ``summary``,
        ``plan`` (that led from parent to child; for a negative item the child is the slow one), ``device``,
        ``simulated``. Pairs whose texts were not recorded are left out.
    """
    for run_id in trajectory.run_ids:
        one = trajectory.select([run_id])
        items = one.memory_items[one.memory_items["evicted_iteration"].isna()].drop_duplicates("item_id")
        if items.empty:
            continue
        evaluations = one.evaluations.dropna(subset=["source_sha256"]).drop_duplicates("candidate_id")
        kernels = {str(row["candidate_id"]): row for row in _records(evaluations)}
        texts = dict(zip(one.sources["source_sha256"], one.sources["source"], strict=True))
        plans = dict(zip(one.plans["plan_id"], one.plans["plan_text"], strict=True))
        for item in _records(items):
            slow = kernels.get(str(item["slow_candidate_id"]))
            fast = kernels.get(str(item["fast_candidate_id"]))
            if slow is None or fast is None:
                continue
            sources = texts.get(slow["source_sha256"]), texts.get(fast["source_sha256"])
            if None in sources:
                continue
            child = fast if item["kind"] == "positive" else slow
            yield {
                **{name: item[name] for name in ("run_id", "task", "iteration", "item_id", "kind", "speedup")},
                "slow_latency_ms": slow["latency_ms"],
                "fast_latency_ms": fast["latency_ms"],
                "slow_source": sources[0],
                "fast_source": sources[1],
                "title": item["title"],
                "summary": item["summary_text"],
                "plan": plans.get(child["plan_id"]),
                "device": fast["device"],
                "simulated": bool(slow["simulated"]) or bool(fast["simulated"]),
            }


def _export_kernel(trajectory: Trajectory, run_id: str, task: str, folder: Path) -> Exported:
    steps = trajectory.lineage(run_id, task)
    best = steps[-1]
    if not best.source:
        raise UserError(f"the text of {best.candidate_id} of run {run_id} is not in the trajectory: nothing to export")
    folder.mkdir()
    row = _best_row(trajectory, best)
    (folder / KERNEL).write_text(_header(best, row, run_id) + best.source, encoding="utf-8")
    try:
        (folder / MODULE).write_text(torch_module(run_task(_settings(trajectory, run_id), task)), encoding="utf-8")
        no_module = ""
    except (LayoutError, TaskError) as error:
        no_module = str(error)
    provenance = _provenance(trajectory, run_id, task, steps, row)
    text = json.dumps({**provenance, "no_module": no_module}, indent=2, ensure_ascii=False, default=str)
    (folder / PROVENANCE).write_text(text + "\n", encoding="utf-8")
    kind = latency_kind(row["device"], best.simulated)
    return Exported(task, run_id, folder, best.speedup_vs_baseline, kind, no_module)


def _best_row(trajectory: Trajectory, best: Step) -> dict[str, Any]:
    rows = trajectory.evaluations[trajectory.evaluations["candidate_id"].eq(best.candidate_id)]
    valid = rows[rows["outcome"].eq("correct")].sort_values("latency_ms", kind="stable")
    return _records(valid.head(1))[0]


def _header(best: Step, row: dict[str, Any], run_id: str) -> str:
    kind = latency_kind(row["device"], best.simulated)
    peak = "" if best.percent_of_peak is None else f", {best.percent_of_peak:.1f} % of peak"
    lines = [
        f"Kernel for task {row['task']}, found by accelopt-ray in run {run_id}, candidate {best.candidate_id}.",
        f"latency {best.latency_ms:.4f} ms, {kind} on {row['device']}{peak}; "
        f"{best.speedup_vs_baseline:.2f} times as fast as the baseline",
        f"passed the check '{row['check']}'; source sha256 {best.source_sha256} (without these lines)",
    ]
    if best.simulated:
        lines.append("A simulated latency is a model's prediction, not a result of a Trainium device.")
    return "".join(f"# {line}\n" for line in lines) + "\n"


def _provenance(
    trajectory: Trajectory, run_id: str, task: str, steps: list[Step], row: dict[str, Any]
) -> dict[str, object]:
    run = _records(trajectory.runs)[0] if len(trajectory.runs) else {}
    counters = trajectory.counters
    profile = counters[counters["evaluation_id"].eq(row["evaluation_id"])].drop(columns=["run_id", "evaluation_id"])
    checks = (
        "outcome",
        "check",
        "precision_tier",
        "latency_ms",
        "latency_samples_ms",
        "latency_spread",
        "percent_of_peak",
    )
    places = ("device", "simulated", "core", "fingerprint_sha256", "ended_at", "evaluation_id")
    samples = row.get("latency_samples_ms")
    return {
        "task": task,
        "run_id": run_id,
        "candidate_id": steps[-1].candidate_id,
        "source_sha256": steps[-1].source_sha256,
        "speedup_vs_baseline": steps[-1].speedup_vs_baseline,
        "simulated": steps[-1].simulated,
        "check": {**{name: row.get(name) for name in checks}, "latency_samples_ms": list(samples or [])},
        "measured": {name: row.get(name) for name in places},
        "profile": {
            name: value for each in _records(profile.head(1)) for name, value in each.items() if value is not None
        },
        "run": {
            "config": json.loads(run.get("config_json") or "{}"),
            "fingerprint": json.loads(run.get("fingerprint_json") or "{}"),
            **{name: run.get(name) for name in ("created_at", "preset", "seed", "config_sha256", "code_version")},
        },
        "lineage": [{**asdict(step), "source": None} for step in steps],
    }


def _settings(trajectory: Trajectory, run_id: str) -> dict[str, object]:
    settings = trajectory.settings
    return {str(name): value for name, value in settings.loc[run_id].items()} if run_id in settings.index else {}


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    plain = frame.astype("object")
    records = plain.where(plain.notna(), None).to_dict(orient="records")
    return [{str(name): value for name, value in record.items()} for record in records]
