"""The lineage tree of a search: who descends from whom, where each stands in the picture, and its story."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from accelopt_ray.analysis.lineage import ancestry, plan_title, source_diff
from accelopt_ray.analysis.trajectory import Trajectory
from accelopt_ray.devices.registry import latency_kind

PLAN_CHARACTERS = 6_000
ERROR_CHARACTERS = 4_000
DIFF_CHARACTERS = 12_000

_FACTS = (
    "outcome",
    "reason",
    "check",
    "precision_tier",
    "device",
    "core",
    "latency_ms",
    "latency_spread",
    "speedup_vs_parent",
    "speedup_vs_baseline",
    "percent_of_peak",
    "compile_s",
    "run_s",
    "queue_s",
    "answered_from",
)


@dataclass(frozen=True)
class Tree:
    """A search's tree, ready for JSON.

    Attributes:
        run_id: The run.
        task: The task.
        nodes: One mapping a candidate: ``id``, ``parent``, ``iteration``, ``row`` (place in its column, in units of the
            distance between nodes), ``outcome``, ``selected``, ``path`` (on the way to the best), ``facts``,
            ``counters``, ``title``, and the texts ``plan``, ``diff``, ``error`` and ``output`` (the toolchain's).
        baseline_source: The baseline's text.
        best_source: The best kernel's text.
    """

    run_id: str
    task: str
    nodes: list[dict[str, object]]
    baseline_source: str
    best_source: str


def search_tree(trajectory: Trajectory, run_id: str, task: str) -> Tree:
    """Builds the tree of one search.

    Args:
        trajectory: Holds the run, best alone: all its texts are read.
        run_id: The run.
        task: The task.
    """
    evaluations = trajectory.evaluations
    rows = evaluations[evaluations["run_id"].eq(run_id) & evaluations["task"].eq(task)]
    # A repeated measurement is a row of a candidate that is there already.
    rows = rows.drop_duplicates("candidate_id")
    texts = _lookup(trajectory.sources, run_id, "source_sha256", "source")
    plans = _lookup(trajectory.plans, run_id, "plan_id", "plan_text")
    models = _lookup(trajectory.llm_calls, run_id, "call_id", "model")
    counters = _counters(trajectory.counters, run_id)
    outputs = _lookup(trajectory.toolchain_outputs, run_id, "evaluation_id", "toolchain_output")
    selections = trajectory.selections
    chosen = selections[selections["run_id"].eq(run_id) & selections["task"].eq(task)]
    selected = set(chosen["candidate_id"])
    valid = rows[rows["outcome"].eq("correct")].sort_values("latency_ms", kind="stable")
    best = str(valid["candidate_id"].iloc[0]) if len(valid) else ""
    path = set(ancestry(rows, best)) if best else set()
    sources = {str(row["candidate_id"]): texts.get(str(row["source_sha256"]), "") for row in _records(rows)}
    nodes: list[dict[str, object]] = []
    for row in _records(rows):
        candidate_id, parent = str(row["candidate_id"]), str(row["parent_candidate_id"] or "")
        plan = plans.get(str(row["plan_id"]), "")
        facts = {name: row[name] for name in _FACTS if row[name] not in (None, "")}
        facts["model"] = models.get(str(row["call_id"]), "")
        diff = source_diff(sources.get(parent, ""), sources[candidate_id], parent, candidate_id) if parent else ""
        nodes.append(
            {
                "id": candidate_id,
                "parent": parent,
                "iteration": row["iteration"] or 0,
                "outcome": row["outcome"] or "",
                "selected": candidate_id in selected,
                "path": candidate_id in path,
                "best": candidate_id == best,
                "kind": latency_kind(str(row["device"] or ""), bool(row["simulated"])),
                "title": plan_title(plan),
                "facts": facts,
                "counters": counters.get(str(row["evaluation_id"]), {}),
                "plan": _shortened(plan, PLAN_CHARACTERS),
                "diff": _shortened(diff, DIFF_CHARACTERS),
                "error": _shortened(str(row["error_text"] or ""), ERROR_CHARACTERS),
                "output": _shortened(outputs.get(str(row["evaluation_id"]), ""), ERROR_CHARACTERS),
            }
        )
    _place(nodes)
    first = next((str(node["id"]) for node in nodes if not node["parent"]), "")
    return Tree(run_id, task, nodes, sources.get(first, ""), sources.get(best, ""))


def _place(nodes: list[dict[str, object]]) -> None:
    """Gives each node its row: siblings together in the order of their parents, the fastest first; columns centred."""
    row_of: dict[str, float] = {}
    columns: dict[int, list[dict[str, object]]] = {}
    for node in nodes:
        columns.setdefault(_whole(node["iteration"]), []).append(node)

    def order(node: dict[str, object]) -> tuple[float, bool, float]:
        facts = node["facts"]
        speedup = facts.get("speedup_vs_baseline") if isinstance(facts, Mapping) else None
        return row_of.get(str(node["parent"]), 0.0), speedup is None, -float(speedup or 0.0)

    for iteration in sorted(columns):
        column = sorted(columns[iteration], key=order)
        for place, node in enumerate(column):
            node["row"] = place - (len(column) - 1) / 2
            row_of[str(node["id"])] = place - (len(column) - 1) / 2


def _records(frame: pd.DataFrame) -> list[dict[str, object]]:
    """Rows as plain values, None where one is missing."""
    plain = frame.drop(columns=["latency_samples_ms"]).astype("object")
    records = plain.where(plain.notna(), None).to_dict(orient="records")
    return [{str(name): _rounded(value) for name, value in record.items()} for record in records]


def _rounded(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _counters(counters: pd.DataFrame, run_id: str) -> dict[str, dict[str, float]]:
    rows = counters[counters["run_id"].eq(run_id)].drop_duplicates("evaluation_id")
    names = [name for name in rows.columns if name not in ("run_id", "evaluation_id")]
    found: dict[str, dict[str, float]] = {}
    for identifier, values in zip(rows["evaluation_id"], rows[names].to_numpy(float), strict=True):
        known = {
            name: float(f"{value:.6g}") for name, value in zip(names, values, strict=True) if not math.isnan(value)
        }
        if known:
            found[str(identifier)] = known
    return found


def _lookup(frame: pd.DataFrame, run_id: str, key: str, value: str) -> dict[str, str]:
    rows = frame[frame["run_id"].eq(run_id)].dropna(subset=[key, value])
    return {str(name): str(text) for name, text in zip(rows[key], rows[value], strict=True)}


def _shortened(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text
    return f"{text[:characters]}\n[{len(text) - characters} more characters are in the trajectory]"


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
