"""The strict comparison: every row and every element has to be right, not the output on average.

For an output element ``o`` with reference ``r`` in a row (all elements along the last axis) of root mean square ``m``,
the error ``|o - r|`` may be at most ``max(1e-3, 16 E) * |r| + 64 C * m``, where ``E`` is the relative error of the fp32
reference itself and ``C`` what else its error has in it (:mod:`accelopt_ray.verify.accuracy`): zero for a softmax, so
that dropping its small entries is seen, and up to some 1e-6 for matrix products, whose sums cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelopt_ray.verify.accuracy import TINY, Accuracy, as_rows
from accelopt_ray.verify.references import ReferenceOutput

# By how much a kernel's arithmetic may be less accurate than the reference's: other orders of summation, approximated
# activation functions. Single elements vary more than norms.
_MARGIN = 64.0
_NORM_MARGIN = 16.0
_ELEMENT_TOLERANCE = 1e-3
_ROW_FACTOR = 10.0  # rows vary more than the whole output
# Of the noise in the difference of two outputs, much cancels.
_CHANGE_MARGIN = 16.0
_INFLUENCE_TOLERANCE = 1e-2
_CLEAR_OF_NOISE = 4.0
_CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class Bounds:
    """How far an output may be off.

    Attributes:
        l2: Relative L2 error over the output.
        row_l2: Relative L2 error of each row.
        element_of_row: The part of an element's error that is measured by its row.
        element_noise: Relative error of an element that is the arithmetic's own.
    """

    l2: float
    row_l2: float
    element_of_row: float
    element_noise: float

    @staticmethod
    def of(tolerance: float, accuracy: Accuracy, ordinary: bool) -> Bounds:
        """Bounds for a task's tolerance and its reference's accuracy with the inputs at hand.

        For ordinary inputs the error over the whole output may never exceed the task's tolerance; for others it may,
        where the reference itself is no more accurate.
        """
        return Bounds(
            l2=tolerance if ordinary else max(tolerance, _NORM_MARGIN * accuracy.l2),
            row_l2=max(_ROW_FACTOR * tolerance, _NORM_MARGIN * accuracy.row_l2),
            element_of_row=_MARGIN * accuracy.element_of_row,
            element_noise=_CHANGE_MARGIN * accuracy.element,
        )


@dataclass(frozen=True)
class Deviation:
    """What is wrong with an output.

    Attributes:
        reason: ``not_finite``, ``row_error``, ``element_error`` or ``relative_l2``.
        text: The same in words, with the place and the values.
    """

    reason: str
    text: str


@dataclass(frozen=True)
class Measured:
    """Errors of one output, each relative to its bound: at most 1 passes."""

    l2: float
    row_l2: float
    element: float


def examine(output: npt.NDArray[Any], reference: ReferenceOutput, bounds: Bounds) -> tuple[Measured, Deviation | None]:
    """Compares an output (or the rows of it that the reference holds) with its reference.

    Args:
        output: A kernel's output in the reference's layout, of its full shape.
        reference: Reference values.
        bounds: What is allowed.

    Returns:
        The errors relative to their bounds, and the gravest deviation if one is beyond.
    """
    expected_rows, rows = as_rows(reference.values()), reference.rows()
    output_rows = as_rows(output)
    step = max(1, _CHUNK_ELEMENTS // max(1, expected_rows.shape[1]))
    squared = np.zeros(2)
    worst_row, worst_element = (0.0, 0), (0.0, 0, 0)
    with np.errstate(all="ignore"):
        for start in range(0, len(expected_rows), step):
            stop = min(start + step, len(expected_rows))
            names = np.arange(start, stop) if rows is None else rows[start:stop]
            got = output_rows[start:stop] if rows is None else output_rows[names]
            wanted = np.asarray(expected_rows[start:stop], dtype=np.float64)
            error = np.asarray(got, dtype=np.float64)
            finite = np.isfinite(error)
            if not finite.all():
                row, column = (int(index[0]) for index in np.nonzero(~finite))
                where = _place(reference.shape, int(names[row]), column)
                value = float(got[row, column])
                text = f"element {where} is {value:g}, the reference has {wanted[row, column]:.6g}"
                if np.isnan(value):
                    text += " (elements that were never written read as NaN)"
                infinite = float("inf")
                return Measured(infinite, infinite, infinite), Deviation("not_finite", text)
            error -= wanted
            np.abs(error, out=error)
            squared_rows = np.einsum("ij,ij->i", wanted, wanted)
            squared_errors = np.einsum("ij,ij->i", error, error)
            squared += squared_errors.sum(), squared_rows.sum()
            row_ratio = np.sqrt(squared_errors) / np.maximum(np.sqrt(squared_rows) * bounds.row_l2, TINY)
            row = int(np.argmax(row_ratio))
            worst_row = max(worst_row, (float(row_ratio[row]), int(names[row])))
            allowed = np.abs(wanted, out=wanted)
            allowed *= max(_ELEMENT_TOLERANCE, bounds.element_noise)
            allowed += bounds.element_of_row * np.sqrt(squared_rows / wanted.shape[1])[:, None]
            np.maximum(allowed, TINY, out=allowed)
            error /= allowed
            flat = int(np.argmax(error))
            row, column = divmod(flat, error.shape[1])
            worst_element = max(worst_element, (float(error[row, column]), int(names[row]), column))
    l2 = float(np.sqrt(squared[0]) / max(np.sqrt(squared[1]), TINY))
    measured = Measured(l2 / bounds.l2, worst_row[0], worst_element[0])
    return measured, _gravest(measured, l2, bounds, worst_row, worst_element, output_rows, reference)


def compare_changes(
    before: npt.NDArray[Any],
    after: npt.NDArray[Any],
    reference_before: ReferenceOutput,
    reference_after: ReferenceOutput,
    bounds: Bounds,
) -> Deviation | None:
    """Checks that an output moved where its reference moved, and by as much.

    Elements whose reference moved by little more than numerical noise say nothing and are passed over.

    Args:
        before: Output for the ordinary inputs.
        after: Output for the perturbed inputs.
        reference_before: Reference for the ordinary inputs, held whole.
        reference_after: Reference for the perturbed inputs; the rows that it holds are looked at.
        bounds: What is allowed of each output by itself.
    """
    rows = reference_after.rows()
    old_rows, new_rows = as_rows(reference_before.values()), as_rows(reference_after.values())
    old_output, new_output = as_rows(before), as_rows(after)
    step = max(1, _CHUNK_ELEMENTS // max(1, new_rows.shape[1]))
    for start in range(0, len(new_rows), step):
        stop = min(start + step, len(new_rows))
        names: Any = slice(start, stop) if rows is None else rows[start:stop]
        old = np.asarray(old_rows[names], dtype=np.float64)
        moved = np.asarray(new_rows[start:stop], dtype=np.float64) - old
        got = np.asarray(new_output[names], dtype=np.float64) - old_output[names]
        noise = bounds.element_noise * np.maximum(np.abs(old), np.abs(old + moved))
        noise += bounds.element_of_row * np.sqrt(np.einsum("ij,ij->i", old, old) / old.shape[1])[:, None]
        size = np.abs(moved)
        wrong = (size > _CLEAR_OF_NOISE * noise) & (np.abs(got - moved) > _INFLUENCE_TOLERANCE * size + noise)
        if wrong.any():
            row, column = (int(index[0]) for index in np.nonzero(wrong))
            where = _place(reference_before.shape, start + row if rows is None else int(rows[start + row]), column)
            text = (
                f"element {where} should have moved by {moved[row, column]:.3g} when the inputs were perturbed, but "
                f"moved by {got[row, column]:.3g}: part of the inputs has no influence"
            )
            return Deviation("no_influence", text)
    return None


def _gravest(
    measured: Measured,
    l2: float,
    bounds: Bounds,
    worst_row: tuple[float, int],
    worst_element: tuple[float, int, int],
    output_rows: npt.NDArray[Any],
    reference: ReferenceOutput,
) -> Deviation | None:
    _, row, column = worst_element
    rows = reference.rows()
    position = row if rows is None else int(np.searchsorted(rows, row))
    got, wanted = float(output_rows[row, column]), float(as_rows(reference.values())[position, column])
    example = f"element {_place(reference.shape, row, column)} is {got:.6g}, the reference has {wanted:.6g}"
    if not measured.row_l2 <= 1.0:
        where, error = _place(reference.shape, worst_row[1], None), worst_row[0] * bounds.row_l2
        text = f"row {where} has a relative error of {error:.3g}, allowed is {bounds.row_l2:.3g}; {example}"
        return Deviation("row_error", text)
    if not measured.element <= 1.0:
        return Deviation("element_error", f"{example}: {measured.element:.3g} times the allowed error")
    if not measured.l2 <= 1.0:
        text = f"relative L2 error {l2:.3g}, allowed is {bounds.l2:.3g}; {example}"
        return Deviation("relative_l2", text)
    return None


def _place(shape: Sequence[int], row: int, column: int | None) -> str:
    leading = tuple(int(index) for index in np.unravel_index(row, shape[:-1])) if len(shape) > 1 else ()
    indices = [str(index) for index in leading] + ([str(column)] if column is not None else [":"])
    return f"[{', '.join(indices)}]"
