"""Measures how fast a search completes evaluations: ``python -m experiments.benchmark_pipeline``.

The real engine searches with emulated models and devices, whose work is nothing but waiting: a model call takes
20 ± 15 s, a compilation 8 ± 6 s and a run 2 s (normally distributed, at least 1 s). Time is virtual, so that the
result depends on the order of things alone and not on this machine; ``--scale 0.01`` sleeps in real time instead,
scaled down, so that what the engine itself costs counts as well.

Orders compared, with the same sizes, and evaluations counted until the last one of the search is over:

``barrier``
    Preset ``published`` with ``stage_order: barriers``: all parents are measured, then all plans are made, all kernels
    written, all evaluated, all lessons drawn. Each kernel is compiled and run by the one process that holds the device,
    as in the public scripts.
``barrier, compile workers``
    The same, with all compilations side by side on compile workers before the first run. Kinder than the scripts.
``public scripts``
    Preset ``published`` with ``stage_order: published``, which goes plan by plan, as the scripts do.
``beyond, q = 1`` and ``beyond, q = 0.8``
    Ours, with compile workers, without and with selecting before everybody has arrived.
``..., no compile workers``
    Ours where whoever holds the device compiles, as on the device ``neuron``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from accelopt_ray.agents.parsing import extract_kernel
from accelopt_ray.agents.rendering import PromptLibrary
from accelopt_ray.evaluation.records import CheckStage, EvaluationJob, EvaluationResult
from accelopt_ray.outcome import CallOutcome, EvaluationOutcome
from accelopt_ray.search.loop import run_search
from accelopt_ray.search.presets import preset_settings
from accelopt_ray.search.services import ModelCall, ModelReply
from accelopt_ray.search.settings import SearchSettings, StageOrder
from experiments.virtual_time import run_in_virtual_time

TARGET_RATIO = 2.5
BASELINE = "barrier"
OURS = "beyond, q = 0.8"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Emulation:
    """What is emulated.

    Attributes:
        model_s: Mean and standard deviation of a model call's length.
        compile_s: Of a compilation's.
        run_s: Length of a run on the device.
        shortest_s: No call or compilation is shorter.
        slots: Devices.
        compilers: Compile workers; 0 where whoever holds the device compiles.
        scale: Real seconds for each emulated one.
    """

    model_s: tuple[float, float] = (20.0, 15.0)
    compile_s: tuple[float, float] = (8.0, 6.0)
    run_s: float = 2.0
    shortest_s: float = 1.0
    slots: int = 1
    compilers: int = 10
    scale: float = 1.0


@dataclass(frozen=True)
class Task:
    """A task whose kernels carry their latency in their text."""

    name: str = "emulated"
    entry: str = "kernel"

    def reference_source(self) -> str:
        """Stands in the prompts."""
        return "def forward(x):\n    return x\n"

    def baseline_source(self) -> str:
        """Takes 100 ms."""
        return _kernel(100.0, "baseline")


@dataclass
class EmulatedWorld:
    """Services whose work is waiting. Replies and latencies depend on what is asked alone."""

    emulation: Emulation
    seed: int
    serial_compilations: bool = False
    attempts: int = 0
    last_evaluation_s: float = 0.0
    device_s: float = 0.0
    model_calls: int = 0
    _compiling: int = 0
    _compiled: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._devices = asyncio.Semaphore(self.emulation.slots)
        self._compilers = asyncio.Semaphore(self.emulation.compilers) if self.emulation.compilers else None

    async def complete(self, call: ModelCall) -> ModelReply:
        """Waits and answers; no two plans and no two kernels are the same."""
        self.model_calls += 1
        draw = random.Random(f"{self.seed}:{call.call_id}")
        await self._wait(self._length_s(draw, self.emulation.model_s))
        text = f"Plan {call.call_id}: {' '.join(f'{draw.getrandbits(32):x}' for _ in range(8))}"
        if call.role == "executor":
            latency_ms = float(str(extract_kernel(call.user_prompt).code).split("latency_ms = ")[1].split("\n")[0])
            text = f"```python\n{_kernel(latency_ms * draw.uniform(0.8, 1.3), call.call_id)}```"
        elif call.role == "summarizer":
            text = f"Title: {text}\n{text}"
        return ModelReply(call.call_id, CallOutcome.OK, reply_text=text)

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        """Compiles and runs by waiting: first for a worker, then as long as it takes."""
        draw = random.Random(f"{self.seed}:{job.evaluation_id}")
        compile_s = self._length_s(draw, self.emulation.compile_s)
        if self._compilers is not None:
            self._compiling += 1
            async with self._compilers:
                await self._wait(compile_s)
            self._compiling -= 1
            if not self._compiling:
                self._compiled.set()
                self._compiled.clear()
            while self.serial_compilations and self._compiling:
                await self._compiled.wait()
            compile_s = 0.0
        async with self._devices:
            await self._wait(compile_s + self.emulation.run_s)
        self.device_s += compile_s + self.emulation.run_s
        if job.stage is not CheckStage.REST and not job.evaluation_id.endswith(".parent"):
            self.attempts += 1
        self.last_evaluation_s = asyncio.get_running_loop().time()
        latency_ms = float(job.source.split("latency_ms = ")[1].split("\n")[0])
        return EvaluationResult(
            job.evaluation_id, EvaluationOutcome.CORRECT, check_stage=job.stage, latency_ms=latency_ms
        )

    async def record(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Keeps nothing."""

    def progress(self, event: str, **values: object) -> None:
        """Tells nobody."""

    def _length_s(self, draw: random.Random, length_s: tuple[float, float]) -> float:
        return max(self.emulation.shortest_s, draw.gauss(*length_s))

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.emulation.scale)


@dataclass(frozen=True)
class Order:
    """One way of going about a search.

    Attributes:
        name: What it is called in the table.
        settings: How to search.
        compile_on_device: Whether whoever holds the device compiles.
        serial_compilations: Whether all compilations of a stage come before its runs.
    """

    name: str
    settings: SearchSettings
    compile_on_device: bool = False
    serial_compilations: bool = False


@dataclass(frozen=True)
class Measured:
    """One search.

    Attributes:
        evaluations: Kernels evaluated.
        elapsed_s: How long it took to the end of the last evaluation, in emulated seconds.
        device_share: Share of that time in which devices worked.
        model_calls: Model calls.
    """

    evaluations: int
    elapsed_s: float
    device_share: float
    model_calls: int

    @property
    def per_hour(self) -> float:
        """Evaluations in an hour."""
        return 3600 * self.evaluations / self.elapsed_s


def orders(sizes: Mapping[str, Any]) -> list[Order]:
    """The orders to compare, the baseline first."""
    published = preset_settings("published", **sizes, staged_check=False)
    barrier = published.replace(stage_order=StageOrder.BARRIERS)
    beyond = preset_settings("beyond", **sizes)
    eager = beyond.replace(selection_share=0.8)
    return [
        Order(BASELINE, barrier, compile_on_device=True),
        Order("barrier, compile workers", barrier, serial_compilations=True),
        Order("public scripts", published.replace(stage_order=StageOrder.PUBLISHED), compile_on_device=True),
        Order("beyond, q = 1", beyond),
        Order(OURS, eager),
        Order(f"{OURS}, whole checks", eager.replace(staged_check=False)),
        Order(f"{OURS}, no compile workers", eager, compile_on_device=True),
    ]


def measured(order: Order, emulation: Emulation, seed: int) -> Measured:
    """Runs one search."""
    if order.compile_on_device:
        emulation = replace(emulation, compilers=0)

    async def search() -> Measured:
        world = EmulatedWorld(emulation, seed, order.serial_compilations)
        loop = asyncio.get_running_loop()
        started = loop.time()
        await run_search(order.settings.replace(seed=seed), Task(), world, prompts=PromptLibrary())
        elapsed_s = (world.last_evaluation_s - started) / emulation.scale
        return Measured(world.attempts, elapsed_s, world.device_s / (elapsed_s * emulation.slots), world.model_calls)

    run = run_in_virtual_time if emulation.scale == 1.0 else _run_in_real_time
    return run(search())


def _run_in_real_time(main: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(main)


def _kernel(latency_ms: float, note: str) -> str:
    return f"def kernel(a):\n    note = {note!r}\n    latency_ms = {latency_ms!r}\n    return a\n"


def main() -> int:
    """Prints a line for each order; returns 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=20, help="searches of each order, each with the next seed")
    parser.add_argument("--slots", type=int, default=Emulation.slots)
    parser.add_argument("--compilers", type=int, default=Emulation.compilers)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="real seconds for each emulated one; 1 is virtual time"
    )
    for option, size in (("-T", 6), ("-B", 3), ("-N", 4), ("-K", 1)):
        parser.add_argument(option, type=int, default=size)
    arguments = parser.parse_args()
    emulation = Emulation(slots=arguments.slots, compilers=arguments.compilers, scale=arguments.scale)
    sizes = {
        "iterations": arguments.T,
        "beam_width": arguments.B,
        "plans_per_candidate": arguments.N,
        "attempts_per_plan": arguments.K,
    }
    print(
        f"T={arguments.T} B={arguments.B} N={arguments.N} K={arguments.K}, {emulation.slots} device(s), "
        f"{emulation.compilers} compile workers, {arguments.searches} searches each, "
        f"{'virtual time' if emulation.scale == 1.0 else f'real time at a scale of {emulation.scale:g}'}"
    )
    rates: dict[str, float] = {}
    for order in orders(sizes):
        found = [measured(order, emulation, seed) for seed in range(arguments.searches)]
        rates[order.name] = statistics.mean(each.per_hour for each in found)
        print(
            f"{order.name:<36} {statistics.mean(each.evaluations for each in found):>6.1f} evaluations in "
            f"{statistics.mean(each.elapsed_s for each in found):>7.1f} s, {rates[order.name]:>6.1f} an hour, devices "
            f"busy {statistics.mean(each.device_share for each in found):>4.0%}, "
            f"{rates[order.name] / rates[BASELINE]:>5.2f} times the barrier",
            flush=True,
        )
    ratio = rates[OURS] / rates[BASELINE]
    print(f"beyond with q = 0.8 against the barrier: {ratio:.2f} times (target: at least {TARGET_RATIO:g})")
    return 0 if ratio >= TARGET_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
