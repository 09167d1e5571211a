"""Index expressions and views mean what the same arithmetic means on numbers and arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from accelopt_ray.nki_sim import symbolic
from accelopt_ray.nki_sim.errors import KernelError
from accelopt_ray.nki_sim.loop_variables import ConcreteLoopsNeeded, LoopVariable
from accelopt_ray.nki_sim.program import LoopKind, Role, Space
from accelopt_ray.nki_sim.symbolic import Condition, Index
from accelopt_ray.nki_sim.tile import Tensor
from accelopt_ray.nki_sim.trace_records import TracedBuffer

_LOOPS = [LoopVariable(0, 4, LoopKind.AFFINE, (1, 0), "i"), LoopVariable(1, 3, LoopKind.AFFINE, (2, 0), "j")]
_AXES = ((6, 1), (1, 5))


def leaves() -> dict[str, Any]:
    """Symbolic leaves by name."""
    return {
        "i": Index(0, {_LOOPS[0]: 1}),
        "j": Index(0, {_LOOPS[1]: 1}),
        "p": symbolic.arange(6)[:, None],
        "f": symbolic.arange(5)[None, :],
    }


def numbers(i: int, j: int) -> dict[str, Any]:
    """The same leaves as numbers and arrays, in one iteration."""
    return {"i": i, "j": j, "p": np.arange(6)[:, None], "f": np.arange(5)[None, :]}


_ATOMS = st.sampled_from(["i", "j", "p", "f", "3", "7", "12"])
_EXPRESSIONS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.integers(-4, 6), inner).map(lambda t: f"({t[0]} * {t[1]})"),
        st.tuples(inner, st.sampled_from(["//", "%"]), st.integers(1, 9)).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        inner.map(lambda t: f"(-{t})"),
    ),
    max_leaves=6,
)


def values(index: Any, i: int, j: int) -> np.ndarray:
    """The numbers an index stands for in one iteration."""
    if not isinstance(index, Index):
        return np.asarray(index)
    result = np.full(index.shape, index.constant)
    for loop, coefficient in index.terms.items():
        result = result + coefficient * (i if loop is _LOOPS[0] else j)
    for axis, stride in enumerate(index.strides):
        shape = [1] * index.ndim
        shape[axis] = index.shape[axis]
        result = result + (stride * np.arange(index.shape[axis])).reshape(shape)
        if axis in index.tables:
            result = result + np.array(index.tables[axis]).reshape(shape)
    return result


def symbolic_value(text: str) -> Any:
    try:
        return eval(text, leaves())
    except (ConcreteLoopsNeeded, KernelError):
        return None


@settings(max_examples=300)
@given(_EXPRESSIONS)
def test_arithmetic_agrees_with_numbers_in_every_iteration(text: str) -> None:
    found = symbolic_value(text)
    assume(found is not None)
    reached = []
    for i, j in itertools.product(range(4), range(3)):
        expected = np.asarray(eval(text, numbers(i, j)))
        actual = values(found, i, j)
        assert np.array_equal(np.broadcast_to(actual, expected.shape), expected)
        reached += [int(expected.min()), int(expected.max())]
    if isinstance(found, Index):
        low, high = found.bounds()
        assert low <= min(reached) and high >= max(reached)


@settings(max_examples=300)
@given(_EXPRESSIONS, st.sampled_from([">=", ">", "<=", "<", "=="]), _EXPRESSIONS)
def test_comparisons_agree_with_numbers(left: str, comparison: str, right: str) -> None:
    text = f"{left} {comparison} {right}"
    found = symbolic_value(text)
    assume(found is not None)
    for i, j in itertools.product(range(4), range(3)):
        expected = np.asarray(eval(text, numbers(i, j)))
        if isinstance(found, Condition):
            holds = np.ones((1, 1), bool)
            for term in found.terms:
                holds = holds & (values(term, i, j) >= 0)
            assert np.array_equal(
                np.broadcast_to(holds, np.broadcast_shapes(holds.shape, expected.shape)),
                np.broadcast_to(expected, np.broadcast_shapes(holds.shape, expected.shape)),
            )
        else:
            assert bool(expected.all()) == bool(found) and expected.all() == expected.any()


@settings(max_examples=200)
@given(_EXPRESSIONS, st.sampled_from([">=", "<", "==", "!="]), st.integers(-20, 20))
def test_a_truth_value_is_given_only_when_all_iterations_agree(text: str, comparison: str, number: int) -> None:
    assume("p" not in text and "f" not in text)
    full = f"{text} {comparison} {number}"
    try:
        found = bool(eval(full, leaves()))
    except (ConcreteLoopsNeeded, KernelError):
        return
    assert {bool(eval(full, numbers(i, j))) for i, j in itertools.product(range(4), range(3))} == {found}


def test_an_index_needed_as_a_number_names_its_loops() -> None:
    i, j = leaves()["i"], leaves()["j"]
    for use in (
        lambda: int(i),
        lambda: [1, 2, 3, 4][i],
        lambda: i * j,
        lambda: i % 2,
        lambda: bool(i > 1),
        lambda: i / 2,
    ):
        with pytest.raises(ConcreteLoopsNeeded) as request:
            use()
        assert (1, 0) in request.value.sites


# Views.

_SHAPE = (6, 4, 10)


def positions(tensor: Tensor) -> np.ndarray:
    """Flat element numbers that a view reads."""
    strides = np.cumprod([1, *tensor.view_shape[:0:-1]])[::-1]
    result = np.zeros(tensor.shape, int)
    for dim, stride in zip(tensor.dims, strides, strict=True):
        result = result + values(dim, 0, 0).reshape(dim.shape or (1,) * len(tensor.shape)) * stride
    return np.broadcast_to(result, tensor.shape)


def tensor_in(space: Space) -> Tensor:
    return Tensor(TracedBuffer(0, "t", space, _SHAPE, "float32", Role.TEMPORARY), _SHAPE)


def slices(data: st.DataObject, shape: tuple[int, ...]) -> tuple[slice, ...]:
    found = []
    for position, extent in enumerate(shape):
        start = data.draw(st.integers(0, extent - 1))
        stop = data.draw(st.integers(start + 1, extent))
        found.append(slice(start, stop, 1 if position == 0 else data.draw(st.integers(1, 3))))
    return tuple(found)


def regrouped(data: st.DataObject, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of the free axes: an axis split, or two merged."""
    free = list(shape[1:])
    position = data.draw(st.integers(0, len(free) - 1))
    if data.draw(st.booleans()) and position + 1 < len(free):
        free[position : position + 2] = [free[position] * free[position + 1]]
    else:
        divisors = [size for size in range(1, free[position] + 1) if free[position] % size == 0]
        size = data.draw(st.sampled_from(divisors))
        free[position : position + 1] = [size, free[position] // size]
    return (shape[0], *free)


@settings(max_examples=300)
@given(st.data(), st.sampled_from([Space.SBUF, Space.HBM]))
def test_views_of_views_read_what_numpy_reads(data: st.DataObject, space: Space) -> None:
    tensor = tensor_in(space)
    expected = np.arange(tensor.size).reshape(_SHAPE)
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            key = slices(data, tensor.shape)
            tensor, expected = tensor[key], expected[key]
        else:
            shape = regrouped(data, tensor.shape)
            try:
                tensor = tensor.reshape(shape)
            except KernelError:
                break
            expected = expected.reshape(shape)
        assert tensor.shape == expected.shape
        assert np.array_equal(positions(tensor), expected)


@settings(max_examples=200)
@given(st.data())
def test_advanced_indexing_of_views_reads_what_numpy_reads(data: st.DataObject) -> None:
    tensor = tensor_in(Space.SBUF)
    expected = np.arange(tensor.size).reshape(_SHAPE)
    key = slices(data, _SHAPE)
    tensor, expected = tensor[key], expected[key]
    p, y, x = expected.shape
    a, b, c = symbolic.arange(p)[:, None, None], symbolic.arange(y)[None, :, None], symbolic.arange(x)[None, None, :]
    n = np.ix_(np.arange(p), np.arange(y), np.arange(x))
    divisor = data.draw(st.integers(1, 4))
    for found, wanted in (
        (tensor[a, b, c], expected[n]),
        (tensor[a, b, c // divisor], expected[n[0], n[1], n[2] // divisor]),
        (tensor[a, b % divisor, x - 1 - c], expected[n[0], n[1] % divisor, x - 1 - n[2]]),
        (
            tensor[symbolic.arange(p)[:, None], y - 1, symbolic.arange(x)[None, :]],
            expected[np.arange(p)[:, None], y - 1, np.arange(x)],
        ),
    ):
        assert found.shape == wanted.shape
        assert np.array_equal(positions(found), wanted)


def test_whole_tensors_reshape_across_dimensions() -> None:
    tensor = tensor_in(Space.HBM).reshape((24, 10)).reshape((5, 48))
    assert np.array_equal(positions(tensor), np.arange(240).reshape(5, 48))
    with pytest.raises(KernelError, match="cannot reshape tensor"):
        tensor.reshape((7, 7))
    with pytest.raises(KernelError, match="not supported by the simulator"):
        tensor_in(Space.SBUF).reshape((12, 20))
