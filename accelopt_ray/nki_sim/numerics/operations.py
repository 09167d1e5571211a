"""The ALU operations of the vector engines as NumPy functions ``operation(a, b, out)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.numerics.activations import ACTIVATIONS
from accelopt_ray.nki_sim.numerics.errors import NumericsError
from accelopt_ray.outcome import EvaluationOutcome

Array = NDArray[Any]
Operand = Any
#: ``operation(a, b, out)``; ``out`` may be one of the operands.
Operation = Callable[[Operand, Operand, Array], None]


def _binary(ufunc: np.ufunc) -> Operation:
    def apply(first: Operand, second: Operand, out: Array) -> None:
        ufunc(first, second, out=out, casting="unsafe")

    return apply


def _bypass(first: Operand, second: Operand, out: Array) -> None:
    if first is not out:
        np.copyto(out, first)


def _by_magnitude(ufunc: np.ufunc) -> Operation:
    def apply(first: Operand, second: Operand, out: Array) -> None:
        ufunc(np.abs(first), np.abs(second), out=out)

    return apply


def _unary_operation(name: str) -> Operation:
    function = ACTIVATIONS[name]

    def apply(first: Operand, second: Operand, out: Array) -> None:
        function(np.asarray(first), out)

    return apply


_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "power": np.power,
    "mod": np.mod,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "arctan2": np.arctan2,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "left_shift": np.left_shift,
    "right_shift": np.right_shift,
    "arith_shift_right": np.right_shift,
}

OPERATIONS: dict[str, Operation] = {
    **{name: _binary(ufunc) for name, ufunc in _UFUNCS.items()},
    "bypass": _bypass,
    "abs_max": _by_magnitude(np.maximum),
    "abs_min": _by_magnitude(np.minimum),
    **{name: _unary_operation(name) for name in ("abs", "rsqrt", "logical_not", "invert")},
}

#: Operations on integer bits: no conversion to float32 takes place.
BITVECTOR = frozenset(
    {"bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift", "arith_shift_right", "invert"}
)


def operation(name: object, line: int) -> Operation:
    """Returns the ALU operation of that name.

    Raises:
        NumericsError: There is none.
    """
    found = OPERATIONS.get(str(name))
    if found is None:
        raise NumericsError(f"operation '{name}' is not supported", line, EvaluationOutcome.UNSUPPORTED)
    return found


def reduction(name: object, line: int) -> np.ufunc:
    """Returns the ufunc whose ``reduce`` performs the reduction of that name.

    Raises:
        NumericsError: There is none.
    """
    found = _UFUNCS.get(str(name))
    if found is None or found.nin != 2:
        raise NumericsError(f"reduction '{name}' is not supported", line, EvaluationOutcome.UNSUPPORTED)
    return found


def reduce_into(ufunc: np.ufunc, values: Array, axes: tuple[int, ...], out: Array) -> None:
    """Reduces ``values`` over ``axes`` into ``out`` (those axes removed), in float32."""
    if ufunc is np.subtract or ufunc in (np.logical_and, np.logical_or, np.logical_xor):
        _reduce_pairwise(ufunc, values, axes, out)
        return
    ufunc.reduce(values, axis=axes, out=out)


def _reduce_pairwise(ufunc: np.ufunc, values: Array, axes: tuple[int, ...], out: Array) -> None:
    kept = [axis for axis in range(values.ndim) if axis not in axes]
    rows = values.transpose(*kept, *axes).reshape(*(values.shape[axis] for axis in kept), -1)
    if ufunc is np.subtract:
        np.subtract(rows[..., 0], np.add.reduce(rows[..., 1:], axis=-1), out=out)
    else:
        out[...] = ufunc.reduce(rows.astype(bool), axis=-1)
