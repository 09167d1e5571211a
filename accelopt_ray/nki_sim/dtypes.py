"""Element types of NKI tensors: canonical names, sizes, NumPy storage types and the promotion rules.

Every other module of the simulator names a type by its canonical string. ``bool`` is stored as ``uint8``, as on the
device; ``tfloat32`` is stored in 32 bits and rounded by whoever computes with it.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import ml_dtypes
import numpy as np

_STORAGE: dict[str, Any] = {
    "float32": np.float32,
    "tfloat32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
}

#: Canonical names, widest first.
NAMES: tuple[str, ...] = tuple(_STORAGE)

_ALIASES = {"bool": "uint8", "bool_": "uint8", "fp32": "float32", "float8e4": "float8_e4m3", "float8e5": "float8_e5m2"}
_FLOATS = ("float32", "tfloat32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2")


class DType(str):
    """A type as kernels see it: a string that compares equal to NumPy's spelling and knows its size."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """Canonical name."""
        return str.__str__(self)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return itemsize(self.name)

    @property
    def type(self) -> Any:
        """NumPy scalar type."""
        return _STORAGE[self.name]

    def __call__(self, value: Any = 0) -> Any:
        return _STORAGE[self.name](value)

    def __eq__(self, other: object) -> bool:
        name = canonical(other)
        return name is not None and name == self.name

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)


def canonical(value: object) -> str | None:
    """Returns the canonical name of anything that names a supported type, or None.

    Args:
        value: A name, a NumPy or ml_dtypes type or dtype, or a :class:`DType`.
    """
    if isinstance(value, str):
        name = str.__str__(value)
        return name if name in _STORAGE else _ALIASES.get(name)
    if value is None:
        return None
    if value is float:
        return "float32"
    if value is int:
        return "int32"
    if value is bool:
        return "uint8"
    try:
        return _canonical_numpy(value)
    except TypeError:
        return None


@lru_cache(maxsize=256)
def _canonical_numpy(value: object) -> str | None:
    name = np.dtype(value).name  # type: ignore[call-overload]
    return name if name in _STORAGE else _ALIASES.get(name)


def itemsize(name: str) -> int:
    """Bytes per element of the type called ``name``."""
    return int(np.dtype(_STORAGE[name]).itemsize)


def storage(name: str) -> np.dtype[Any]:
    """NumPy dtype that holds elements of the type called ``name``."""
    dtype: np.dtype[Any] = np.dtype(_STORAGE[name])
    return dtype


def is_float(name: str) -> bool:
    """Whether ``name`` is a floating-point type."""
    return name in _FLOATS


def is_integer(name: str) -> bool:
    """Whether ``name`` is an integer type."""
    return name not in _FLOATS


def _integer_range(name: str) -> tuple[int, int]:
    info = np.iinfo(_STORAGE[name])
    return int(info.min), int(info.max)


@cache
def promote(left: str, right: str) -> str:
    """Result type of an operation on two tensors.

    A float wins over an integer; of two floats the one that can hold both, widened when neither can (fp16 with bf16
    gives fp32, the two fp8 formats give bf16); of two integers the smallest that can hold both, fp32 when none can.
    """
    if left == right:
        return left
    if is_float(left) != is_float(right):
        return left if is_float(left) else right
    if is_float(left):
        pair = {left, right}
        if "float32" in pair or "tfloat32" in pair:
            return "float32"
        if pair == {"float16", "bfloat16"}:
            return "float32"
        if pair == {"float8_e4m3", "float8_e5m2"}:
            return "bfloat16"
        return next(name for name in ("bfloat16", "float16") if name in pair)
    low = min(_integer_range(left)[0], _integer_range(right)[0])
    high = max(_integer_range(left)[1], _integer_range(right)[1])
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32"):
        smallest, largest = _integer_range(name)
        if smallest <= low and high <= largest:
            return name
    return "float32"


def promote_scalar(tensor: str, value: float | int | bool) -> str:
    """Result type of an operation on a tensor and a Python number, which counts as uint8, int32 or fp32 by its type."""
    if isinstance(value, (bool, int)) or tensor == "tfloat32":
        return tensor if is_float(tensor) or isinstance(value, bool) else promote(tensor, "int32")
    return promote(tensor, "float32")
