"""The published check, for what it is: a relative L2 error and a look for a word."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelopt_ray.outcome import EvaluationOutcome, UserError
from accelopt_ray.verify import published
from accelopt_ray.verify.registry import get_check


def direct_error(output: np.ndarray, reference: np.ndarray) -> float:
    output, reference = output.astype(np.float64), reference.astype(np.float64)
    return float(np.linalg.norm(output - reference) / np.linalg.norm(reference))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3), st.integers(1, 90_000), st.integers(0, 2**31))
def test_the_error_in_chunks_is_the_error_as_a_whole(rows, columns, seed):
    generator = np.random.default_rng(seed)
    reference = generator.standard_normal((rows, columns), dtype=np.float32)
    output = reference + np.float32(1e-3) * generator.standard_normal((rows, columns), dtype=np.float32)
    expected = direct_error(output, reference)
    assert published.compare([output], [reference], 1.0).relative_l2[0] == pytest.approx(expected, rel=1e-9)
    known = published.compare([output], [reference], 1.0, [published.norm(reference)])
    assert known.relative_l2[0] == pytest.approx(expected, rel=1e-9)


def test_the_bound_is_exclusive():
    reference, output = np.ones(4, np.float32), np.full(4, 1.25, np.float32)
    assert not published.compare([output], [reference], 0.25).passed
    assert published.compare([output], [reference], 0.2500001).passed


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_output_that_is_not_finite_does_not_pass(bad):
    reference = np.ones(8, np.float32)
    output = reference.copy()
    output[3] = bad
    assert not published.compare([output], [reference], 1e9).passed


def test_shapes_and_numbers_have_to_agree():
    array = np.ones((2, 3), np.float32)
    assert "shape (3, 2)" in published.compare([array.reshape(3, 2)], [array], 1.0).text
    assert "2 outputs where the reference has 1" in published.compare([array, array], [array], 1.0).text


def test_every_output_has_to_pass():
    array = np.ones(4, np.float32)
    result = published.compare([array, array * 2], [array, array], 1e-3)
    assert not result.passed and result.text.startswith("output 1")


def test_a_reference_of_zeros_demands_zeros():
    zeros = np.zeros(4, np.float32)
    assert published.compare([zeros], [zeros], 1e-5).passed
    assert not published.compare([zeros + np.float32(1e-20)], [zeros], 1e-5).passed


@pytest.mark.parametrize(
    "source, banned",
    [
        ("x = nl.bfloat16", True),
        ("x = 'float16'", True),
        ("x = 1  # not float16", False),
        ("# float16\nx = '#'  # float16\n", False),
        ("x = '# float16'", True),
        ("x = (  # float16 in text that is not Python", True),
    ],
)
def test_half_precision_is_banned_by_text_outside_comments(source, banned):
    assert published.banned_text(source) is banned
    finding = get_check("published").inspect_source(source, "kernel")
    assert (finding is not None) is banned
    if finding is not None:
        assert finding.outcome is EvaluationOutcome.INCORRECT


def test_an_unknown_check_is_the_users_mistake():
    with pytest.raises(UserError, match="did you mean 'published'"):
        get_check("publishd")
