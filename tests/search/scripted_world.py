"""A world in memory for whole searches: models and a device that answer from the text they are given, at any moment.

A kernel's cost is written in its source and is its latency in milliseconds. The executor multiplies its parent's cost
by a factor drawn from the call's own seed, so that equal calls get equal replies in any order.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from accelopt_ray.agents.parsing import extract_kernel
from accelopt_ray.evaluation.records import CheckStage, EvaluationJob, EvaluationResult
from accelopt_ray.outcome import CallOutcome, EvaluationOutcome
from accelopt_ray.search.history import History
from accelopt_ray.search.rows import row_key
from accelopt_ray.search.services import ModelCall, ModelReply

VOLATILE = ("started_at", "ended_at")


def kernel_source(cost: float, note: str = "") -> str:
    return (
        f"import neuronxcc.nki as nki\n\n\n@nki.jit\ndef kernel(a):\n    cost = {cost!r}{note}\n    return a * cost\n"
    )


def cost_of(source: str) -> float:
    match = re.search(r"\w+ = ([0-9.]+)", source)
    assert match is not None, source
    return float(match[1])


@dataclass(frozen=True)
class ScriptedTask:
    name: str = "toy"
    entry: str = "kernel"
    cost: float = 100.0

    def reference_source(self) -> str:
        return "def forward(x):\n    return x * 1.0\n"

    def baseline_source(self) -> str:
        return kernel_source(self.cost)


class KilledError(BaseException):
    """The process dies here."""


@dataclass
class World:
    """Services in memory.

    Attributes:
        delays: Draws how long each answer takes, in turns of the event loop.
        factors: What an executor may multiply its parent's cost by.
        failures: Share of planner and executor calls that fail.
        simulated: Whether latencies are predictions, which are never predicted again.
        noise: Relative noise of repeated measurements.
        hidden_faults: Share of kernels that only the rest of the check finds incorrect.
        dies_after: Durable steps until the process dies.
    """

    delays: random.Random = field(default_factory=lambda: random.Random(0))
    longest_delay: int = 0
    factors: Sequence[float] = (0.8, 0.9, 0.95, 1.0, 1.1, 1.3)
    failures: float = 0.0
    bad_kernels: float = 0.2
    simulated: bool = True
    noise: float = 0.0
    hidden_faults: float = 0.0
    dies_after: int | None = None
    calls: list[ModelCall] = field(default_factory=list)
    jobs: list[EvaluationJob] = field(default_factory=list)
    rests: list[EvaluationJob] = field(default_factory=list)
    replies: dict[str, ModelReply] = field(default_factory=dict)
    results: dict[str, EvaluationResult] = field(default_factory=dict)
    rows: dict[str, dict[str, Mapping[str, object]]] = field(default_factory=dict)
    events: list[tuple[str, dict[str, object]]] = field(default_factory=list)

    async def complete(self, call: ModelCall) -> ModelReply:
        self.calls.append(call)
        await self._delay()
        reply = self.answer(call)
        self._step()
        assert call.call_id not in self.replies, "asked twice"
        self.replies[call.call_id] = reply
        return reply

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        (self.rests if job.stage is CheckStage.REST else self.jobs).append(job)
        await self._delay()
        result = self.measure(job)
        self._step()
        assert job.evaluation_id not in self.results, "evaluated twice"
        self.results[job.evaluation_id] = result
        return result

    async def record(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        await self._delay()
        self._step()
        for row in rows:
            known = self.rows.setdefault(table, {})
            key = row_key(table, row)
            assert key not in known, f"{table} {key} recorded twice"
            known[key] = row

    def progress(self, event: str, **values: object) -> None:
        self.events.append((event, values))

    def answer(self, call: ModelCall) -> ModelReply:
        """The model: a pure function of the call."""
        draw = random.Random(call.seed)
        if call.role != "summarizer" and draw.random() < self.failures:
            return ModelReply(call.call_id, CallOutcome.ERROR, error_text="status 500")
        text = f"Plan {draw.randrange(1000)}: use fewer passes."
        if call.role in ("executor", "fixer"):
            parent = extract_kernel(call.user_prompt).code
            assert parent is not None
            text = self._kernel_reply(cost_of(parent) * draw.choice(list(self.factors)), draw)
        elif call.role == "summarizer":
            text = "No optimization found" if draw.random() < 0.2 else f"Title: Lesson {draw.randrange(100)}\nDo less."
        return ModelReply(call.call_id, CallOutcome.OK, reply_text=text, prompt_tokens=10, cost_usd=0.01)

    def _kernel_reply(self, cost: float, draw: random.Random) -> str:
        if draw.random() < self.bad_kernels:
            return draw.choice(["Sorry, nothing.", "```python\ndef kernel(a:\n```", f"```\n{kernel_source(0.0)}```"])
        # Some copies differ in their words alone.
        return f"```python\n{kernel_source(round(cost, 3), draw.choice(['', '  # same', '  # again']))}```"

    def measure(self, job: EvaluationJob) -> EvaluationResult:
        """The device: a pure function of the job."""
        cost = cost_of(job.source)
        if cost == 0.0:
            return EvaluationResult(job.evaluation_id, EvaluationOutcome.COMPILE_ERROR, error_text="boom")
        whole = EvaluationResult(job.evaluation_id, EvaluationOutcome.CORRECT)
        if job.stage is not CheckStage.FIRST and cost < 100.0 and random.Random(cost).random() < self.hidden_faults:
            whole = replace(whole, outcome=EvaluationOutcome.INCORRECT, reason="relative_l2")
        if job.stage is CheckStage.REST:
            return replace(whole, check_stage=CheckStage.REST)
        wobble = 1 + self.noise * (random.Random(job.evaluation_id).random() - 0.5)
        return replace(
            whole,
            check_stage=job.stage,
            latency_ms=cost * wobble,
            percent_of_peak=1000 / cost,
            simulated=self.simulated,
            counters={"hbm_read_bytes": cost * 10, "hfu_estimated_percent": 0.5},
        )

    def history(self) -> History:
        """What is durable."""
        recorded = frozenset((table, key) for table, rows in self.rows.items() for key in rows)
        return History(dict(self.replies), dict(self.results), recorded)

    def trajectory(self) -> dict[str, dict[str, dict[str, object]]]:
        """All rows by key, times left out."""
        return {
            table: {key: {name: row[name] for name in row if name not in VOLATILE} for key, row in sorted(rows.items())}
            for table, rows in sorted(self.rows.items())
        }

    def named(self, event: str) -> list[dict[str, object]]:
        return [values for name, values in self.events if name == event]

    async def _delay(self) -> None:
        for _ in range(self.delays.randint(0, self.longest_delay)):
            await asyncio.sleep(0)

    def _step(self) -> None:
        if self.dies_after is not None:
            if self.dies_after == 0:
                raise KilledError
            self.dies_after -= 1
