"""Arithmetic expressions of task files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nkibench.expression import ExpressionError, evaluate


def test_operators_follow_pythons_precedence() -> None:
    names = {"M": 7, "N": 3}
    assert evaluate("2*M*N + M", names) == 49
    assert evaluate("(M + N) // 2 - -N**2", names) == 14
    assert evaluate("M / 2", names) == 3.5


def test_numbers_stand_for_themselves() -> None:
    assert evaluate(5, {}) == 5
    assert evaluate(0.25, {}) == 0.25


@given(m=st.integers(1, 10**6), n=st.integers(1, 10**6))
def test_products_of_sizes_are_exact_integers(m: int, n: int) -> None:
    value = evaluate("3*M*N - N", {"M": m, "N": n})
    assert isinstance(value, int)
    assert value == 3 * m * n - n


@pytest.mark.parametrize(
    "text",
    [
        "Q * 2",  # unknown name
        "M +",  # not complete
        "__import__('os').getcwd()",
        "M.real",
        "[M]",
        "M if M else 1",
        "True + 1",
        "'a' * M",
        "M ** 9",
        "2 ** M",
        "M // 0",
        "1" * 500,
        "(" * 300,
        "M\0",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text, {"M": 100})
