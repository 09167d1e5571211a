"""What a run's log says of an evaluation and of a candidate, and that a line can be taken apart again."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray", reason="Ray is not installed")

from accelopt_ray.devices.protocol import Limits
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult, TaskRef
from accelopt_ray.outcome import EvaluationOutcome
from actors.events import EventLog
from actors.host import InProcess
from actors.logs import fields, run_formatter
from actors.services import RayServices

_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^\s=\"]+)(?: |\Z)')


def taken_apart(line: str) -> dict[str, str]:
    return {name: json.loads(value) if value.startswith('"') else value for name, value in _FIELD.findall(line)}


@given(
    st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), st.text(st.characters(codec="utf-8"), max_size=30))
)
def test_a_line_can_be_taken_apart(values: dict[str, str]):
    line = fields(**values)
    assert "\n" not in line and "\r" not in line
    assert taken_apart(line) == values


class Nothing:
    async def commit(self, table: str, rows: object) -> None: ...

    async def add(self, table: str, rows: object) -> None: ...


class Pool:
    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        return EvaluationResult(
            job.evaluation_id, EvaluationOutcome.TIMEOUT, "timeout", core="core 3 of abcd", run_s=2.5, queue_s=0.25
        )


def test_each_evaluation_and_each_candidate_has_a_line_with_run_and_core(caplog: pytest.LogCaptureFixture):
    services = RayServices(
        None,  # type: ignore[arg-type]
        Pool(),  # type: ignore[arg-type]
        InProcess(Nothing()),
        lambda table, rows: None,
        EventLog(),
        Limits(),
        {},
    )
    row = {
        "task": "silu",
        "iteration": 2,
        "evaluation_id": "silu.kab",
        "candidate_id": "silu.i2.c0.p1.a0",
        "core": "core 3 of abcd",
        "outcome": "timeout",
        "reason": "timeout",
        "source_sha256": "f" * 64,
    }

    async def both() -> None:
        job = EvaluationJob("silu.kab", TaskRef("silu"), "", "neuron", "strict", task_name="silu", iteration=2)
        await services.evaluate(job)
        await services.record("evaluations", [row])
        await services.record("plans", [{"plan_id": "p"}])

    with caplog.at_level(logging.INFO, logger="accelopt_ray"):
        asyncio.run(both())
    evaluated, concluded = [taken_apart(run_formatter("my run").format(record)) for record in caplog.records]
    for line in (evaluated, concluded):
        assert line["run"] == "my run"
        assert (line["core"], line["evaluation"], line["outcome"]) == ("core 3 of abcd", "silu.kab", "timeout")
        assert (line["task"], line["iteration"]) == ("silu", "2")
    assert (evaluated["run_s"], evaluated["queue_s"]) == ("2.5", "0.25")
    assert concluded["candidate"] == "silu.i2.c0.p1.a0"
