"""Every supported NKI function, traced and executed, against NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from accelopt_ray.nki_sim.numerics import run_program
from accelopt_ray.nki_sim.tracer import TensorSpec, trace_kernel

P, F = 128, 96

KERNEL = """
import numpy as np
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import neuronxcc.nki.isa as nisa

@nki.jit
def kernel({names}):
    out = nl.ndarray({shape}, dtype={dtype}, buffer=nl.shared_hbm)
    p, f = nl.arange(128)[:, None], nl.arange(96)[None, :]
{body}
    nl.store(out, r)
    return out
"""


def _sample(seed: int, shape: tuple[int, ...] = (P, F), low: float = -3.0, high: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


X = _sample(0)
Y = _sample(1)
POSITIVE = _sample(2, low=0.1, high=4.0)
COLUMN = _sample(3, (P, 1))
ROW = _sample(4, (1, F))
BITS = np.random.default_rng(5).integers(0, 255, (P, F)).astype(np.int32)
MORE_BITS = np.random.default_rng(6).integers(0, 8, (P, F)).astype(np.int32)
FLAGS = np.random.default_rng(7).integers(0, 2, (P, F)).astype(np.uint8)
EIGHT = -np.sort(-X, axis=1)[:, :8].copy()


@dataclass
class Case:
    """One call: ``body`` computes ``r`` from the tiles ``a``, ``b``, … loaded from ``inputs``."""

    name: str
    body: str
    inputs: list[np.ndarray]
    expected: Callable[..., Any]
    dtype: str = "nl.float32"
    tolerance: float = 2e-6
    setup: list[str] = field(default_factory=list)

    def run(self, target: str = "trn1") -> tuple[np.ndarray, np.ndarray]:
        exact = [np.asarray(i, np.float64) if i.dtype == np.float32 else i for i in self.inputs]
        expected = np.asarray(self.expected(*exact))
        names = [f"i{n}" for n in range(len(self.inputs))]
        lines = [f"{'abcd'[n]} = nl.load(i{n})" for n in range(len(self.inputs))]
        lines += [*self.setup, *self.body.strip().split("\n")]
        body = "\n".join("    " + line for line in lines)
        source = KERNEL.format(names=", ".join(names), shape=tuple(expected.shape), dtype=self.dtype, body=body)
        program = trace_kernel(source, [TensorSpec(i.shape, str(i.dtype)) for i in self.inputs], target=target)
        return run_program(program, self.inputs)[0], expected


def _erf(values: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(values)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _phi(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + _erf(x / math.sqrt(2)))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


UNARY: dict[str, tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]] = {
    "abs": (X, np.abs),
    "arctan": (X / 3, np.arctan),
    "ceil": (X, np.ceil),
    "cos": (X, np.cos),
    "erf": (X, _erf),
    "erf_dx": (X, lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x)),
    "exp": (X, np.exp),
    "floor": (X, np.floor),
    "gelu": (X, lambda x: x * _phi(x)),
    "gelu_apprx_sigmoid": (X, lambda x: x * _sigmoid(1.702 * x)),
    "gelu_apprx_tanh": (X, lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    "gelu_dx": (X, lambda x: _phi(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)),
    "log": (POSITIVE, np.log),
    "mish": (X, lambda x: x * np.tanh(_softplus(x))),
    "negative": (X, np.negative),
    "reciprocal": (POSITIVE, np.reciprocal),
    "relu": (X, lambda x: np.maximum(x, 0)),
    "rsqrt": (POSITIVE, lambda x: 1 / np.sqrt(x)),
    "sigmoid": (X, _sigmoid),
    "sign": (X, np.sign),
    "silu": (X, lambda x: x * _sigmoid(x)),
    "silu_dx": (X, lambda x: _sigmoid(x) * (1 + x * (1 - _sigmoid(x)))),
    "sin": (X, np.sin),
    "softplus": (X, _softplus),
    "sqrt": (POSITIVE, np.sqrt),
    "square": (X, np.square),
    "tan": (X / 3, np.tan),
    "tanh": (X, np.tanh),
    "trunc": (X, np.trunc),
}

BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "arctan2": np.arctan2,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}


def _scan(
    a: np.ndarray, b: np.ndarray, initial: Any, combine: Callable[..., Any], add: Callable[..., Any]
) -> np.ndarray:
    out = np.empty_like(a)
    running = initial
    for t in range(a.shape[1]):
        running = add(combine(running, a[:, t : t + 1]), b[:, t : t + 1])
        out[:, t : t + 1] = running
    return out


def _replace8(x: np.ndarray, vals: np.ndarray) -> np.ndarray:
    out = x.copy()
    for row, values in zip(out, vals, strict=True):
        for value in values:
            row[np.flatnonzero(row == value)[0]] = -1.0
    return out


def _shuffle(x: np.ndarray) -> np.ndarray:
    return x.reshape(4, 32, -1)[:, ::-1].reshape(x.shape)


def _triangle(x: np.ndarray) -> np.ndarray:
    rows, columns = np.indices(x.shape)
    return np.where(rows >= columns, x, -7.0)


CASES = [
    *(Case(f"nl.{name}", f"r = nl.{name}(a)", [data], f) for name, (data, f) in UNARY.items()),
    *(
        Case(f"nisa.activation-{name}", f"r = nisa.activation(op=nl.{name}, data=a)", [data], f)
        for name, (data, f) in UNARY.items()
        if name not in ("cos", "tan", "negative", "ceil", "floor", "trunc")
    ),
    *(Case(f"nl.{name}", f"r = nl.{name}(a, b, dtype=nl.float32)", [X, Y], f) for name, f in BINARY.items()),
    *(
        Case(f"nisa.tensor_tensor-{name}", f"r = nisa.tensor_tensor(a, b, op=nl.{name}, dtype=nl.float32)", [X, Y], f)
        for name, f in BINARY.items()
        if name != "arctan2"
    ),
    Case("nl.power", "r = nl.power(a, b)", [POSITIVE, X], np.power),
    Case("nl.add-column", "r = nl.add(a, b)", [X, COLUMN], np.add),
    Case("nl.add-row", "r = nl.add(a, b.broadcast_to((128, 96)))", [X, ROW], np.add),
    Case("operators", "r = (a + b) * 2.0 - a / 4.0", [X, Y], lambda a, b: (a + b) * 2 - a / 4),
    Case("nl.where", "r = nl.where(a, b, c)", [FLAGS, X, Y], lambda m, a, b: np.where(m != 0, a, b)),
    Case("nl.where-index", "r = nl.where(p >= f, a, -7.0)", [X], _triangle),
    Case("nl.transpose", "r = nl.copy(nl.transpose(a))", [X], np.transpose),
    Case("nisa.nc_transpose", "r = nisa.tensor_copy(nisa.nc_transpose(a))", [X], np.transpose),
    Case(
        "nisa.nc_transpose-vector",
        "r = nisa.nc_transpose(a[0:32, 0:32], engine=nisa.vector_engine)",
        [X],
        lambda x: x[:32, :32].T,
    ),
    Case("nl.sum", "r = nl.sum(a, axis=[1])", [X], lambda x: x.sum(1, keepdims=True)),
    Case("nl.max", "r = nl.max(a, axis=1)", [X], lambda x: x.max(1, keepdims=True)),
    Case("nl.min", "r = nl.min(a, axis=1)", [X], lambda x: x.min(1, keepdims=True)),
    Case("nl.prod", "r = nl.prod(a, axis=1)", [POSITIVE[:, :8]], lambda x: x.prod(1, keepdims=True)),
    Case("nl.mean", "r = nl.mean(a, axis=1)", [X], lambda x: x.mean(1, keepdims=True)),
    Case("nl.var", "r = nl.var(a, axis=1)", [X], lambda x: x.var(1, keepdims=True)),
    Case(
        "nl.softmax",
        "r = nl.softmax(a, axis=1)",
        [X],
        lambda x: np.exp(x - x.max(1, keepdims=True)) / np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True),
    ),
    Case(
        "nl.rms_norm",
        "r = nl.rms_norm(a, b.broadcast_to((128, 96)), axis=1, n=96)",
        [X, ROW],
        lambda x, w: x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * w,
    ),
    Case(
        "nisa.activation-scale-bias",
        "r = nisa.activation(op=nl.exp, data=a, bias=b, scale=0.5)",
        [X, COLUMN],
        lambda x, v: np.exp(0.5 * x + v),
    ),
    Case(
        "nisa.activation-vector-scale",
        "r = nisa.activation(op=nl.tanh, data=a, scale=b)",
        [X, COLUMN],
        lambda x, v: np.tanh(x * v),
    ),
    Case(
        "nisa.activation_reduce",
        "s = nl.ndarray((128, 1), dtype=nl.float32)\n"
        "t = nisa.activation_reduce(op=nl.exp, data=a, reduce_op=np.add, reduce_res=s)\n"
        "r = nl.multiply(t, s)",
        [X],
        lambda x: np.exp(x) * np.exp(x).sum(1, keepdims=True),
    ),
    Case(
        "nisa.activation-reduce-commands",
        "s = nl.ndarray((128, 1), dtype=nl.float32)\n"
        "t = nisa.activation(op=nl.square, data=a, reduce_op=np.add, reduce_cmd=nisa.reduce_cmd.reset_reduce)\n"
        "r = nisa.activation(op=nl.copy, data=b, reduce_op=np.add, reduce_cmd=nisa.reduce_cmd.reduce, reduce_res=s)\n"
        "r = nl.add(s, 0.0)",
        [X, Y],
        lambda x, y: (x * x).sum(1, keepdims=True) + y.sum(1, keepdims=True),
    ),
    Case(
        "nisa.tensor_scalar",
        "r = nisa.tensor_scalar(a, np.subtract, 1.5, True, np.multiply, b)",
        [X, COLUMN],
        lambda x, v: (1.5 - x) * v,
    ),
    Case(
        "nisa.tensor_scalar-rsqrt",
        "r = nisa.tensor_scalar(a, np.add, 0.25, op1=nl.rsqrt, operand1=None)",
        [POSITIVE],
        lambda x: 1 / np.sqrt(x + 0.25),
    ),
    Case(
        "nisa.tensor_scalar_reduce",
        "s = nl.ndarray((128, 1), dtype=nl.float32)\n"
        "t = nisa.tensor_scalar_reduce(data=a, op0=np.multiply, operand0=2.0, reduce_op=np.add, reduce_res=s)\n"
        "r = nl.add(t, s)",
        [X],
        lambda x: 2 * x + 2 * x.sum(1, keepdims=True),
    ),
    Case(
        "nisa.scalar_tensor_tensor",
        "r = nisa.scalar_tensor_tensor(\n"
        "    data=a, op0=np.multiply, operand0=b, op1=np.subtract, operand1=c, reverse1=True)",
        [X, COLUMN, Y],
        lambda x, v, y: y - x * v,
    ),
    Case(
        "nisa.tensor_reduce-negate",
        "r = nisa.tensor_reduce(np.max, a, axis=[1], negate=True)",
        [X],
        lambda x: -x.max(1, keepdims=True),
    ),
    Case(
        "nisa.tensor_partition_reduce",
        "r = nisa.tensor_partition_reduce(np.add, a)",
        [X],
        lambda x: x.sum(0, keepdims=True),
        tolerance=1e-5,
    ),
    Case(
        "nisa.tensor_tensor_scan",
        "r = nisa.tensor_tensor_scan(a, b, initial=0, op0=np.multiply, op1=np.add)",
        [X / 4, Y],
        lambda a, b: _scan(a, b, 0.0, np.multiply, np.add),
    ),
    Case(
        "nisa.tensor_tensor_scan-reverse",
        "r = nisa.tensor_tensor_scan(a, b, initial=c, op0=np.subtract, op1=np.maximum, reverse0=True)",
        [X, Y, COLUMN],
        lambda a, b, c: _scan(a, b, c, lambda running, x: x - running, np.maximum),
        tolerance=1e-5,
    ),
    Case("nisa.reciprocal", "r = nisa.reciprocal(a)", [POSITIVE], np.reciprocal),
    Case("nisa.memset", "r = nisa.memset((128, 96), 2.5, nl.float32)", [X], lambda x: np.full((P, F), 2.5)),
    Case("nl.full", "r = nl.full((128, 96), -1.5, dtype=nl.float32)", [X], lambda x: np.full((P, F), -1.5)),
    Case(
        "nisa.iota",
        "r = nisa.iota(3 * p - 2 * f + 5, dtype=nl.int32)",
        [X],
        lambda x: 3 * np.arange(P)[:, None] - 2 * np.arange(F)[None] + 5,
        dtype="nl.int32",
    ),
    Case(
        "nisa.affine_select",
        "r = nisa.affine_select(pred=(p >= f), on_true_tile=a, on_false_value=-7.0)",
        [X],
        _triangle,
    ),
    Case(
        "nisa.select_reduce",
        "r = nl.ndarray((128, 96), dtype=nl.float32)\nnisa.select_reduce(dst=r, predicate=a, on_true=b, on_false=0.5)",
        [FLAGS, X],
        lambda m, x: np.where(m != 0, x, 0.5),
    ),
    Case(
        "nisa.tensor_copy_predicated",
        "r = nl.copy(b)\nnisa.tensor_copy_predicated(src=c, dst=r, predicate=a)",
        [FLAGS, X, Y],
        lambda m, x, y: np.where(m != 0, y, x),
    ),
    Case(
        "nisa.bn_stats",
        "r = nisa.bn_aggr(nisa.bn_stats(a))",
        [X],
        lambda x: np.stack([x.mean(1), x.var(1)], 1),
    ),
    Case("nisa.max8", "r = nisa.max8(src=a)", [X], lambda x: -np.sort(-x, 1)[:, :8]),
    Case(
        "nisa.nc_find_index8",
        "r = nisa.nc_find_index8(data=a, vals=b)",
        [X, EIGHT],
        lambda x, v: np.argsort(-x, axis=1)[:, :8],
        dtype="nl.uint32",
    ),
    Case("nisa.nc_match_replace8", "r = nisa.nc_match_replace8(data=a, vals=b, imm=-1.0)", [X, EIGHT], _replace8),
    Case(
        "nisa.nc_stream_shuffle",
        "r = nl.ndarray((128, 96), dtype=nl.float32)\n"
        "nisa.nc_stream_shuffle(a, r, shuffle_mask=list(range(31, -1, -1)))",
        [X],
        _shuffle,
    ),
    Case(
        "nl.matmul",
        "r = nl.copy(nl.matmul(a, b))",
        [X, _sample(8, (F, 160))],
        np.matmul,
        tolerance=1e-5,
    ),
    Case(
        "nl.matmul-transpose_x",
        "r = nl.copy(nl.matmul(a, b, transpose_x=True))",
        [X, _sample(9, (P, 160))],
        lambda a, b: a.T @ b,
        tolerance=1e-5,
    ),
    Case(
        "nisa.nc_matmul",
        "r = nisa.tensor_copy(nisa.nc_matmul(a, b))",
        [X, _sample(9, (P, 160))],
        lambda a, b: a.T @ b,
        tolerance=1e-5,
    ),
    Case(
        "nisa.nc_matmul-transpose",
        "e = nl.load(nl.shared_constant(np.identity(128, dtype=np.float32)))\n"
        "r = nl.copy(nisa.nc_matmul(a, e, is_moving_onezero=True, is_transpose=True))",
        [X],
        np.transpose,
        tolerance=0.0,
    ),
    Case("nl.load_transpose2d", "r = nl.load_transpose2d(i0)", [X[:, :64]], np.transpose),
    Case("nl.broadcast_to", "r = nl.broadcast_to(a, shape=(128, 96))", [ROW], lambda x: np.broadcast_to(x, (P, F))),
    Case("bitwise_and", "r = nl.bitwise_and(a, b)", [BITS, MORE_BITS], np.bitwise_and, dtype="nl.int32"),
    Case("bitwise_or", "r = nl.bitwise_or(a, b)", [BITS, MORE_BITS], np.bitwise_or, dtype="nl.int32"),
    Case("bitwise_xor", "r = nl.bitwise_xor(a, b)", [BITS, MORE_BITS], np.bitwise_xor, dtype="nl.int32"),
    Case("left_shift", "r = nl.left_shift(a, b)", [BITS, MORE_BITS], np.left_shift, dtype="nl.int32"),
    Case("right_shift", "r = nl.right_shift(a, b)", [BITS, MORE_BITS], np.right_shift, dtype="nl.int32"),
    Case("invert", "r = nl.invert(a)", [BITS], np.invert, dtype="nl.int32"),
    Case("logical_not", "r = nl.logical_not(a, dtype=nl.float32)", [X], np.logical_not),
    Case(
        "integer-through-float",
        "r = nl.multiply(a, b, dtype=nl.int32)",
        [BITS, MORE_BITS],
        np.multiply,
        dtype="nl.int32",
    ),
    Case(
        "astype-bfloat16",
        "r = nl.add(a, 0.0, dtype=nl.bfloat16).astype(nl.float32)",
        [X],
        lambda x: x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64),
        tolerance=0.0,
    ),
    Case(
        "float16-store",
        "r = nl.copy(a, dtype=nl.float16)",
        [X],
        lambda x: x.astype(np.float16),
        dtype="nl.float16",
        tolerance=0.0,
    ),
    Case(
        "float8-round-trip",
        "r = nl.copy(nl.copy(a, dtype=nl.float8_e4m3), dtype=nl.float32)",
        [X],
        lambda x: x.astype(np.float32).astype(ml_dtypes.float8_e4m3).astype(np.float64),
        tolerance=0.0,
    ),
    Case(
        "int-cast-rounds-and-saturates",
        "r = nl.multiply(a, 100.0, dtype=nl.int8)",
        [X],
        lambda x: np.clip(np.rint(np.float32(x) * np.float32(100)), -128, 127),
        dtype="nl.int8",
        tolerance=0.0,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_function_agrees_with_numpy(case: Case) -> None:
    found, expected = case.run()
    assert found.shape == expected.shape
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    error = np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1e-30)
    assert error <= case.tolerance


def test_range_select_keeps_elements_between_the_bounds() -> None:
    low, high = np.full((P, 1), 10, np.float32), np.arange(P, dtype=np.float32).reshape(P, 1)
    case = Case(
        "nisa.range_select",
        "r = nisa.range_select(on_true_tile=a, comp_op0=np.greater_equal, comp_op1=np.less, bound0=b, bound1=c)",
        [X, low, high],
        lambda x, b, c: np.where((np.arange(F) >= b) & (np.arange(F) < c), x, np.finfo(np.float32).min),
    )
    found, expected = case.run("trn2")
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_rand_is_uniform_and_another_in_each_run() -> None:
    case = Case("nl.rand", "r = nl.rand((128, 96))", [X], lambda x: x)
    first, _ = case.run()
    second, _ = case.run()
    assert first.min() >= 0 and first.max() < 1 and abs(first.mean() - 0.5) < 0.02
    assert (first != second).mean() > 0.99


def test_dropout_zeroes_about_the_given_share() -> None:
    found, _ = Case("nl.dropout", "r = nl.dropout(a, 0.25)", [POSITIVE], lambda x: x).run()
    assert abs((found == 0).mean() - 0.25) < 0.02
    kept = found != 0
    np.testing.assert_array_equal(found[kept], POSITIVE[kept])
