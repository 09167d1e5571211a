"""How accurate a task's fp32 reference is itself, which bounds what may be asked of a kernel.

The reference is computed at a small shape in fp32, in double precision, and in double precision for inputs that are
off by their own rounding. The differences tell how much of an error is the arithmetic's own, beyond what is relative
to the element: nothing for a softmax, a part of the row's size for a matrix product, whose sums cancel. The third
shows what the first may hide by luck: where few outputs depend strongly on the inputs' last bits, one order of
summation may meet them well and another, no less careful, may not. A strict check allows a multiple of the differences
and no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

# Elements smaller than this are next to fp32's smallest normal number and have no relative accuracy.
TINY = 1e-34
_RELATIVE_PART = 1e-4
# Elements at least this large in their row show the relative error of the arithmetic, not that of cancellation.
_LARGE_IN_ROW = 0.1
_MIN_ERROR = 2.0**-23
_ROUNDING = 4 * _MIN_ERROR
# The smallest elements of a row show the errors that do not shrink with the element: those of cancellation.
_SMALLEST_SHARE = 1e-3
_SMALLEST_COUNT = 64


@dataclass(frozen=True)
class Accuracy:
    """Errors of an fp32 reference against double precision.

    Attributes:
        l2: Relative L2 error over an output.
        row_l2: Largest relative L2 error of a row (all elements along the last axis).
        element: Largest relative error of an element that is not small in its row.
        element_of_row: Largest error that is not relative to the element, in units of the root mean square of its row:
            what goes beyond ``element`` and beyond 1e-4 of the element, or, for the smallest elements, beyond
            rounding. The latter is there in any sample where sums cancel; that an element all but vanishes is rare and
            may happen at full size only.
    """

    l2: float = _MIN_ERROR
    row_l2: float = _MIN_ERROR
    element: float = 1e-6
    element_of_row: float = 2e-6

    @staticmethod
    def of(outputs: Sequence[npt.NDArray[Any]], exact: Sequence[npt.NDArray[Any]]) -> Accuracy:
        """Compares fp32 outputs with the same in double precision; the worst output counts."""
        worst = [0.0, 0.0, 0.0, 0.0]
        for output, wanted in zip(outputs, exact, strict=True):
            expected = as_rows(wanted.astype(np.float64))
            error = np.abs(as_rows(output.astype(np.float64)) - expected)
            size = np.abs(expected)
            row_error, row_size = np.linalg.norm(error, axis=1), np.linalg.norm(expected, axis=1)
            row_rms = row_size / np.sqrt(expected.shape[1])
            large = size >= np.maximum(_LARGE_IN_ROW * row_rms, TINY)[:, None]
            element = float(np.max(np.where(large, error, 0.0) / np.maximum(size, TINY)))
            # Of most elements what is far beyond a relative error; of the smallest all that rounding does not explain.
            # Neither counts what is the relative error that large elements have too: that is allowed as such.
            is_smallest = _smallest(size / np.maximum(row_rms, TINY)[:, None])
            relative = np.where(is_smallest, max(_ROUNDING, element), max(_RELATIVE_PART, element))
            beyond = np.maximum(error - relative * size, 0.0)
            measured = (
                float(np.linalg.norm(row_error) / max(float(np.linalg.norm(row_size)), TINY)),
                float(np.max(row_error / np.maximum(row_size, TINY))),
                element,
                float(np.max(beyond / np.maximum(row_rms, TINY)[:, None])),
            )
            worst = [max(pair) for pair in zip(worst, measured, strict=True)]
        return Accuracy(
            l2=max(worst[0], _MIN_ERROR),
            row_l2=max(worst[1], _MIN_ERROR),
            element=max(worst[2], _MIN_ERROR),
            element_of_row=worst[3],
        )

    def or_worse(self, other: Accuracy) -> Accuracy:
        """Returns the larger of each error."""
        return Accuracy(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


def _smallest(size_in_row: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Flags the smallest elements, each relative to its row."""
    count = min(max(_SMALLEST_COUNT, int(_SMALLEST_SHARE * size_in_row.size)), size_in_row.size) - 1
    chosen: npt.NDArray[np.bool_] = size_in_row <= np.partition(size_in_row, count, axis=None)[count]
    return chosen


def as_rows(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Views an array as (rows, last axis)."""
    return array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
