"""Where a run stands follows from its rows alone."""

from __future__ import annotations

import ast

from accelopt_ray.cli.progress import Progress
from accelopt_ray.tally import Tally, best_kernel_file
from accelopt_ray.trajectory import text_sha256


def evaluation(
    name: str, iteration: int, outcome: str, latency_ms: float | None, source: str = ""
) -> dict[str, object]:
    return {
        "candidate_id": name,
        "iteration": iteration,
        "outcome": outcome,
        "latency_ms": latency_ms,
        "percent_of_peak": None if latency_ms is None else 50.0 / latency_ms,
        "device": "sim-trn1",
        "simulated": True,
        "check": "published",
        "source_sha256": text_sha256(source),
        "error_text": "",
    }


ROWS = [
    evaluation("b", 0, "correct", 2.0, "def kernel(): pass\n"),
    evaluation("wrong", 1, "incorrect", 0.1),
    evaluation("slow", 1, "correct", 3.0),
    evaluation("fast", 1, "correct", 1.0, "def kernel(x): pass\n"),
    evaluation("broken", 1, "compile_error", None),
]


def test_only_a_correct_kernel_becomes_best_however_fast_another_is():
    tally = Tally()
    tally.record("evaluations", ROWS)
    assert tally.baseline is not None
    assert tally.best is not None
    assert (tally.baseline.candidate_id, tally.best.candidate_id, tally.speedup) == ("b", "fast", 2.0)
    assert tally.outcomes == {"correct": 3, "incorrect": 1, "compile_error": 1}
    assert tally.evaluations == 5


def test_without_a_correct_baseline_there_is_no_speedup():
    tally = Tally()
    tally.record("evaluations", [evaluation("b", 0, "runtime_error", None)])
    assert (tally.best, tally.speedup) == (None, None)
    assert best_kernel_file(tally, "r", "silu") is None


def test_predictions_within_the_models_confidence_are_no_difference():
    for best_ms, expected in ((1.95, False), (1.0, True)):
        tally = Tally()
        rows = [evaluation("b", 0, "correct", 2.0), evaluation("fast", 1, "correct", best_ms)]
        tally.record("evaluations", [{**row, "prediction_confidence": 0.2} for row in rows])
        assert tally.predicted_to_differ is expected
        tally = Tally()
        tally.record("evaluations", rows)  # measured: what differs, differs
        assert tally.predicted_to_differ


def test_calls_add_up():
    tally = Tally()
    call = {"role": "planner", "outcome": "ok", "cost_usd": 0.5, "prompt_tokens": 3, "completion_tokens": 4}
    tally.record("llm_calls", [call, {**call, "role": "executor", "outcome": "error", "cost_usd": None}])
    assert (tally.cost_usd, tally.tokens, tally.failed_calls) == (0.5, 14, 1)
    assert tally.calls == {"planner": 1, "executor": 1}


def test_the_best_kernels_file_is_python_and_says_that_it_is_simulated():
    tally = Tally()
    tally.record("evaluations", ROWS)
    assert best_kernel_file(tally, "r", "silu") is None, "the text has not been recorded yet"
    tally.record("sources", [{"source": "def kernel(x): pass\n"}])
    text = best_kernel_file(tally, "run-1", "silu")
    assert text is not None
    assert [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)] == ["kernel"]
    for said in ("run-1", "candidate fast", "1.0000 ms, simulated on sim-trn1", "2.00 times", "check 'published'"):
        assert said in text


def test_progress_tells_baseline_improvements_iterations_and_failing_models_and_labels_what_is_simulated():
    lines: list[str] = []
    progress = Progress(lines.append, iterations=2)
    for row in ROWS:
        progress.event("evaluations", row)
    progress.event("iterations", {"iteration": 1, "beam_candidate_ids": ["fast"]})
    for _ in range(10):
        failed = {"role": "planner", "iteration": 1, "outcome": "error", "error_text": "no route to host"}
        progress.event("llm_calls", failed)
    text = [line.split("] ", 1)[1] for line in lines]
    assert text[0] == "baseline: 2.0000 ms, 25.0 % of peak (simulated, sim-trn1)"
    assert text[1] == "new best: 1.0000 ms, 50.0 % of peak (simulated, sim-trn1), 2.00x (fast)"
    assert text[2].startswith("iteration 1/2 done: kernels 3 correct")
    assert text[3:] == ["a call of the planner failed: no route to host"] * 3
    assert "2.00x" in progress.status()


def test_a_failing_baseline_is_told_with_its_text():
    lines: list[str] = []
    row = {**evaluation("b", 0, "compile_error", None), "error_text": "no such function nl.foo"}
    Progress(lines.append, 1).event("evaluations", row)
    assert "the baseline is not correct: compile_error no such function nl.foo" in lines[0]
