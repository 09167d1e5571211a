"""Compiling ahead: what a compile worker makes reaches the slot, and its faults reach nobody else."""

from __future__ import annotations

import asyncio
import os
import sys
from functools import partial

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from accelopt_ray.devices.protocol import Artifact, Failure  # noqa: E402
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult, TaskRef  # noqa: E402
from accelopt_ray.outcome import EvaluationOutcome  # noqa: E402
from actors.compile_pool import CompilePool, start_compiler  # noqa: E402
from actors.pool import ProfilerPool  # noqa: E402
from actors.profiler import Compiled, start_profiler  # noqa: E402

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


class TwoStages:
    """Compiles as the source says; evaluates to what it was given."""

    def compile(self, job: EvaluationJob) -> Compiled:
        if job.source == "die":
            os._exit(1)
        if job.source == "fail":
            return Failure(EvaluationOutcome.COMPILE_ERROR, "told to")
        return Artifact("none", job.source.encode())

    def __call__(self, job: EvaluationJob, compiled: Compiled | None = None) -> EvaluationResult:
        if isinstance(compiled, Failure):
            return EvaluationResult(job.evaluation_id, compiled.outcome, compiled.reason, compiled.error_text)
        assert compiled is not None
        return EvaluationResult(job.evaluation_id, EvaluationOutcome.CORRECT, reason=compiled.payload.decode())


def test_slots_run_what_compile_workers_made_and_a_killer_costs_only_itself():
    async def scenario() -> list[EvaluationResult]:
        start, compiler = partial(start_profiler, TwoStages, False), partial(start_compiler, TwoStages, 0.5)
        pool = ProfilerPool([start(0)], start, compilers=CompilePool([compiler() for _ in range(2)], compiler))
        try:
            await pool.start()
            sources = ["a", "fail", "die", "b"]
            jobs = [EvaluationJob(f"e-{text}", TaskRef("silu"), text, "none", "published") for text in sources]
            return list(await asyncio.gather(*(pool.evaluate(job) for job in jobs)))
        finally:
            await pool.close()

    results = asyncio.run(scenario())
    assert [result.outcome for result in results] == ["correct", "compile_error", "crashed", "correct"]
    assert [result.reason for result in results] == ["a", "", "worker_lost", "b"]
