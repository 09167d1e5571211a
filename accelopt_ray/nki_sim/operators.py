"""Canonical names of the operations that instructions carry in their ``op`` attributes.

A kernel may pass ``nl.add``, ``np.add`` or a string; the program always holds the canonical name, which is also the
key under which numerics implement it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from accelopt_ray.nki_sim import errors

#: Two-operand operations of the vector engines, computed in fp32.
ARITHMETIC_OPS = frozenset(
    {
        "add",
        "subtract",
        "multiply",
        "divide",
        "maximum",
        "minimum",
        "power",
        "mod",
        "equal",
        "not_equal",
        "less",
        "less_equal",
        "greater",
        "greater_equal",
        "logical_and",
        "logical_or",
        "logical_xor",
        "abs_max",
        "abs_min",
        "arctan2",
        "bypass",
    }
)

#: Two-operand operations on integers, without a cast.
BITVECTOR_OPS = frozenset(
    {
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "left_shift",
        "right_shift",
        "arith_shift_right",
    }
)

#: One-operand operations that ``tensor_scalar`` also takes (their second operand is ignored).
UNARY_ALU_OPS = frozenset(
    {
        "abs",
        "rsqrt",
        "logical_not",
        "invert",
    }
)

#: What ``tensor_tensor`` and ``tensor_scalar`` can compute.
ALU_OPS = ARITHMETIC_OPS | BITVECTOR_OPS | UNARY_ALU_OPS

#: Operations that give a truth value.
COMPARISON_OPS = frozenset(
    {
        "equal",
        "not_equal",
        "less",
        "less_equal",
        "greater",
        "greater_equal",
        "logical_and",
        "logical_or",
        "logical_xor",
        "logical_not",
    }
)

#: Operations whose order does not matter, so that parallel iterations may share a destination.
ASSOCIATIVE_OPS = frozenset(
    {
        "add",
        "multiply",
        "maximum",
        "minimum",
        "logical_and",
        "logical_or",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
    }
)

#: Operations that a reduction may use.
REDUCE_OPS = ASSOCIATIVE_OPS | {"subtract"}

#: The activation table: functions of one fp32 value.
ACTIVATION_OPS = frozenset(
    {
        "copy",
        "square",
        "sigmoid",
        "relu",
        "gelu",
        "gelu_dx",
        "gelu_apprx_tanh",
        "gelu_apprx_sigmoid",
        "silu",
        "silu_dx",
        "tanh",
        "softplus",
        "mish",
        "erf",
        "erf_dx",
        "exp",
        "log",
        "sin",
        "cos",
        "tan",
        "arctan",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "sign",
        "abs",
        "floor",
        "ceil",
        "trunc",
        "negative",
        "is_finite",
    }
)

_ALIASES = {
    "max": "maximum",
    "amax": "maximum",
    "min": "minimum",
    "amin": "minimum",
    "sum": "add",
    "prod": "multiply",
    "true_divide": "divide",
    "float_power": "power",
    "remainder": "mod",
    "fmod": "mod",
    "absolute": "abs",
    "arctan": "arctan",
    "atan": "arctan",
    "bitwise_not": "invert",
    "bitwise_invert": "invert",
    "identity": "copy",
    "swish": "silu",
    "all": "logical_and",
    "any": "logical_or",
    "bitwise_left_shift": "left_shift",
    "bitwise_right_shift": "right_shift",
    "negate": "negative",
}

_KNOWN = ALU_OPS | REDUCE_OPS | ACTIVATION_OPS


def op_name(op: Any, api: str) -> str:
    """Returns the canonical name of an operation given as a function or a name.

    Args:
        op: An ``nl`` function, a NumPy ufunc or function, or a name.
        api: The instruction it was passed to, for the message.

    Raises:
        KernelError: When it is no operation that an instruction can carry.
    """
    if op is None:
        raise errors.operand_missing("op")
    given = op if isinstance(op, str) else getattr(op, "nki_op", None) or getattr(op, "__name__", "")
    name = _ALIASES.get(str(given), str(given))
    if name not in _KNOWN:
        raise errors.op_not_supported(name or repr(op), api)
    return name


def require_op(op: Any, allowed: frozenset[str], api: str) -> str:
    """As :func:`op_name`, and one of ``allowed``."""
    name = op_name(op, api)
    if name not in allowed:
        raise errors.op_not_supported(name, api)
    return name


def is_numpy_scalar(value: Any) -> bool:
    """Whether ``value`` is a NumPy scalar or an array of one element without axes."""
    return isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
