"""Input distributions beyond the ordinary one: what a kernel that only fits the benchmark's inputs stumbles over.

Each starts from the ordinary inputs of a seed and changes some of them, within what the task's declarations allow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nkibench.reference import Array, Value
from nkibench.task_file import InputDeclaration

ORDINARY = "ordinary"
DISTRIBUTIONS = (ORDINARY, "scaled", "spikes", "outliers", "constant_rows", "small", "tiny_rows")

_SMALL = 2.0**-8  # far from denormal even when several are multiplied
_TINY = 2.0**-40  # below any epsilon, and not denormal when squared
_SPIKE = 20.0  # times scale and standard deviation
_OUTLIER = 100.0
_UNSCALABLE_SPIKE = 4.0  # standard deviations, for inputs that must keep their range


def infer_declarations(inputs: Sequence[Value]) -> tuple[InputDeclaration, ...]:
    """Describes undeclared inputs from a sample: an array without negative values has to stay without."""
    declarations = []
    for position, value in enumerate(inputs):
        name = f"input{position}"
        if isinstance(value, np.ndarray):
            nonnegative = bool(value.size) and bool(np.min(value) >= 0)
            declarations.append(
                InputDeclaration(name=name, shape=value.shape, dtype=str(value.dtype), nonnegative=nonnegative)
            )
        else:
            declarations.append(InputDeclaration(name=name, shape=None, value=float(value), scale=1.0))
    return tuple(declarations)


def apply(
    distribution: str, inputs: Sequence[Value], declarations: Sequence[InputDeclaration], seed: int
) -> list[Value]:
    """Turns ordinary inputs into those of another distribution.

    Args:
        distribution: One of ``DISTRIBUTIONS``: ``ordinary`` (unchanged), ``scaled`` (operands multiplied), ``spikes``
            (large values outside the first tile of every dimension), ``outliers`` (a few huge values anywhere),
            ``constant_rows``, ``small`` or ``tiny_rows`` (a few rows beside which every epsilon is large).
        inputs: Ordinary inputs; not modified.
        declarations: One per input.
        seed: Chooses the positions.

    Raises:
        ValueError: The distribution is unknown, or the declarations do not fit the inputs.
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"unknown input distribution '{distribution}': choose from {', '.join(DISTRIBUTIONS)}")
    if len(inputs) != len(declarations):
        raise ValueError(f"{len(declarations)} inputs are declared, but there are {len(inputs)}")
    if distribution == ORDINARY:
        return list(inputs)
    generator = np.random.default_rng([seed, DISTRIBUTIONS.index(distribution)])
    changed: list[Value] = []
    for value, declaration in zip(inputs, declarations, strict=True):
        if isinstance(value, np.ndarray) and value.ndim and np.issubdtype(value.dtype, np.floating):
            changed.append(_change(distribution, value, declaration, generator))
        else:
            changed.append(value)
    return changed


def _change(distribution: str, value: Array, declaration: InputDeclaration, generator: np.random.Generator) -> Array:
    if distribution == "scaled":
        return np.multiply(value, declaration.scale, dtype=value.dtype)
    if distribution == "small":
        return np.multiply(value, _SMALL, dtype=value.dtype) if declaration.scale > 1 else value
    if distribution == "constant_rows":
        return _with_constant_rows(value)
    if distribution == "tiny_rows":
        return _with_tiny_rows(value) if declaration.scale > 1 and value.ndim > 1 else value
    magnitude = float(np.std(value.reshape(-1)[: 1 << 16]))
    if declaration.scale > 1:
        magnitude *= declaration.scale * (_SPIKE if distribution == "spikes" else _OUTLIER)
    else:
        magnitude *= _UNSCALABLE_SPIKE
    changed: Array = value.copy()
    later_half = distribution == "spikes"
    for index in _positions(value.shape, later_half, generator):
        sign = 1.0 if declaration.nonnegative or generator.random() < 0.5 else -1.0
        changed[index] = sign * magnitude
    return changed


def _with_constant_rows(value: Array) -> Array:
    """Makes the first, a middle and the last row (along the last axis) constant."""
    changed: Array = value.copy()
    rows = changed.reshape(-1, changed.shape[-1])
    chosen = _chosen_rows(rows)
    rows[chosen] = rows[chosen, :1]
    return changed


def _with_tiny_rows(value: Array) -> Array:
    """Scales the first, a middle and the last row (along the last axis) down by a power of two, which loses no bit."""
    changed: Array = value.copy()
    rows = changed.reshape(-1, changed.shape[-1])
    rows[_chosen_rows(rows)] *= value.dtype.type(_TINY)
    return changed


def _chosen_rows(rows: Array) -> list[int]:
    return sorted({0, len(rows) // 2, len(rows) - 1})


def _positions(
    shape: tuple[int, ...], later_half: bool, generator: np.random.Generator, count: int = 8
) -> list[tuple[int, ...]]:
    """Chooses positions; with ``later_half`` beyond the middle of every dimension, the very last one included."""
    positions = [tuple(size - 1 for size in shape)]
    for _ in range(count - 1):
        positions.append(tuple(int(generator.integers(size // 2 if later_half else 0, size)) for size in shape))
    return positions
