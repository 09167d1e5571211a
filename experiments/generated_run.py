"""A generated run: rows as a search would write them, for benchmarks and tests of the analysis at any size.

Nothing in it was measured; its device is named ``sim-generated`` and every row is marked as simulated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from accelopt_ray.trajectory import TrajectoryWriter, text_sha256
from nkibench.task import load_task

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
DEVICE = "sim-generated"

_FAILURES = (
    ("compile_error", "error: Not Supported: partition dimension 256 exceeds 128\nkernel.py:41: nl.load(x[...])"),
    ("compile_error", "SyntaxError: invalid syntax (kernel.py, line 17)"),
    ("incorrect", "output 0: relative error 0.31 exceeds 2e-05 (seed 21)"),
    ("timeout", "compiling took longer than 120 s"),
    ("no_code", "the reply holds no code block that defines kernel"),
)
_IDEAS = (
    "Fuse the multiply into the activation so that one instruction does both",
    "Keep the weights resident in SBUF instead of a reload in every block",
    "Hoist the load of the gamma vector out of the loop over row tiles",
    "Use wider tiles so that each DMA transfer moves more contiguous bytes",
    "Move the reduction from the vector engine to the tensor engine instead",
    "Interchange the loops so that the spill of the accumulator disappears",
)


@dataclass
class _Kernel:
    candidate_id: str
    parent_id: str
    plan_id: str
    latency_ms: float
    source: str


def generate_run(
    folder: Path,
    *,
    evaluations: int = 60,
    run_id: str = "silu-generated",
    task: str = "silu",
    preset: str = "paper",
    seed: int = 0,
    price_usd: float = 0.001,
    finished: bool = True,
) -> None:
    """Writes a run.

    Args:
        folder: Its output folder.
        evaluations: Attempts at plans, besides the baseline.
        run_id: Its name.
        task: A built-in task.
        preset: Named in the run's row and configuration.
        seed: Of everything random.
        price_usd: Dollars a call; 0 for unpriced calls.
        finished: Whether its last iteration ended.
    """
    rng = random.Random(f"{run_id} {seed}")
    writer = TrajectoryWriter(folder / "trajectory", run_id)
    beam_width, plans, attempts = 6, 12, 2
    iterations = max(1, -(-evaluations // (beam_width * plans * attempts)))
    sizes = {"iterations": iterations, "beam_width": beam_width, "plans_per_candidate": plans}
    search = {**sizes, "attempts_per_plan": attempts}
    config = {"task": task, "shape": {}, "device": DEVICE, "preset": preset, "seed": seed, "search": search}
    writer.write(
        "runs",
        [
            {
                "created_at": START,
                "preset": preset,
                "seed": seed,
                "device": DEVICE,
                "models": dict.fromkeys(("planner", "executor", "summarizer"), "generated"),
                "config_json": json.dumps(config),
                "config_sha256": text_sha256(json.dumps(config)),
                "code_version": "generated",
                "fingerprint_json": json.dumps({"device": DEVICE}),
            }
        ],
    )
    source = load_task(task).baseline_source()
    baseline = _Kernel(f"{task}.i0.c0", "", "", 2.0, source)
    clock = START + timedelta(seconds=10)
    writer.write("sources", [{"task": task, "iteration": 0, "source": source}])
    writer.write("evaluations", [_evaluation(baseline, task, 0, None, clock, "correct", "", baseline, rng)])
    _select(writer, task, 0, [baseline], clock, clock)
    beam, memory, remaining = [baseline], [], evaluations
    for iteration in range(1, iterations + 1):
        started = clock
        batch = _Batch(writer, task, iteration, baseline, price_usd, rng)
        per_slot = min(remaining, beam_width * plans * attempts) // len(beam)
        for slot, parent in enumerate(beam):
            count = min(per_slot + (slot < min(remaining, beam_width * plans * attempts) % len(beam)), remaining)
            clock = batch.expand(slot, parent, count, attempts, [item for item, _ in memory], clock)
        remaining -= len(batch.rows["evaluations"])
        memory = batch.learn(memory)
        batch.write()
        last = iteration == iterations
        if last and not finished:
            return
        beam = sorted([*beam, *batch.correct], key=lambda kernel: kernel.latency_ms)[:beam_width]
        _select(writer, task, iteration, beam, started, clock)


class _Batch:
    """Rows of one iteration."""

    def __init__(
        self,
        writer: TrajectoryWriter,
        task: str,
        iteration: int,
        baseline: _Kernel,
        price_usd: float,
        rng: random.Random,
    ) -> None:
        self._writer, self._task, self._iteration = writer, task, iteration
        self._baseline, self._price_usd, self._rng = baseline, price_usd, rng
        self.correct: list[_Kernel] = []
        self.rows: dict[str, list[dict[str, object]]] = {
            name: [] for name in ("plans", "sources", "evaluations", "llm_calls", "memory_items")
        }

    def expand(
        self, slot: int, parent: _Kernel, count: int, attempts: int, memory: Sequence[str], clock: datetime
    ) -> datetime:
        """Adds ``count`` attempts at plans for a candidate; returns the time when the last was final."""
        rng, task, iteration = self._rng, self._task, self._iteration
        for number in range(count):
            plan, attempt = divmod(number, attempts)
            plan_id = f"{task}.i{iteration}.c{slot}.p{plan}"
            idea = rng.choice(_IDEAS)
            if attempt == 0:
                call_id = f"{plan_id}.planner"
                text = f"**{idea}.**\n\n{_prose(rng)}"
                row = {"plan_id": plan_id, "parent_candidate_id": parent.candidate_id, "call_id": call_id}
                self._add("plans", {**row, "sample_index": plan, "plan_text": text, "memory_item_ids": list(memory)})
                self._call(call_id, "planner", 9_000, 600, clock)
            candidate_id = f"{plan_id}.a{attempt}"
            self._call(f"{candidate_id}.executor", "executor", 6_000, 1_800, clock)
            outcome, error = ("correct", "") if rng.random() < 0.55 else rng.choice(_FAILURES)
            if rng.random() < 0.08:
                outcome, error = "duplicate", ""
            gain = 1 + max(-0.25, rng.gauss(0.0, 0.06)) * min(1.0, 3.0 / iteration)
            latency_ms = max(0.95, parent.latency_ms / gain)
            kernel = _Kernel(candidate_id, parent.candidate_id, plan_id, latency_ms, _mutated(parent.source, rng, idea))
            clock += timedelta(seconds=rng.uniform(0.5, 4.0))
            self._add("sources", {"source": kernel.source})
            call = f"{candidate_id}.executor"
            row = _evaluation(kernel, task, iteration, call, clock, outcome, error, self._baseline, rng, parent)
            self._add("evaluations", row)
            if outcome == "correct":
                self.correct.append(kernel)
        return clock

    def learn(self, memory: list[tuple[str, dict[str, object]]]) -> list[tuple[str, dict[str, object]]]:
        """Lets the iteration's fastest kernels enter the memory and its oldest items leave; returns what stays."""
        for rank, kernel in enumerate(sorted(self.correct, key=lambda each: each.latency_ms)[:4]):
            item_id = f"{self._task}.i{self._iteration}.m{rank}"
            pair = (kernel.parent_id, kernel.candidate_id)
            row: dict[str, object] = {
                "item_id": item_id,
                "kind": "positive" if rank else "negative",
                "slow_candidate_id": pair[0 if rank else 1],
                "fast_candidate_id": pair[1 if rank else 0],
                "speedup": 1.1,
                "title": _IDEAS[rank],
                "summary_text": f"Title: {_IDEAS[rank]}",
                "call_id": f"{item_id}.summarizer",
            }
            self._add("memory_items", row)
            memory = [*memory, (item_id, row)]
        for _, row in memory[:-16]:
            self._add("memory_items", {**row, "evicted_iteration": self._iteration})
        return memory[-16:]

    def write(self) -> None:
        """Makes the rows durable."""
        for table, rows in self.rows.items():
            self._writer.write(table, rows)

    def _add(self, table: str, row: dict[str, object]) -> None:
        self.rows[table].append({"task": self._task, "iteration": self._iteration, **row})

    def _call(self, call_id: str, role: str, prompt_tokens: int, completion_tokens: int, clock: datetime) -> None:
        self._add(
            "llm_calls",
            {
                "call_id": call_id,
                "role": role,
                "model": "generated",
                "endpoint": "http://127.0.0.1:1/v1",
                "system_prompt": f"You are the {role}.",
                "user_prompt": "Make the kernel faster.",
                "reply_text": "...",
                "prompt_tokens": prompt_tokens,
                "cached_tokens": prompt_tokens // 2,
                "completion_tokens": completion_tokens,
                "reasoning_tokens": 0,
                "cost_usd": self._price_usd,
                "price_known": self._price_usd > 0,
                "latency_s": self._rng.uniform(1.0, 9.0),
                "retries": 0,
                "outcome": "ok",
                "started_at": clock,
            },
        )


def _evaluation(
    kernel: _Kernel,
    task: str,
    iteration: int,
    call_id: str | None,
    clock: datetime,
    outcome: str,
    error: str,
    baseline: _Kernel,
    rng: random.Random,
    parent: _Kernel | None = None,
) -> dict[str, object]:
    correct = outcome == "correct"
    latency_ms = kernel.latency_ms if correct else None
    busy = min(1.0, 0.9 / kernel.latency_ms)
    return {
        "task": task,
        "iteration": iteration,
        "evaluation_id": kernel.candidate_id,
        "candidate_id": kernel.candidate_id,
        "parent_candidate_id": kernel.parent_id or None,
        "plan_id": kernel.plan_id or None,
        "call_id": call_id,
        "source_sha256": text_sha256(kernel.source),
        "canonical_sha256": text_sha256(kernel.source),
        "outcome": outcome,
        "reason": "same_kernel" if outcome == "duplicate" else "",
        "error_text": error,
        "check": "published",
        "precision_tier": "fp32",
        "device": DEVICE,
        "simulated": True,
        "core": f"slot {rng.randrange(4)}",
        "latency_ms": latency_ms,
        "latency_samples_ms": [latency_ms] if correct else [],
        "latency_spread": 0.0 if correct else None,
        "baseline_latency_ms": baseline.latency_ms,
        "parent_latency_ms": parent.latency_ms if parent else None,
        "speedup_vs_parent": parent.latency_ms / kernel.latency_ms if parent and correct else None,
        "speedup_vs_baseline": baseline.latency_ms / kernel.latency_ms if correct else None,
        "percent_of_peak": 90.0 / kernel.latency_ms if correct else None,
        "counters": {
            "dma_active_time_percent": busy,
            "hbm_read_bytes": 120e6 * kernel.latency_ms,
            "hbm_write_bytes": 117e6,
            "scalar_engine_active_time_percent": 0.3 * busy,
            "spill_save_bytes": max(0.0, 4e6 * (kernel.latency_ms - 1.2)),
            "tensor_engine_active_time_percent": 0.0,
            "total_time": kernel.latency_ms / 1e3,
            "vector_engine_active_time_percent": 1.0 - 0.5 * busy,
        }
        if correct
        else {},
        "compile_s": rng.uniform(0.3, 1.2),
        "run_s": rng.uniform(0.5, 3.0),
        "queue_s": rng.uniform(0.0, 1.0),
        "answered_from": "silu.i0.c0" if outcome == "duplicate" else "",
        "ended_at": clock,
    }


def _select(
    writer: TrajectoryWriter, task: str, iteration: int, beam: Sequence[_Kernel], started: datetime, ended: datetime
) -> None:
    step = {"task": task, "iteration": iteration}
    ids = [kernel.candidate_id for kernel in beam]
    writer.write("iterations", [{**step, "started_at": started, "ended_at": ended, "beam_candidate_ids": ids}])
    rows = [
        {**step, "rank": rank, "candidate_id": kernel.candidate_id, "latency_ms": kernel.latency_ms, "rule": "paper"}
        for rank, kernel in enumerate(beam)
    ]
    writer.write("selections", rows)


def _prose(rng: random.Random) -> str:
    words = (
        "tile",
        "loop",
        "engine",
        "load",
        "store",
        "partition",
        "buffer",
        "narrow",
        "row",
        "column",
        "value",
        "shape",
    )
    sentences = [" ".join(rng.choices(words, k=12)).capitalize() + "." for _ in range(16)]
    return " ".join(sentences)


def _mutated(source: str, rng: random.Random, idea: str) -> str:
    lines = source.splitlines()
    at = rng.randrange(len(lines) // 2, len(lines))
    lines.insert(at, f"    # {idea} ({rng.randrange(10**9)})")
    if rng.random() < 0.5:
        lines.insert(rng.randrange(len(lines) // 2, len(lines)), f"    step_{rng.randrange(100)} = {rng.random()}")
    return "\n".join(lines) + "\n"
