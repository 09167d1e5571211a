"""The published layout on disk, read unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nkibench.published import list_published
from nkibench.task import TaskError, load_suite, load_task

REFERENCE = """
import numpy as np

M = 64
N = 32

def get_inputs():
    return [np.random.normal(loc=0, scale=1.0, size=(M, N)).astype(np.float32)]

def forward(x):
    return x / (1 + np.exp(-x))

def transform_to_nki_inputs(inputs):
    return [np.reshape(inputs[0], (32, 2, 32))]

def transform_nki_outputs(k_res, ref):
    if not isinstance(k_res, tuple):
        k_res = (k_res,)
    refs = ref if isinstance(ref, tuple) else (ref,)
    return [np.reshape(v, r.shape) for v, r in zip(k_res, refs)]
"""
KERNEL = "import neuronxcc.nki as nki\n\n@nki.jit\ndef {entry}(x):\n    return x\n"


def write_suite(folder: Path, tasks: dict[str, Any] | None = None) -> Path:
    (folder / "reference").mkdir(parents=True)
    (folder / "kernels").mkdir()
    (folder / "reference" / "gate.py").write_text(REFERENCE, encoding="utf-8")
    (folder / "kernels" / "first.py").write_text(KERNEL.format(entry="kernel"), encoding="utf-8")
    (folder / "kernels" / "second.py").write_text(KERNEL.format(entry="optimized_kernel"), encoding="utf-8")
    (folder / "kernels" / "nameless.py").write_text(KERNEL.format(entry="main"), encoding="utf-8")
    summary = tasks or {
        "silu": task_entry({"0": ["first"]}),
        "gate": task_entry({"1": ["first", "second"], "2": ["second"]}),
    }
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return folder


def task_entry(cases: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "seed": "./seeds/any.yaml",
        "cases": {
            case: {
                "values": {"M": 64, "N": 32},
                "impls": [{"task": "./reference/gate.py", "kernel": f"./kernels/{kernel}.py"} for kernel in kernels],
            }
            for case, kernels in cases.items()
        },
    }


def test_a_task_runs_by_its_own_reference(tmp_path: Path) -> None:
    suite = write_suite(tmp_path / "suite")
    task = load_task(f"{suite}#silu")
    task.check()
    inputs = task.inputs(7)
    reference = task.forward(inputs)
    (kernel_input,) = task.kernel_inputs(inputs)
    assert task.input_specs() == (((32, 2, 32), "float32"),)
    (output,) = task.task_outputs([np.asarray(kernel_input)], reference)
    assert output.shape == (64, 32)
    assert task.baseline_source().startswith("import neuronxcc")


def test_tolerance_and_roofline_come_from_the_built_in_task_of_that_name(tmp_path: Path) -> None:
    suite = write_suite(tmp_path / "suite")
    known, unknown = load_task(f"{suite}#silu"), load_task(f"{suite}#gate:2")
    assert known.tolerance == 2e-5 and known.in_average
    assert known.counts is not None and known.counts.elements == 2 * 64 * 32
    assert unknown.counts is None and unknown.tolerance == 2e-5


def test_cases_and_implementations_have_unique_names(tmp_path: Path) -> None:
    suite = write_suite(tmp_path / "suite")
    names = [case.name for case in list_published(suite)]
    assert names == ["silu", "gate:1:0", "gate:1:1", "gate:2"]
    tasks = load_suite(suite / "summary.json")
    assert [task.entry for task in tasks] == ["kernel", "kernel", "optimized_kernel", "optimized_kernel"]
    assert [load_task(task.location) for task in tasks] == tasks


def test_its_shapes_are_fixed(tmp_path: Path) -> None:
    suite = write_suite(tmp_path / "suite")
    with pytest.raises(TaskError, match="get_inputs takes no parameters"):
        load_task(f"{suite}#silu", {"M": 32})


def test_a_suite_is_not_a_task(tmp_path: Path) -> None:
    suite = write_suite(tmp_path / "suite")
    with pytest.raises(TaskError, match="#TASK"):
        load_task(suite)
    with pytest.raises(TaskError, match="has no task 'relu'; it has silu, gate:1:0"):
        load_task(f"{suite}#relu")


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ({"a": 3}, "task 'a' has no 'cases'"),
        ({"a": {"cases": {"0": {"impls": []}}}}, "has no 'impls'"),
        ({"a": {"cases": {"0": {"impls": [{"task": "x.py"}]}}}}, "needs 'task' and 'kernel'"),
        ({"a": {"cases": {"0": {"values": {"M": "x"}, "impls": [{}]}}}}, "'values' must map"),
        ({"a": task_entry({"0": ["nameless"]})}, "defines neither 'kernel' nor 'optimized_kernel'"),
        ({"a": task_entry({"0": ["absent"]})}, "absent.py: file is missing"),
    ],
)
def test_defects_are_named(tmp_path: Path, summary: dict[str, Any], expected: str) -> None:
    suite = write_suite(tmp_path / "suite", summary)
    with pytest.raises(TaskError, match=expected):
        load_task(f"{suite}#a")


def test_a_missing_or_broken_summary_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"summary\.json: file is missing"):
        load_task(f"{tmp_path}#silu")
    (tmp_path / "summary.json").write_text("{", encoding="utf-8")
    with pytest.raises(TaskError, match="not readable JSON"):
        load_task(f"{tmp_path}#silu")
