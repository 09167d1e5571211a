"""Inputs with one element changed in every tile, for the influence check.

Whatever part of the inputs a kernel leaves out, some perturbed element lies in it; where the reference's output moves,
the kernel's has to move alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nkibench.reference import Value
from nkibench.task_file import InputDeclaration

INFLUENCE = "influence"

# Extents of a tile in the last two dimensions: a partition dimension and the widest tile of the tensor engine. Leading
# dimensions are covered one index at a time, up to a bound on the number of tiles.
_TILE_ROWS = 128
_TILE_COLUMNS = 512
_MAX_TILES = 4096
_STEP = 2.0  # standard deviations
_SMALL_STEP = 0.5  # for inputs whose range the mathematics depends on


def perturb(inputs: Sequence[Value], declarations: Sequence[InputDeclaration], seed: int) -> list[Value]:
    """Returns copies of the inputs with one element per tile moved by a multiple of its array's standard deviation.

    Args:
        inputs: Ordinary inputs; not modified.
        declarations: One per input: an input declared nonnegative is moved upwards, one that may not be scaled by less.
        seed: Chooses the elements.
    """
    generator = np.random.default_rng([seed, 1])
    return [
        _perturbed(value, declaration, generator)
        if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind == "f"
        else value
        for value, declaration in zip(inputs, declarations, strict=True)
    ]


def _perturbed(
    value: npt.NDArray[Any], declaration: InputDeclaration, generator: np.random.Generator
) -> npt.NDArray[Any]:
    changed: npt.NDArray[Any] = value.copy()
    steps = _SMALL_STEP if declaration.scale == 1 else _STEP
    step = steps * float(np.std(value.reshape(-1)[: 1 << 16]))
    for index in _one_per_tile(value.shape, generator):
        sign = 1.0 if declaration.nonnegative or generator.random() < 0.5 else -1.0
        changed[index] += value.dtype.type(sign * step)
    return changed


def _one_per_tile(shape: tuple[int, ...], generator: np.random.Generator) -> list[tuple[int, ...]]:
    extents = [1] * len(shape)
    extents[-1] = _TILE_COLUMNS
    if len(shape) > 1:
        extents[-2] = _TILE_ROWS
    corners = list(itertools.product(*(range(0, size, extent) for size, extent in zip(shape, extents, strict=True))))
    if len(corners) > _MAX_TILES:
        chosen = generator.choice(len(corners), size=_MAX_TILES, replace=False)
        corners = [corners[position] for position in sorted(chosen)]
    return [
        tuple(
            int(generator.integers(start, min(start + extent, size)))
            for start, extent, size in zip(corner, extents, shape, strict=True)
        )
        for corner in corners
    ]
