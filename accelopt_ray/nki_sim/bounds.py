"""Which positions an access can reach, given the masks under which it is made.

Everything here works on plain program data, so that a program from an untrusted process can be judged by it. An
expression is a constant plus coefficients on variables that each run over ``0 .. extent - 1``: loop indices and tile
coordinates. A mask is such an expression that must not be negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from accelopt_ray.nki_sim.program import Affine, DimIndex, MaskTerm

#: ``(0, loop id)`` or ``(1, tile axis)``.
Variable = tuple[int, int]

_LOOP = 0
_AXIS = 1


@dataclass(frozen=True)
class Linear:
    """``constant + sum(coefficients[v] * v)``, plus something between ``slack_low`` and ``slack_high``."""

    constant: int
    coefficients: Mapping[Variable, int]
    slack_low: int = 0
    slack_high: int = 0


def linear_affine(affine: Affine) -> dict[Variable, int]:
    """Coefficients of an affine start over loops."""
    return {(_LOOP, loop): coefficient for loop, coefficient in affine.terms}


def linear_dim(dim: DimIndex) -> Linear:
    """The position that a dimension's index gives; tables count as an independent range."""
    coefficients = linear_affine(dim.start)
    for axis, stride in dim.strides:
        coefficients[_AXIS, axis] = coefficients.get((_AXIS, axis), 0) + stride
    low = sum(min(table) for _, table in dim.tables)
    high = sum(max(table) for _, table in dim.tables)
    return Linear(dim.start.constant, coefficients, low, high)


def linear_mask(term: MaskTerm, axes: Mapping[int, int]) -> Linear:
    """A mask over the axes of an operand.

    Args:
        term: The condition, over the axes of the output.
        axes: For each axis of the output the operand's axis that runs with it; others are free variables.
    """
    coefficients = linear_affine(term.start)
    for axis, stride in term.strides:
        name = (_AXIS, axes[axis]) if axis in axes else (_AXIS, -1 - axis)
        coefficients[name] = coefficients.get(name, 0) + stride
    return Linear(term.start.constant, coefficients)


def extremes(expression: Linear, extents: Mapping[Variable, int]) -> tuple[int, int]:
    """Smallest and largest value when every variable runs over its whole range."""
    low = expression.constant + expression.slack_low
    high = expression.constant + expression.slack_high
    for name, coefficient in expression.coefficients.items():
        reach = coefficient * (extents[name] - 1)
        if reach < 0:
            low += reach
        else:
            high += reach
    return low, high


def stays_below(expression: Linear, limit: int, masks: Sequence[Linear], extents: Mapping[Variable, int]) -> bool:
    """Whether the expression never exceeds ``limit`` where all masks hold.

    For any non-negative multipliers, ``expression`` is at most ``expression + sum(multiplier * mask)`` there.
    Multipliers that cancel a shared variable are tried, for one mask and for pairs; that is exact for the masks that
    kernels write.
    """
    if extremes(expression, extents)[1] <= limit:
        return True
    for index, first in enumerate(masks):
        if extremes(first, extents)[1] < 0:
            return True
        for scale, weight in _multipliers(expression, first):
            combined = _combine(expression, scale, first, weight)
            if extremes(combined, extents)[1] <= limit * scale:
                return True
            for second in masks[index + 1 :]:
                for scale_2, weight_2 in _multipliers(combined, second):
                    both = _combine(combined, scale_2, second, weight_2)
                    if extremes(both, extents)[1] <= limit * scale * scale_2:
                        return True
    return False


def stays_above(expression: Linear, limit: int, masks: Sequence[Linear], extents: Mapping[Variable, int]) -> bool:
    """Whether the expression is never less than ``limit`` where all masks hold."""
    negated = Linear(
        -expression.constant,
        {name: -coefficient for name, coefficient in expression.coefficients.items()},
        -expression.slack_high,
        -expression.slack_low,
    )
    return stays_below(negated, -limit, masks, extents)


def _multipliers(expression: Linear, mask: Linear) -> Iterable[tuple[int, int]]:
    """Pairs ``(scale, weight)`` such that ``scale * expression + weight * mask`` loses one variable."""
    seen = set()
    for name, coefficient in expression.coefficients.items():
        other = mask.coefficients.get(name, 0)
        if coefficient > 0 > other or coefficient < 0 < other:
            pair = (abs(other), abs(coefficient))
            if pair not in seen:
                seen.add(pair)
                yield pair


def _combine(expression: Linear, scale: int, mask: Linear, weight: int) -> Linear:
    coefficients = {name: coefficient * scale for name, coefficient in expression.coefficients.items()}
    for name, coefficient in mask.coefficients.items():
        total = coefficients.get(name, 0) + coefficient * weight
        if total:
            coefficients[name] = total
        else:
            coefficients.pop(name, None)
    return Linear(
        expression.constant * scale + mask.constant * weight,
        coefficients,
        expression.slack_low * scale,
        expression.slack_high * scale,
    )
