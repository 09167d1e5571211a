"""Behaviour of loaded tasks: seeds, shapes, layouts, sources."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from nkibench.task import OutputMismatch, TaskError, list_tasks, load_task


def test_a_seed_fixes_the_inputs_and_leaves_the_global_generator_alone() -> None:
    task = load_task("silu").at_reduced_shape()
    np.random.seed(5)
    expected = np.random.random(3)
    np.random.seed(5)
    first, again, other = task.inputs(21), task.inputs(21), task.inputs(42)
    np.testing.assert_array_equal(np.random.random(3), expected)
    np.testing.assert_array_equal(first[0], again[0])
    assert not np.array_equal(first[0], other[0])


def test_inputs_are_those_of_the_published_recipe() -> None:
    task = load_task("adamw").at_reduced_shape()
    theta, g, m, v = task.inputs(42)
    np.random.seed(42)
    for value in (theta, g, m):
        np.testing.assert_array_equal(value, np.random.normal(size=(320, 2048)).astype(np.float32))
    np.testing.assert_array_equal(v, np.abs(np.random.normal(size=(320, 2048))).astype(np.float32))


@pytest.mark.parametrize("name", list_tasks())
def test_built_in_tasks_pass_their_own_check(name: str) -> None:
    load_task(name).check()


@pytest.mark.parametrize("name", list_tasks())
def test_input_specs_describe_the_kernels_arguments(name: str) -> None:
    task = load_task(name).at_reduced_shape()
    values = task.kernel_inputs(task.inputs(0))
    found = [(value.shape, str(value.dtype)) if isinstance(value, np.ndarray) else value for value in values]
    assert list(task.input_specs()) == found


def test_parameters_can_be_replaced() -> None:
    task = load_task("matmul", {"M": 128, "N": 1024, "K": 1024})
    assert task.input_specs() == (((128, 1024), "float32"), ((1024, 1024), "float32"))
    assert task.counts is not None and task.counts.matmul_flops == 2 * 128 * 1024 * 1024
    assert task.shape_text == "M=128 N=1024 K=1024"
    assert load_task("matmul").parameters["M"] == 4096


@pytest.mark.parametrize(("overrides", "expected"), [({"Q": 4}, "no parameter 'Q'"), ({"M": 0}, "positive whole")])
def test_parameters_are_validated(overrides: dict[str, int], expected: str) -> None:
    with pytest.raises(TaskError, match=expected):
        load_task("matmul", overrides)


def test_kernel_outputs_come_back_in_the_references_layout() -> None:
    task = load_task("silu").at_reduced_shape()
    reference = task.forward(task.inputs(0))
    (output,) = task.task_outputs([reference[0].reshape(128, 2, 2048)], reference)
    np.testing.assert_array_equal(output, reference[0])
    with pytest.raises(OutputMismatch, match="do not fit"):
        task.task_outputs([np.zeros((3, 3), np.float32)], reference)


def test_the_reference_text_is_headed_by_its_shapes() -> None:
    text = load_task("silu").reference_source()
    assert text.startswith("# Shapes: M = 4096, N = 7168\n")
    assert "def forward" in text
    assert "def kernel" in load_task("silu").baseline_source()


def test_tasks_travel_between_processes() -> None:
    task = load_task("mamba").at_reduced_shape()
    assert pickle.loads(pickle.dumps(task)) == task
