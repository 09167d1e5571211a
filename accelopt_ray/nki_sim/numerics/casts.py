"""Conversions between element types, as the engines do them on write.

The engines compute in float32. Floats round to nearest even, integers round to nearest even and saturate, ``tfloat32``
keeps ten mantissa bits and is stored as float32 that has been rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.dtypes import is_integer, storage

Array = NDArray[Any]

TFLOAT32 = "tfloat32"
#: What an integer element holds before it is written; floating-point elements hold NaN.
INTEGER_SENTINEL = 4


def sentinel(name: str) -> float | int:
    """Returns what an element of type ``name`` holds before it is written."""
    return INTEGER_SENTINEL if is_integer(name) else float("nan")


def round_to_tfloat32(values: Array) -> Array:
    """Rounds float32 values to ten mantissa bits, to nearest even; infinities and NaN stay."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    result: Array = np.where(special, bits, rounded).view(np.float32)
    return result


def cast(values: Array, name: str) -> Array:
    """Converts ``values`` to the device type ``name`` as the engines do on write."""
    target = storage(name)
    if name == TFLOAT32:
        return round_to_tfloat32(values.astype(np.float32, copy=False))
    if values.dtype == target:
        return values
    if target.kind not in "iu":
        with np.errstate(over="ignore", invalid="ignore"):
            result: Array = values.astype(np.float32, copy=False).astype(target)
        return result
    limits = np.iinfo(target)
    if values.dtype.kind in "iu":
        return np.clip(values.astype(np.int64), limits.min, limits.max).astype(target)
    wide = np.nan_to_num(np.rint(values.astype(np.float64)), nan=0.0, posinf=limits.max, neginf=limits.min)
    return np.asarray(np.clip(wide, limits.min, limits.max).astype(target))
