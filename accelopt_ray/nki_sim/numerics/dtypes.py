"""Element types of the device, and the casts between them.

The engines compute in float32 and convert on write: floats round to nearest even, integers round to nearest even and
saturate, ``tfloat32`` keeps ten mantissa bits. ``tfloat32`` is stored as float32 that has been rounded.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.numerics.errors import NumericsError
from accelopt_ray.outcome import EvaluationOutcome

Array = NDArray[Any]

TFLOAT32 = "tfloat32"
#: What an integer element holds before it is written; floating-point elements hold NaN.
INTEGER_SENTINEL = 4

_STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    TFLOAT32: np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "int32": np.dtype(np.int32),
    "uint8": np.dtype(np.uint8),
    "uint16": np.dtype(np.uint16),
    "uint32": np.dtype(np.uint32),
    "bool": np.dtype(np.uint8),
}


def storage_dtype(name: str) -> np.dtype[Any]:
    """Returns the NumPy type that holds elements of the device type ``name``.

    Raises:
        NumericsError: The device has no such type.
    """
    try:
        return _STORAGE[name]
    except KeyError:
        raise NumericsError(
            f"data type '{name}' is not supported on the device", outcome=EvaluationOutcome.UNSUPPORTED
        ) from None


def is_integer(name: str) -> bool:
    """Tells whether the device type ``name`` is an integer (``bool`` counts as uint8)."""
    return storage_dtype(name).kind in "iu"


def sentinel(name: str) -> float | int:
    """Returns what an element of type ``name`` holds before it is written."""
    return INTEGER_SENTINEL if is_integer(name) else float("nan")


def is_plain_float32(name: str) -> bool:
    """Tells whether results can be written to the type ``name`` without a conversion."""
    return name == "float32"


def round_to_tfloat32(values: Array) -> Array:
    """Rounds float32 values to ten mantissa bits, to nearest even; infinities and NaN stay."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    result: Array = np.where(special, bits, rounded).view(np.float32)
    return result


def cast(values: Array, name: str) -> Array:
    """Converts ``values`` to the device type ``name`` as the engines do on write."""
    target = storage_dtype(name)
    if name == TFLOAT32:
        return round_to_tfloat32(values.astype(np.float32, copy=False))
    if values.dtype == target:
        return values
    if target.kind not in "iu":
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(np.float32, copy=False).astype(target)
    limits = np.iinfo(target)
    if values.dtype.kind in "iu":
        return np.clip(values.astype(np.int64), limits.min, limits.max).astype(target)
    wide = np.nan_to_num(np.rint(values.astype(np.float64)), nan=0.0, posinf=limits.max, neginf=limits.min)
    return np.clip(wide, limits.min, limits.max).astype(target)
