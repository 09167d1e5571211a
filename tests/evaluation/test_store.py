"""What makes two evaluations the same, and what the store answers."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult, TaskRef
from accelopt_ray.evaluation.store import EvaluationStore, evaluate_once, evaluation_key
from accelopt_ray.outcome import EvaluationOutcome
from nkibench.task import load_task

SILU = load_task("silu")
JOB = EvaluationJob(
    "first", TaskRef("silu", tuple(SILU.reduced.items())), SILU.baseline_source(), "sim-trn1", "published"
)
DEVICE = get_device("sim-trn1")


class Evaluator:
    """Counts how often it is asked."""

    def __init__(self, outcome: EvaluationOutcome = EvaluationOutcome.CORRECT) -> None:
        self.outcome = outcome
        self.calls = 0

    def __call__(self, job: EvaluationJob) -> EvaluationResult:
        self.calls += 1
        return EvaluationResult(job.evaluation_id, self.outcome, latency_ms=1.25, latency_samples_ms=(1.0, 1.5))


def changed(**changes: object) -> EvaluationJob:
    return dataclasses.replace(JOB, evaluation_id="second", **changes)


def test_the_same_kernel_is_answered_and_counted_as_such(tmp_path: Path):
    evaluator = Evaluator()
    first = evaluate_once(JOB, DEVICE, EvaluationStore(tmp_path), evaluator)
    second = evaluate_once(changed(), DEVICE, EvaluationStore(tmp_path), evaluator)
    third = evaluate_once(changed(), DEVICE, EvaluationStore(tmp_path), evaluator)
    assert evaluator.calls == 1
    assert first.answered_from == "" and second.answered_from == third.answered_from == "store:first"
    assert dataclasses.replace(second, evaluation_id="first", answered_from="") == first


def test_comments_and_layout_make_no_new_kernel():
    assert evaluation_key(changed(source=f"# a comment\n\n{JOB.source}"), DEVICE) == evaluation_key(JOB, DEVICE)


@pytest.mark.parametrize(
    "changes",
    [
        {"source": JOB.source.replace("nl.load", "nl.load ", 1) + "\nUNUSED = 1\n"},
        {"task": TaskRef("silu")},
        {"task": TaskRef("adamw", tuple(load_task("adamw").reduced.items()))},
        {"check": "strict"},
        {"seeds": (1, 2)},
        {"precision": "reduced", "check": "strict"},
    ],
)
def test_whatever_a_result_depends_on_makes_another_evaluation(changes: dict[str, object]):
    assert evaluation_key(changed(**changes), DEVICE) != evaluation_key(JOB, DEVICE)


def test_devices_and_versions_do_not_answer_for_each_other(monkeypatch: pytest.MonkeyPatch):
    before = evaluation_key(JOB, DEVICE)
    assert evaluation_key(JOB, get_device("sim-trn2")) != before
    monkeypatch.setattr("accelopt_ray.evaluation.store.code_version", lambda: "another")
    assert evaluation_key(JOB, DEVICE) != before


def test_a_text_that_the_check_refuses_is_not_answered_by_one_it_accepts(tmp_path: Path):
    refused = changed(source=f"'''float16 is faster'''\n{JOB.source}")
    assert evaluation_key(refused, DEVICE) is None
    evaluator = Evaluator(EvaluationOutcome.REJECTED)
    for _ in range(2):
        assert evaluate_once(refused, DEVICE, EvaluationStore(tmp_path), evaluator).answered_from == ""
    assert evaluator.calls == 2


@pytest.mark.parametrize(
    "outcome", [EvaluationOutcome.TIMEOUT, EvaluationOutcome.CRASHED, EvaluationOutcome.MEMORY_LIMIT]
)
def test_what_may_have_been_bad_luck_is_tried_again(tmp_path: Path, outcome: EvaluationOutcome):
    evaluator = Evaluator(outcome)
    for _ in range(2):
        evaluate_once(JOB, DEVICE, EvaluationStore(tmp_path), evaluator)
    assert evaluator.calls == 2


def test_a_damaged_file_costs_one_evaluation(tmp_path: Path):
    evaluator = Evaluator()
    evaluate_once(JOB, DEVICE, EvaluationStore(tmp_path), evaluator)
    (path,) = tmp_path.rglob("*.json")
    path.write_text(path.read_text()[:-10])
    evaluate_once(JOB, DEVICE, EvaluationStore(tmp_path), evaluator)
    assert evaluate_once(JOB, DEVICE, EvaluationStore(tmp_path), evaluator).answered_from == "store:first"
    assert evaluator.calls == 2


def test_many_writers_leave_one_whole_result(tmp_path: Path):
    store = EvaluationStore(tmp_path)
    result = Evaluator()(JOB)
    threads = [threading.Thread(target=store.put, args=("ab" * 32, result)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get("ab" * 32) == result
    assert len(list(tmp_path.rglob("*"))) == 2


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = evaluate_once(JOB, DEVICE, EvaluationStore(tmp_path / "file"), Evaluator())
    assert result.correct


def test_the_environment_switches_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("ACCELOPT_RAY_STORE", "off")
    assert EvaluationStore.from_environment() is None
    monkeypatch.setenv("ACCELOPT_RAY_STORE", str(tmp_path))
    found = EvaluationStore.from_environment()
    assert found is not None and found.folder == tmp_path
