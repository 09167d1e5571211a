"""The world in memory with a run's folder: what the actors make durable is durable here, the rest dies with the run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from scripted_world import ScriptedTask, World

from accelopt_ray.agents.rendering import PromptLibrary
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.search.loop import run_search
from accelopt_ray.search.restore import Restored, restore
from accelopt_ray.search.result import SearchResult
from accelopt_ray.search.rows import call_row, call_start_row, result_row
from accelopt_ray.search.services import ModelCall, ModelReply
from accelopt_ray.search.settings import SearchSettings
from accelopt_ray.trajectory import TrajectoryWriter

PROMPTS = PromptLibrary()
RUN_ID = "run"


@dataclass
class StoredWorld(World):
    """Services over a folder.

    Attributes:
        folder: The run's folder.
        past: What an earlier session left.
        flush_every: Rows of the tables that are not committed at once, between two flushes.
    """

    folder: Path = Path()
    past: Restored | None = None
    flush_every: int = 7
    _writer: TrajectoryWriter | None = None
    _waiting: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)

    async def complete(self, call: ModelCall) -> ModelReply:
        asking = self.past.askings.get(call.call_id, 0) if self.past is not None else 0
        started_at = datetime.now(timezone.utc)
        self._step()
        self._write("call_starts", [call_start_row(call, asking, started_at)])
        reply = await super().complete(call)
        self._write("llm_calls", [call_row(call, reply, asking, started_at)])
        self._step()
        return reply

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        result = await super().evaluate(job)
        self._write("results", [result_row(job, result)])
        self._step()
        return result

    async def record(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        await super().record(table, rows)
        self._waiting += [(table, row) for row in rows]
        if len(self._waiting) >= self.flush_every:
            self.flush()

    def flush(self) -> None:
        """Makes every accepted row durable, table by table; a kill may come between two tables."""
        for table in sorted({table for table, _ in self._waiting}):
            self._step()
            self._write(table, [row for name, row in self._waiting if name == table])
            self._waiting = [(name, row) for name, row in self._waiting if name != table]

    def _write(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        if self._writer is None:
            self._writer = TrajectoryWriter(self.folder / "trajectory", RUN_ID)
        self._writer.write(table, rows)


def search_in(world: StoredWorld, settings: SearchSettings) -> SearchResult:
    """Runs a search, from what the world's folder holds on if it has a past."""
    if world.past is not None:
        lost = list(world.past.lost_calls)
        if lost:
            world._write("llm_calls", lost)
    history = world.past.history if world.past is not None else None
    result = asyncio.run(run_search(settings, ScriptedTask(), world, prompts=PROMPTS, history=history))
    world.flush()
    return result


def taken_up(folder: Path, seed: int = 0, **options: object) -> StoredWorld:
    """A new session over what an earlier one has left in a folder."""
    past = restore(folder, RUN_ID) if (folder / "trajectory").exists() else None
    return StoredWorld(folder=folder, past=past, delays=random.Random(seed), **options)  # type: ignore[arg-type]
