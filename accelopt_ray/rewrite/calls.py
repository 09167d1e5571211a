"""The functions of ``nl`` and ``nisa`` the rewriter understands, in one canonical vocabulary.

Each function maps to a canonical operation. Operand and attribute names follow the instruction set's names.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Unary functions that one ScalarE activation computes.
ACTIVATIONS = frozenset(
    [
        "exp",
        "sqrt",
        "rsqrt",
        "square",
        "sigmoid",
        "silu",
        "gelu",
        "tanh",
        "relu",
        "log",
        "softplus",
        "sin",
        "abs",
        "sign",
        "reciprocal",
        "erf",
        "mish",
    ]
)
#: Two-operand arithmetic that VectorE computes.
BINARY = frozenset(["add", "subtract", "multiply", "maximum", "minimum", "divide"])
COMMUTATIVE = frozenset({"add", "multiply", "maximum", "minimum"})
REDUCTIONS = frozenset({"sum", "max", "min"})


@dataclass(frozen=True)
class Signature:
    """How a function's call is read.

    Attributes:
        kind: Canonical operation.
        positional: Parameter names in order.
        operands: Parameters that are tiles, numbers or vectors.
        attributes: Parameters that are static.
    """

    kind: str
    positional: tuple[str, ...]
    operands: tuple[str, ...]
    attributes: tuple[str, ...] = ()


def _signature(kind: str, positional: str, operands: str, attributes: str = "") -> Signature:
    return Signature(kind, tuple(positional.split()), tuple(operands.split()), tuple(attributes.split()))


SIGNATURES: dict[str, Signature] = {
    "nl.load": _signature("load", "src", "src"),
    "nl.load_transpose2d": _signature("load_transpose", "src", "src"),
    "nisa.dma_transpose": _signature("load_transpose", "src", "src", "axes"),
    "nl.store": _signature("store", "dst value", "dst value"),
    "nl.copy": _signature("copy", "src", "src"),
    "nisa.tensor_copy": _signature("copy", "src", "src", "engine"),
    "nisa.activation": _signature("activation", "op data", "data bias scale reduce_res", "op reduce_op reduce_cmd"),
    "nisa.activation_reduce": _signature("activation_reduce", "op data", "data bias scale reduce_res", "op reduce_op"),
    "nisa.tensor_tensor": _signature("tensor_tensor", "data1 data2 op", "data1 data2", "op engine"),
    "nisa.tensor_scalar": _signature(
        "tensor_scalar",
        "data op0 operand0 reverse0 op1 operand1 reverse1",
        "data operand0 operand1",
        "op0 reverse0 op1 reverse1 engine",
    ),
    "nisa.tensor_scalar_reduce": _signature(
        "tensor_scalar_reduce", "", "data operand0 reduce_res", "op0 reverse0 reduce_op"
    ),
    "nisa.scalar_tensor_tensor": _signature(
        "scalar_tensor_tensor", "", "data operand0 operand1", "op0 op1 reverse0 reverse1"
    ),
    "nisa.tensor_reduce": _signature("reduce", "op data axis", "data", "op axis negate keepdims"),
    "nl.loop_reduce": _signature("loop_reduce", "x op loop_indices", "x", "op loop_indices"),
    "nisa.reciprocal": _signature("reciprocal", "data", "data"),
    "nl.reciprocal": _signature("reciprocal", "data", "data"),
    "nisa.nc_matmul": _signature(
        "matmul",
        "stationary moving",
        "stationary moving",
        "is_stationary_onezero is_moving_onezero is_transpose tile_position tile_size",
    ),
    "nl.matmul": _signature("high_matmul", "x y", "x y", "transpose_x"),
    "nisa.nc_transpose": _signature("transpose", "data", "data", "engine"),
    "nl.transpose": _signature("transpose", "data", "data"),
    "nisa.memset": _signature("memset", "shape value dtype", "", "shape value engine"),
    "nisa.tensor_tensor_scan": _signature(
        "scan", "data0 data1 initial op0 op1 reverse0 reverse1", "data0 data1 initial", "op0 op1 reverse0 reverse1"
    ),
    "nl.broadcast_to": _signature("broadcast", "src shape", "src", "shape"),
}
for _name in ACTIVATIONS - {"reciprocal"}:
    SIGNATURES[f"nl.{_name}"] = Signature("unary", ("data",), ("data",))
for _name in BINARY:
    SIGNATURES[f"nl.{_name}"] = Signature("binary", ("x", "y"), ("x", "y"))
for _name in REDUCTIONS:
    SIGNATURES[f"nl.{_name}"] = Signature("high_reduce", ("data", "axis"), ("data",), ("axis", "keepdims"))

#: Reductions by helper name -> reduction operation.
REDUCE_OPERATION = {"sum": "add", "max": "max", "min": "min"}


def operation_name(text: str) -> str:
    """Canonical name of an operation argument: ``np.add`` -> ``add``, ``nl.max`` -> ``max``."""
    name = text.strip().rsplit(".", 1)[-1].strip("'\"")
    return {"max": "maximum", "min": "minimum", "mul": "multiply", "sub": "subtract"}.get(name, name)


def canonical_module(dotted: str) -> str:
    """``neuronxcc.nki.language`` -> ``nl``, ``neuronxcc.nki.isa`` -> ``nisa``, ``numpy`` -> ``np``."""
    return {
        "neuronxcc.nki.language": "nl",
        "nki.language": "nl",
        "neuronxcc.nki.isa": "nisa",
        "nki.isa": "nisa",
        "neuronxcc.nki": "nki",
        "neuronxcc.nki.typing": "nt",
        "numpy": "np",
    }.get(dotted, dotted)
