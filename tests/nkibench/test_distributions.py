"""Input distributions for stricter checks."""

from __future__ import annotations

import numpy as np
import pytest

from nkibench.distributions import DISTRIBUTIONS, apply, infer_declarations
from nkibench.task import list_tasks, load_task
from nkibench.task_file import InputDeclaration


@pytest.mark.parametrize("name", list_tasks())
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_references_stay_finite_and_inputs_valid(name: str, distribution: str) -> None:
    task = load_task(name).at_reduced_shape()
    inputs = task.inputs(3, distribution)
    for output in task.forward(inputs):
        assert np.isfinite(output).all()
        assert np.any(output)
    assert task.input_declarations is not None
    for value, declaration in zip(inputs, task.input_declarations, strict=True):
        if isinstance(value, np.ndarray):
            assert value.dtype == np.float32
            assert not declaration.nonnegative or value.min() >= 0
            tiny = np.finfo(np.float32).tiny
            assert not np.any((value != 0) & (np.abs(value) < tiny))
        else:
            assert value == declaration.value


def test_they_are_reproducible_and_leave_the_originals_alone() -> None:
    value = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    before = value.copy()
    declarations = infer_declarations([value])
    for distribution in DISTRIBUTIONS:
        first = apply(distribution, [value], declarations, seed=1)[0]
        again = apply(distribution, [value], declarations, seed=1)[0]
        np.testing.assert_array_equal(first, again)
        np.testing.assert_array_equal(value, before)
        assert np.array_equal(first, before) == (distribution == "ordinary")


def test_spikes_lie_beyond_the_middle_of_every_dimension() -> None:
    value = np.random.default_rng(0).normal(size=(512, 2048)).astype(np.float32)
    spiked = apply("spikes", [value], infer_declarations([value]), seed=4)[0]
    assert isinstance(spiked, np.ndarray)
    rows, columns = np.nonzero(spiked != value)
    assert len(rows) > 3
    assert rows.min() >= 256 and columns.min() >= 1024
    assert np.abs(spiked[rows, columns]).min() > 100


def test_inputs_that_must_keep_their_range_are_not_scaled() -> None:
    task = load_task("mamba").at_reduced_shape()
    ordinary, scaled = task.inputs(0), task.inputs(0, "scaled")
    for position, factor in enumerate((1, 10, 1, 10, 10)):
        np.testing.assert_allclose(scaled[position], np.asarray(ordinary[position]) * factor, rtol=1e-6)


def test_constant_rows_keep_their_first_value() -> None:
    value = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
    changed = apply("constant_rows", [value], infer_declarations([value]), seed=0)[0]
    assert isinstance(changed, np.ndarray)
    assert (changed[0, 0] == 1).all() and (changed[1, 2] == 21).all() and (changed[1, 0] == 13).all()
    np.testing.assert_array_equal(changed[0, 1], value[0, 1])


def test_tiny_rows_are_exact_multiples() -> None:
    value = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
    vector = np.arange(1, 5, dtype=np.float32)
    changed, same = apply("tiny_rows", [value, vector], infer_declarations([value, vector]), seed=0)
    assert isinstance(changed, np.ndarray)
    for row in ((0, 0), (1, 0), (1, 2)):
        np.testing.assert_array_equal(changed[row] * 2.0**40, value[row])
    np.testing.assert_array_equal(changed[0, 1:], value[0, 1:])
    np.testing.assert_array_equal(same, vector)  # a factor of every row is none of them


def test_undeclared_inputs_without_negative_values_stay_without() -> None:
    value = np.abs(np.random.default_rng(0).normal(size=(64, 64))).astype(np.float32)
    declarations = infer_declarations([value, 2.5])
    assert [d.nonnegative for d in declarations] == [True, False]
    for distribution in DISTRIBUTIONS:
        changed, number = apply(distribution, [value, 2.5], declarations, seed=0)
        assert np.min(changed) >= 0
        assert number == 2.5


def test_mistakes_are_refused() -> None:
    with pytest.raises(ValueError, match="choose from ordinary"):
        load_task("silu").at_reduced_shape().inputs(0, "gaussian")
    with pytest.raises(ValueError, match="2 inputs are declared, but there are 1"):
        apply("scaled", [1.0], [InputDeclaration("a", None), InputDeclaration("b", None)], seed=0)
