"""Masks: which part of an instruction's output an iteration computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.numerics.memory import Clip, Memory
from accelopt_ray.nki_sim.program import Affine, MaskTerm


def evaluate(affine: Affine, indices: dict[int, int]) -> int:
    """Returns the value of ``affine`` in the current iteration."""
    return affine.constant + sum(factor * indices[loop] for loop, factor in affine.terms)


@dataclass(frozen=True)
class Extent:
    """What an iteration computes: nothing, a clipped tile, or chosen elements of it."""

    empty: bool = False
    clip: Clip = None
    where: NDArray[Any] | None = None


EVERYTHING = Extent()
NOTHING = Extent(empty=True)


class Mask:
    """The conjunction of an instruction's mask terms over the axes of its output tile.

    Args:
        terms: The conditions.
        shape: Extents of the output tile, batch axes first.
        batch: How many leading axes are batch axes (mask terms count from after them).
        memory: Holds the loop indices.
    """

    def __init__(self, terms: tuple[MaskTerm, ...], shape: tuple[int, ...], batch: int, memory: Memory):
        self._indices = memory.indices
        self._shape = shape
        self._terms: list[tuple[Affine, list[tuple[int, int]]]] = []
        for term in terms:
            strides = [(axis + batch, stride) for axis, stride in term.strides if stride and shape[axis + batch] > 1]
            self._terms.append((term.start, strides))

    @property
    def needs_choice(self) -> bool:
        """Whether some condition involves several axes at once, so that a clip cannot express it."""
        return any(len(strides) > 1 for _, strides in self._terms)

    def extent(self) -> Extent:
        """Evaluates the mask in the current iteration."""
        bounds: dict[int, tuple[int, int]] = {}
        where: NDArray[Any] | None = None
        for start, strides in self._terms:
            value = evaluate(start, self._indices)
            if not strides:
                if value < 0:
                    return NOTHING
                continue
            worst = value + sum(min(0, stride * (self._shape[axis] - 1)) for axis, stride in strides)
            if worst >= 0:
                continue
            if len(strides) == 1:
                axis, stride = strides[0]
                low, high = bounds.get(axis, (0, self._shape[axis]))
                if stride < 0:
                    high = min(high, value // -stride + 1)
                else:
                    low = max(low, -(value // stride))
                if high <= low:
                    return NOTHING
                bounds[axis] = (low, high)
            else:
                total = np.full((1,) * len(self._shape), value, dtype=np.int64)
                for axis, stride in strides:
                    along = np.arange(self._shape[axis], dtype=np.int64) * stride
                    total = total + along.reshape([-1 if a == axis else 1 for a in range(len(self._shape))])
                where = total >= 0 if where is None else where & (total >= 0)
        clip = tuple((axis, low, high) for axis, (low, high) in sorted(bounds.items())) or None
        if where is not None:
            where = np.broadcast_to(where, self._shape)
            if clip is not None:
                slices = [slice(None)] * len(self._shape)
                for axis, low, high in clip:
                    slices[axis] = slice(low, high)
                where = where[tuple(slices)]
        if clip is None and where is None:
            return EVERYTHING
        return Extent(False, clip, where)
