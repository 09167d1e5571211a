"""What a run tells of itself while it goes on: where each task stands, what has happened, the best kernel as a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from accelopt_ray.tally import Tally, best_kernel_file
from actors.events import Event, EventLog
from actors.services import Rows

TOLD_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "evaluations": (
        "task",
        "candidate_id",
        "parent_candidate_id",
        "iteration",
        "outcome",
        "reason",
        "error_text",
        "device",
        "simulated",
        "latency_ms",
        "percent_of_peak",
        "speedup_vs_baseline",
        "source_sha256",
        "check",
    ),
    "llm_calls": (
        "task",
        "role",
        "iteration",
        "outcome",
        "error_text",
        "cost_usd",
        "prompt_tokens",
        "completion_tokens",
    ),
    "iterations": ("task", "iteration", "beam_candidate_ids"),
}
"""Tables that watchers hear of, and the columns that are worth sending; the texts stay in the trajectory."""


class Telling:
    """Takes in what a run records."""

    def __init__(self, run_id: str, tasks: Iterable[str], output: Path, events: EventLog) -> None:
        """Starts with nothing recorded.

        Args:
            run_id: The run.
            tasks: Names of its tasks.
            output: Its folder, where the best kernels are kept up to date.
            events: Where watchers hear of it.
        """
        self._run_id = run_id
        self._output = output
        self._events = events
        self.tallies = {name: Tally() for name in tasks}
        """Where each task stands."""

    def recorded(self, table: str, rows: Rows) -> None:
        """Takes rows in and tells of them."""
        before = {name: tally.best for name, tally in self.tallies.items()}
        self.count(table, rows)
        for row in rows if table in TOLD_COLUMNS else ():
            self._events.append(Event(table, {name: row.get(name) for name in TOLD_COLUMNS[table]}))
        for name, tally in self.tallies.items():
            if table == "sources" or tally.best is not before[name]:
                self._write_best(name)

    def count(self, table: str, rows: Rows) -> None:
        """Takes rows in silently."""
        for row in rows:
            tally = self.tallies.get(str(row["task"]))
            if tally is not None:
                tally.record(table, [row])

    def _write_best(self, name: str) -> None:
        text = best_kernel_file(self.tallies[name], self._run_id, name)
        if text is None:
            return
        path = self._output / "best" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
