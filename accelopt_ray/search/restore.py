"""From a run's folder back to what its search has paid for.

Three things are on disk before they are used: that a call is about to be made (``call_starts``), its reply
(``llm_calls``) and an evaluation's result (``results``). Everything else follows from them, since a search derives the
name of whatever it asks from its position; rows that were recorded are only counted, so that none is recorded twice.

A reply with outcome ``error``, and an evaluation without a verdict, are final once their iteration has ended: the next
beam was chosen without them. In the iteration that was going on they are asked for again, and what had been recorded of
that iteration is withdrawn, since it may come out differently.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from accelopt_ray.evaluation.records import EvaluationResult
from accelopt_ray.outcome import CallOutcome, EvaluationOutcome, UserError
from accelopt_ray.search.candidates import is_void
from accelopt_ray.search.history import History
from accelopt_ray.search.rows import row_key
from accelopt_ray.search.services import ModelReply
from accelopt_ray.trajectory.digest import last_askings
from accelopt_ray.trajectory.pruning import drop_rows, remove_leftovers
from accelopt_ray.trajectory.reader import read_table
from accelopt_ray.trajectory.schema import TABLES
from accelopt_ray.trajectory.writer import PARTITION_KEY

_KEY_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "iterations": ("task", "iteration"),
    "plans": ("plan_id",),
    "sources": ("source_sha256",),
    "evaluations": ("evaluation_id",),
    "memory_items": ("item_id", "evicted_iteration"),
    "selections": ("task", "iteration", "rank"),
}
"""Tables that the search records, and the columns that name their rows."""

_DERIVED = ("evaluations", "selections", "memory_items")
"""Tables whose rows may depend on how another row's call ended; a plan or source depends on its own call alone."""

_REPLY_COLUMNS = tuple(field.name for field in dataclasses.fields(ModelReply))


@dataclass(frozen=True)
class Restored:
    """An interrupted run.

    Attributes:
        run_id: Its name.
        history: What its search need not ask again.
        askings: How often each call has been asked for, by call id.
        lost_calls: Rows for ``llm_calls`` of calls that were in flight at the end, priced at the mean of their role;
            empty once they have been recorded.
    """

    run_id: str
    history: History
    askings: Mapping[str, int]
    lost_calls: Sequence[Mapping[str, object]]


def stored_run_id(output: Path) -> str | None:
    """Names the run that a folder holds; None if it was killed before it had recorded anything.

    Raises:
        UserError: It holds several runs.
    """
    root = output / "trajectory"
    prefix = f"{PARTITION_KEY}="
    found = {path.name.removeprefix(prefix) for table in TABLES for path in root.glob(f"{table}/{prefix}*")}
    if len(found) > 1:
        raise UserError(f"{output} holds the runs {', '.join(sorted(found))}: resume takes the folder of a single run")
    return found.pop() if found else None


def restore(output: Path, run_id: str) -> Restored:
    """Reads a run's folder and makes it ready to be continued. The caller holds the run's lock.

    Raises:
        UserError: The folder holds no trajectory.
        NewerSchemaError: A newer version of accelopt-ray has written it.
        OSError: The file system refused.
    """
    root = output / "trajectory"
    remove_leftovers(root, run_id)
    ended: dict[str, int] = {}
    counted: dict[tuple[str, int], frozenset[str]] = {}
    for row in _rows(output, run_id, "iterations", ("task", "iteration", "counted_candidate_ids")):
        if row["counted_candidate_ids"] is not None:
            counted[row["task"], row["iteration"]] = frozenset(row["counted_candidate_ids"])
        ended[row["task"]] = max(row["iteration"], ended.get(row["task"], -1))
    calls = _rows(output, run_id, "llm_calls", ("task", "iteration", "role", "asking", "started_at", *_REPLY_COLUMNS))
    final = last_askings(calls)
    asked_again = [row for row in final if row["outcome"] == str(CallOutcome.ERROR) and not _has_ended(row, ended)]
    again_ids = {row["call_id"] for row in asked_again}
    results = _rows(output, run_id, "results", ("task", "iteration", "evaluation_id", "result_json", "ended_at"))
    evaluations = {row["evaluation_id"]: EvaluationResult.from_json(row["result_json"]) for row in results}
    made_again = [row for row in results if is_void(evaluations[row["evaluation_id"]]) and not _has_ended(row, ended)]
    for row in made_again:
        evaluations.pop(row["evaluation_id"], None)
    _drop_results(root, run_id, {row["evaluation_id"] for row in made_again})
    _withdraw(root, run_id, {str(row["task"]) for row in [*asked_again, *made_again]}, ended)
    starts = _rows(output, run_id, "call_starts", ("task", "iteration", "call_id", "asking", "role", "started_at"))
    lost = _lost_calls(starts, calls)
    used = {_asking(row) for row in final if row["call_id"] not in again_ids}
    lost_cost: dict[str, float] = defaultdict(float)
    for row in [*lost, *(call for call in calls if _asking(call) not in used)]:
        lost_cost[row["task"]] += row["cost_usd"] or 0.0
    askings: Counter[str] = Counter()
    for call_id, asking in map(_asking, [*calls, *starts]):
        askings[call_id] = max(askings[call_id], asking + 1)
    evaluated = _rows(output, run_id, "evaluations", ("evaluation_id", "candidate_id", "call_id", "outcome"))
    evaluated = [row for row in evaluated if row["call_id"] is not None]  # of attempts, not of repeated measurements
    plans = _rows(output, run_id, "plans", ("plan_id", "repeats_plan_id"))
    duplicate = str(EvaluationOutcome.DUPLICATE)
    history = History(
        replies={str(row["call_id"]): _reply(row) for row in final if row["call_id"] not in again_ids},
        evaluations=evaluations,
        recorded=frozenset(
            (table, row_key(table, row))
            for table, columns in _KEY_COLUMNS.items()
            for row in _rows(output, run_id, table, columns)
        ),
        ended_iterations=ended,
        lost_cost_usd=lost_cost,
        counted=counted,
        owners={row["evaluation_id"]: row["candidate_id"] for row in evaluated if row["outcome"] != duplicate},
        duplicates=frozenset(row["candidate_id"] for row in evaluated if row["outcome"] == duplicate),
        repeats={row["plan_id"]: row["repeats_plan_id"] for row in plans},
        elapsed_s=_elapsed_s(
            output, run_id, [row["started_at"] for row in calls] + [row["ended_at"] for row in results]
        ),
    )
    return Restored(run_id, history, askings, lost)


def _rows(output: Path, run_id: str, table: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(output, table, run_id, columns=list(columns)).to_pylist()
    return rows


def _has_ended(row: Mapping[str, Any], ended: Mapping[str, int]) -> bool:
    return bool(row["iteration"] <= ended.get(row["task"], -1))


def _asking(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["call_id"], row["asking"] or 0


def _drop_results(root: Path, run_id: str, evaluation_ids: set[str]) -> None:
    if evaluation_ids:
        drop_rows(root, run_id, "results", ["evaluation_id"], lambda row: row["evaluation_id"] in evaluation_ids)


def _withdraw(root: Path, run_id: str, tasks: set[str], ended: Mapping[str, int]) -> None:
    """Drops what was recorded of the going iteration of tasks in which calls are asked again."""
    if not tasks:
        return

    def going(row: Mapping[str, Any]) -> bool:
        last = max(row["iteration"], row.get("evicted_iteration") or 0)
        return row["task"] in tasks and last > ended.get(row["task"], -1)

    for table in _DERIVED:
        columns = ["task", "iteration", *(["evicted_iteration"] if table == "memory_items" else [])]
        drop_rows(root, run_id, table, columns, going)


def _lost_calls(starts: Iterable[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    answered = {_asking(row) for row in calls}
    costs: dict[str, list[float]] = defaultdict(list)
    models: dict[str, Counter[str]] = defaultdict(Counter)
    for row in calls:
        if row["outcome"] in (str(CallOutcome.OK), str(CallOutcome.TRUNCATED)):
            costs[row["role"]].append(row["cost_usd"] or 0.0)
            models[row["role"]][row["model"] or ""] += 1
    lost: list[dict[str, Any]] = []
    for start in starts:
        if _asking(start) in answered:
            continue
        known = costs[start["role"]]
        lost.append(
            {
                **start,
                "outcome": str(CallOutcome.LOST),
                "error_text": "in flight when the run ended; priced at the mean of its role's calls",
                "model": models[start["role"]].most_common(1)[0][0] if known else "",
                "cost_usd": sum(known) / len(known) if known else 0.0,
                "price_known": bool(known),
                "usage_estimated": True,
            }
        )
    return lost


def _reply(row: Mapping[str, Any]) -> ModelReply:
    values = {name: row[name] for name in _REPLY_COLUMNS if row[name] is not None}
    return ModelReply(**{**values, "outcome": CallOutcome(row["outcome"])})


def _elapsed_s(output: Path, run_id: str, moments: Iterable[datetime | None]) -> float:
    """Adds up the sessions' lengths: each from its start to the last thing recorded before the next one's."""
    starts = [row["created_at"] for row in _rows(output, run_id, "runs", ("created_at",))]
    starts += [row["resumed_at"] for row in _rows(output, run_id, "resumes", ("resumed_at",))]
    known = sorted(moment for moment in moments if moment is not None)
    begins = sorted(start for start in starts if start is not None)
    total_s = 0.0
    for number, begin in enumerate(begins):
        end = begins[number + 1] if number + 1 < len(begins) else None
        during = [moment for moment in known if moment >= begin and (end is None or moment < end)]
        if during:
            total_s += (during[-1] - begin).total_seconds()
    return total_s
