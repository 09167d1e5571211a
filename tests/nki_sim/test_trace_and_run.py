"""Kernels from source text to numbers: each API does on tiles what NumPy does on arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernel_texts import kernel_text, specs

from accelopt_ray.nki_sim.numerics import run_program
from accelopt_ray.nki_sim.tracer import trace_kernel

Array = np.ndarray
_RNG = np.random.default_rng(0)
_X = _RNG.normal(size=(128, 64)).astype(np.float32)
_Y = _RNG.normal(size=(128, 64)).astype(np.float32)
_P = np.abs(_X) + np.float32(0.5)


def run(
    body: str,
    *inputs: Array | float,
    parameters: str = "x",
    out: str = "x.shape",
    dtype: str = "nl.float32",
    target: str = "trn1",
) -> Array:
    program = trace_kernel(kernel_text(body, parameters, out, dtype), specs(*inputs), target=target)
    (result,) = run_program(program, list(inputs))
    return np.asarray(result)


def check(body: str, expected: Array, *inputs: Array | float, rtol: float = 1e-5, **options: str) -> None:
    result = run(body, *inputs, **options)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result.astype(np.float64), expected.astype(np.float64), rtol=rtol, atol=1e-5)


_ERF = np.vectorize(math.erf)


def _sigmoid(v: Array) -> Array:
    return 1 / (1 + np.exp(-v))


_UNARY: dict[str, tuple[Callable[[Array], Array], Array]] = {
    "nl.exp": (np.exp, _X),
    "nl.log": (np.log, _P),
    "nl.sqrt": (np.sqrt, _P),
    "nl.rsqrt": (lambda v: 1 / np.sqrt(v), _P),
    "nl.square": (np.square, _X),
    "nl.abs": (np.abs, _X),
    "nl.sign": (np.sign, _X),
    "nl.sin": (np.sin, _X),
    "nl.cos": (np.cos, _X),
    "nl.arctan": (np.arctan, _X),
    "nl.tanh": (np.tanh, _X),
    "nl.sigmoid": (_sigmoid, _X),
    "nl.relu": (lambda v: np.maximum(v, 0), _X),
    "nl.silu": (lambda v: v * _sigmoid(v), _X),
    "nl.softplus": (lambda v: np.log1p(np.exp(v)), _X),
    "nl.mish": (lambda v: v * np.tanh(np.log1p(np.exp(v))), _X),
    "nl.erf": (_ERF, _X),
    "nl.gelu": (lambda v: v * 0.5 * (1 + _ERF(v / math.sqrt(2))), _X),
    "nl.reciprocal": (lambda v: 1 / v, _P),
    "nl.negative": (np.negative, _X),
    "nl.floor": (np.floor, _X),
    "nl.ceil": (np.ceil, _X),
    "nl.trunc": (np.trunc, _X),
    "nl.copy": (lambda v: v, _X),
}


@pytest.mark.parametrize("name", _UNARY)
def test_a_function_of_one_tile(name: str) -> None:
    function, values = _UNARY[name]
    check(f"nl.store(out, {name}(nl.load(x)))", function(values.astype(np.float64)), values, rtol=2e-5)


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "nl.add": np.add,
    "nl.subtract": np.subtract,
    "nl.multiply": np.multiply,
    "nl.divide": np.divide,
    "nl.maximum": np.maximum,
    "nl.minimum": np.minimum,
    "nl.power": np.power,
    "nl.equal": np.equal,
    "nl.not_equal": np.not_equal,
    "nl.less": np.less,
    "nl.less_equal": np.less_equal,
    "nl.greater": np.greater,
    "nl.greater_equal": np.greater_equal,
    "nl.logical_and": np.logical_and,
    "nl.logical_or": np.logical_or,
}


@pytest.mark.parametrize("name", _BINARY)
@pytest.mark.parametrize("right", ["nl.load(y)", "nl.load(y[:, 0:1])", "nl.load(y[0:1, :])", "2.0"])
def test_a_function_of_two_tiles_a_vector_a_row_or_a_number(name: str, right: str) -> None:
    left, other = _P, _Y
    value = {"nl.load(y)": other, "nl.load(y[:, 0:1])": other[:, :1], "nl.load(y[0:1, :])": other[:1]}.get(
        right, np.float32(2)
    )
    expected = _BINARY[name](left, value)
    check(
        f"nl.store(out, {name}(nl.load(x), {right}))", np.asarray(expected), left, other, parameters="x, y", rtol=2e-5
    )


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("a + b", _P + _Y),
        ("a - b", _P - _Y),
        ("a * b", _P * _Y),
        ("b / a", _Y / _P),
        ("1.0 / a", 1 / _P),
        ("2.0 - a", 2 - _P),
        ("3.0 * a", 3 * _P),
        ("1.0 + a", 1 + _P),
        ("-a", -_P),
        ("a ** 2", _P**2),
        ("(a > 1.0) * b", (_P > 1) * _Y),
        ("a + np.float32(0.5)", _P + np.float32(0.5)),
    ],
)
def test_operators_on_tiles(expression: str, expected: Array) -> None:
    body = f"a = nl.load(x)\nb = nl.load(y)\nnl.store(out, {expression})"
    check(body, expected, _P, _Y, parameters="x, y")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("nl.sum(a, axis=1)", _X.sum(1, keepdims=True)),
        ("nl.sum(a, axis=[1])", _X.sum(1, keepdims=True)),
        ("nl.max(a, axis=(1,), keepdims=True)", _X.max(1, keepdims=True)),
        ("nl.min(a, axis=-1)", _X.min(1, keepdims=True)),
        ("nl.mean(a, axis=1)", _X.mean(1, keepdims=True)),
        ("nl.var(a, axis=1)", _X.var(1, keepdims=True)),
        ("nisa.tensor_reduce(np.add, a, axis=[1])", _X.sum(1, keepdims=True)),
        ("nisa.tensor_reduce(nl.max, data=a, axis=[1], negate=True)", -_X.max(1, keepdims=True)),
        ("nisa.tensor_reduce(op=nl.multiply, data=a[:, 0:4], axis=1)", _X[:, :4].prod(1, keepdims=True)),
    ],
)
def test_reductions(call: str, expected: Array) -> None:
    check(f"a = nl.load(x)\nnl.store(out, {call})", expected, _X, out="(128, 1)", rtol=1e-4)


def test_a_reduction_over_two_axes_and_over_the_last_of_two() -> None:
    three = _X.reshape(128, 8, 8)
    check(
        "nl.store(out, nl.sum(nl.load(x), axis=[1, 2]))", three.sum((1, 2))[:, None], three, out="(128, 1)", rtol=1e-4
    )
    check("nl.store(out, nl.max(nl.load(x), axis=2))", three.max(2), three, out="(128, 8)")
    check("nl.store(out, nl.sum(nl.load(x), axis=1))", three.sum(1), three, out="(128, 8)", rtol=1e-4)


def test_a_mask_over_the_reduced_axis_selects_what_is_reduced() -> None:
    body = """
    i_f = nl.arange(64)[None, :]
    a = nl.load(x)
    nl.store(out, nisa.tensor_reduce(np.add, a, axis=[1], mask=i_f < 10))
    """
    check(body, _X[:, :10].sum(1, keepdims=True), _X, out="(128, 1)")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            "nl.softmax(a, axis=1)",
            np.exp(_X - _X.max(1, keepdims=True)) / np.exp(_X - _X.max(1, keepdims=True)).sum(1, keepdims=True),
        ),
        (
            "nl.rms_norm(a, nl.load(y[0:1, :]), 1, 64, 1e-5)",
            _X / np.sqrt((_X**2).mean(1, keepdims=True) + 1e-5) * _Y[:1],
        ),
        ("nl.where(a > 0.0, a, 0.0)", np.maximum(_X, 0)),
        ("nl.where(a > 0.0, 1.0, nl.load(y))", np.where(_X > 0, 1, _Y)),
        (
            "nl.where(nl.arange(128)[:, None] >= nl.arange(64)[None, :], a, -1.0)",
            np.where(np.arange(128)[:, None] >= np.arange(64), _X, -1),
        ),
        ("nisa.activation(op=nl.exp, data=a, scale=2.0)", np.exp(2 * _X)),
        ("nisa.activation(np.tanh, a, bias=nl.load(y[:, 0:1]), scale=0.5)", np.tanh(0.5 * _X + _Y[:, :1])),
        ("nisa.activation(nl.square, a, scale=nl.load(y[:, 0:1]))", np.square(_X * _Y[:, :1])),
        ("nisa.tensor_scalar(a, np.multiply, 2.0, op1=np.add, operand1=1.0)", _X * 2 + 1),
        ("nisa.tensor_scalar(data=a, op0=nl.subtract, operand0=1.0, reverse0=True)", 1 - _X),
        (
            "nisa.tensor_scalar(a, nl.add, nl.load(y[:, 3:4]), op1=nl.maximum, operand1=0.0)",
            np.maximum(_X + _Y[:, 3:4], 0),
        ),
        ("nisa.tensor_tensor(a, nl.load(y), np.subtract)", _X - _Y),
        ("nisa.tensor_tensor(data1=a, data2=nl.load(y), op=nl.maximum, engine=nisa.vector_engine)", np.maximum(_X, _Y)),
        (
            "nisa.scalar_tensor_tensor(data=a, op0=np.multiply, operand0=3.0, op1=np.add, operand1=nl.load(y))",
            3 * _X + _Y,
        ),
        (
            "nisa.scalar_tensor_tensor(data=a, op0=np.subtract, operand0=nl.load(y[:, 0:1]), op1=np.multiply,"
            " operand1=nl.load(y), reverse0=True)",
            (_Y[:, :1] - _X) * _Y,
        ),
        ("nisa.reciprocal(nl.load(y) * nl.load(y) + 1.0)", 1 / (_Y * _Y + 1)),
        ("nisa.tensor_copy(a, engine=nisa.scalar_engine)", _X),
        (
            "nisa.affine_select(pred=nl.arange(128)[:, None] - nl.arange(64)[None, :] >= 0, on_true_tile=a,"
            " on_false_value=-5.0)",
            np.where(np.arange(128)[:, None] >= np.arange(64), _X, -5),
        ),
        ("nl.broadcast_to(nl.load(x[:, 0:1]), shape=(128, 64))", np.broadcast_to(_X[:, :1], _X.shape)),
        ("nl.load(x[0:1, :]).broadcast_to((128, 64))", np.broadcast_to(_X[:1], _X.shape)),
        ("nl.load(x[0:1, :].broadcast_to((128, 64)))", np.broadcast_to(_X[:1], _X.shape)),
        ("nl.expand_dims(a, 1).reshape((128, 64))", _X),
        ("nl.full((128, 64), 2.5, dtype=nl.float32)", np.full(_X.shape, 2.5)),
        ("nl.zeros((128, 64), dtype=nl.float32)", np.zeros(_X.shape)),
        ("nl.ones((128, 64), dtype=nl.float32)", np.ones(_X.shape)),
        ("nl.zeros_like(a)", np.zeros(_X.shape)),
        ("nisa.memset(shape=(128, 64), value=7, dtype=np.float32)", np.full(_X.shape, 7)),
        (
            "nisa.iota(nl.arange(128)[:, None] * 10 + nl.arange(64)[None, :], dtype=nl.int32)",
            np.arange(128)[:, None] * 10 + np.arange(64),
        ),
        ("nisa.dropout(a, 0.0)", _X),
        ("nl.dropout(a, rate=0.0)", _X),
    ],
)
def test_a_call_gives_what_numpy_gives(call: str, expected: Array) -> None:
    body = f"a = nl.load(x)\nnl.store(out, {call})"
    check(body, np.asarray(expected), _X, _Y, parameters="x, y", rtol=5e-5)


def test_an_activation_reduces_into_a_second_tile() -> None:
    total = np.exp(_X).sum(1, keepdims=True)
    for call in (
        "nisa.activation(op=nl.exp, data=a, reduce_op=np.add, reduce_res=r, reduce_cmd=nisa.reduce_cmd.reset_reduce)",
        "nisa.activation_reduce(np.exp, a, reduce_op=np.add, reduce_res=r[:, 0:1])",
    ):
        body = f"""
        a = nl.load(x)
        r = nl.ndarray((128, 1), dtype=nl.float32)
        e = {call}
        nl.store(out[:, 0:64], e)
        nl.store(out[:, 64:65], r)
        """
        check(body, np.concatenate([np.exp(_X), total], 1), _X, out="(128, 65)", rtol=1e-4)


def test_tensor_scalar_reduces_into_a_second_tile() -> None:
    body = """
    a = nl.load(x)
    r = nl.ndarray((128, 1), dtype=nl.float32)
    e = nisa.tensor_scalar_reduce(data=a, op0=np.multiply, operand0=2.0, reduce_op=np.add, reduce_res=r)
    nl.store(out[:, 0:64], e)
    nl.store(out[:, 64:65], r)
    """
    check(body, np.concatenate([2 * _X, 2 * _X.sum(1, keepdims=True)], 1), _X, out="(128, 65)", rtol=1e-4)


def test_a_scan_carries_along_the_free_axis() -> None:
    expected = np.empty_like(_X)
    state = np.zeros(128, np.float32)
    for column in range(64):
        state = _P[:, column] * state + _Y[:, column]
        expected[:, column] = state
    body = """
    nl.store(out, nisa.tensor_tensor_scan(nl.load(x), nl.load(y), initial=0, op0=np.multiply, op1=np.add))
    """
    check(body, expected, _P, _Y, parameters="x, y", rtol=1e-4)


_A = _RNG.normal(size=(64, 96)).astype(np.float32)
_B = _RNG.normal(size=(96, 200)).astype(np.float32)


@pytest.mark.parametrize(
    "body",
    [
        "nl.store(out, nl.copy(nl.matmul(nl.load(x), nl.load(y))))",
        "nl.store(out, nl.matmul(nl.load_transpose2d(x), nl.load(y), transpose_x=True))",
        "nl.store(out, nisa.tensor_copy(nisa.nc_matmul(nl.load_transpose2d(x), nl.load(y))))",
        "t = nl.copy(nisa.nc_transpose(nl.load(x)))\nnl.store(out, nl.copy(nisa.nc_matmul(t, nl.load(y))))",
        "t = nl.copy(nl.transpose(nl.load(x)))\nm = nisa.nc_matmul(stationary=t, moving=nl.load(y))\n"
        "nl.store(out, nl.copy(m))",
    ],
)
def test_matrix_products(body: str) -> None:
    check(body, _A @ _B, _A, _B, parameters="x, y", out="(64, 200)", rtol=1e-4)


def test_a_matrix_product_accumulates_over_a_loop() -> None:
    a, b = _RNG.normal(size=(256, 128)).astype(np.float32), _RNG.normal(size=(256, 512)).astype(np.float32)
    for accumulate in ("acc[...] += {}", "acc += {}", "acc[0:128, 0:512] += {}"):
        product = "nisa.nc_matmul(nl.load(x[nl.ds(k * 128, 128), :]), nl.load(y[k * 128:(k + 1) * 128, :]))"
        body = f"""
        acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
        for k in nl.affine_range(2):
            {accumulate.format(product)}
        nl.store(out, nl.copy(acc))
        """
        check(body, a.T @ b, a, b, parameters="x, y", out="(128, 512)", rtol=1e-4)


def test_a_tail_of_the_contraction_is_masked() -> None:
    a, b = _RNG.normal(size=(200, 128)).astype(np.float32), _RNG.normal(size=(200, 512)).astype(np.float32)
    body = """
    i_p = nl.arange(128)[:, None]
    acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
    for k in nl.affine_range(2):
        keep = k * 128 + i_p < 200
        l = nl.load(x[k * 128 + i_p, nl.arange(128)[None, :]], mask=keep)
        r = nl.load(y[k * 128 + i_p, nl.arange(512)[None, :]], mask=keep)
        acc += nisa.nc_matmul(l, r, mask=keep)
    nl.store(out, nl.copy(acc))
    """
    check(body, a.T @ b, a, b, parameters="x, y", out="(128, 512)", rtol=1e-4)


def test_loop_reduce_combines_iterations() -> None:
    x = _RNG.normal(size=(128, 256)).astype(np.float32)
    for op, expected in (("np.max", x.max(1)), ("np.add", x.sum(1)), ("np.min", x.min(1))):
        body = f"""
        best = nl.ndarray((nl.par_dim(128), 1), dtype=nl.float32, buffer=nl.sbuf)
        for i in nl.affine_range(4):
            part = nisa.tensor_reduce({op}, nl.load(x[:, i * 64:(i + 1) * 64]), axis=[1])
            best[...] = nl.loop_reduce(part, op={op}, loop_indices=[i])
        nl.store(out, best)
        """
        check(body, expected[:, None], x, out="(128, 1)", rtol=1e-4)


def test_loop_reduce_over_one_iteration() -> None:
    body = """
    best = nl.ndarray((nl.par_dim(128), 1), dtype=nl.float32, buffer=nl.sbuf)
    for i in nl.affine_range(1):
        for j in nl.affine_range(2):
            part = nisa.tensor_reduce(np.max, nl.load(x[:, i * 64 + j * 32:i * 64 + j * 32 + 32]), axis=[1])
            best[...] = nl.loop_reduce(part, op=np.max, loop_indices=[i, j])
    nl.store(out, best)
    """
    check(body, _X.max(1, keepdims=True), _X, out="(128, 1)")


def test_the_result_of_loop_reduce_outlives_its_loop() -> None:
    x = _RNG.normal(size=(128, 256)).astype(np.float32)
    body = """
    for i in nl.affine_range(4):
        part = nisa.tensor_reduce(np.add, nl.load(x[:, i * 64:(i + 1) * 64]), axis=[1])
        total = nl.loop_reduce(part, op=np.add, loop_indices=[i])
    nl.store(out, total)
    """
    check(body, x.sum(1, keepdims=True), x, out="(128, 1)", rtol=1e-4)


def test_dma_copy_between_memories() -> None:
    body = """
    t = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    scratch = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.hbm)
    nisa.dma_copy(dst=t, src=x)
    nisa.dma_copy(dst=scratch, src=t)
    nisa.dma_copy(dst=out, src=scratch)
    """
    check(body, _X, _X)


def test_select_reduce_and_copy_predicated() -> None:
    body = """
    a = nl.load(x)
    p = nl.greater(a, 0.0, dtype=nl.uint8)
    d = nl.ndarray((128, 64), dtype=nl.float32)
    r = nl.ndarray((128, 1), dtype=nl.float32)
    nisa.select_reduce(dst=d, predicate=p, on_true=a, on_false=-3.0, reduce_res=r, reduce_op=nl.maximum)
    nisa.tensor_copy_predicated(src=nl.load(y), dst=d, predicate=p)
    nl.store(out[:, 0:64], d)
    nl.store(out[:, 64:65], r)
    """
    expected = np.concatenate([np.where(_X > 0, _Y, -3), np.where(_X > 0, _X, -3).max(1, keepdims=True)], 1)
    check(body, expected, _X, _Y, parameters="x, y", out="(128, 65)")


def test_batch_norm_statistics() -> None:
    body = "nl.store(out, nisa.bn_aggr(nisa.bn_stats(nl.load(x))))"
    check(body, np.stack([_X.mean(1), _X.var(1)], 1), _X, out="(128, 2)", rtol=1e-4)


def test_the_eight_largest_values() -> None:
    order = -np.sort(-_X, axis=1)[:, :8]
    check("nl.store(out, nisa.max8(src=nl.load(x)))", order, _X, out="(128, 8)")
    body = "a = nl.load(x)\nnl.store(out, nisa.nc_find_index8(data=a, vals=nisa.max8(src=a)))"
    check(body, np.argsort(-_X, axis=1)[:, :8], _X, out="(128, 8)")
    body = "a = nl.load(x)\nnl.store(out, nisa.nc_match_replace8(data=a, vals=nisa.max8(src=a), imm=0.0))"
    check(body, np.where(np.isin(_X, order) & (order[:, 7:8] <= _X), 0, _X), _X)


def test_range_select_on_newer_hardware() -> None:
    body = """
    a = nl.load(x)
    low = nisa.memset((128, 1), 3.0, dtype=np.float32)
    high = nisa.memset((128, 1), 9.0, dtype=np.float32)
    nl.store(out, nisa.range_select(on_true_tile=a, comp_op0=np.greater_equal, comp_op1=np.less, bound0=low,
                                    bound1=high, on_false_value=-1.0))
    """
    columns = np.arange(64)
    check(body, np.where((columns >= 3) & (columns < 9), _X, -1), _X, target="trn2")


def test_a_stream_shuffle_moves_partitions() -> None:
    body = """
    t = nl.zeros((128, 64), dtype=nl.float32)
    nisa.nc_stream_shuffle(nl.load(x), t, [31 - i for i in range(32)])
    nl.store(out, t)
    """
    check(body, _X.reshape(4, 32, 64)[:, ::-1].reshape(128, 64), _X)


def test_a_partition_reduction() -> None:
    body = "nl.store(out, nisa.tensor_partition_reduce(np.add, nl.load(x)))"
    check(body, _X.sum(0, keepdims=True), _X, out="(1, 64)", rtol=1e-4)


def test_a_gather_from_hbm_by_a_tile_of_indices() -> None:
    table = _RNG.normal(size=(300, 64)).astype(np.float32)
    rows = _RNG.integers(0, 300, size=(128, 1)).astype(np.int32)
    body = """
    i_p = nl.arange(128)[:, None]
    i_f = nl.arange(64)[None, :]
    r = nl.load(rows)
    nl.store(out, nl.load(x[r[i_p, 0], i_f]))
    """
    check(body, table[rows[:, 0]], table, rows, parameters="x, rows", out="(128, 64)")


def test_a_local_gather() -> None:
    index = _RNG.integers(0, 64, size=(128, 2)).astype(np.uint16)
    expected = np.concatenate(
        [_X[core : core + 16][:, index[core : core + 16].T.reshape(-1)] for core in range(0, 128, 16)]
    )
    body = "nl.store(out, nisa.local_gather(nl.load(x), nl.load(index)))"
    check(body, expected, _X, index, parameters="x, index", out="(128, 32)")


def test_the_grid_runs_every_instance() -> None:
    x = _RNG.normal(size=(512, 64)).astype(np.float32)
    text = kernel_text(
        """
        rows = nl.program_id(0) * 128
        assert nl.num_programs(0) == 4 and nl.program_ndim() == 1
        nl.store(out[rows:rows + 128, :], nl.load(x[rows:rows + 128, :]) + 1.0)
        """
    )
    program = trace_kernel(text + "\nkernel = kernel[4]\n", specs(x))
    (result,) = run_program(program, [x])
    np.testing.assert_array_equal(result, x + 1)


def test_a_mutable_argument_is_returned() -> None:
    text = (
        "import neuronxcc.nki as nki\nimport neuronxcc.nki.language as nl\nimport neuronxcc.nki.typing as nt\n"
        "@nki.jit\ndef kernel(x: nt.mutable_tensor):\n    nl.store(x, nl.load(x) * 2.0)\n    return x\n"
    )
    program = trace_kernel(text, specs(_X))
    (result,) = run_program(program, [_X.copy()])
    np.testing.assert_array_equal(result, 2 * _X)


def test_casts() -> None:
    import ml_dtypes

    half = _X.astype(ml_dtypes.bfloat16).astype(np.float32)
    check("nl.store(out, nl.load(x).astype(nl.bfloat16).astype(nl.float32))", half, _X)
    check("nl.store(out, nl.static_cast(nl.load(x, dtype=nl.bfloat16), nl.float32))", half, _X)
    check("nl.store(out, nl.copy(nl.load(x), dtype=nl.bfloat16))", half, _X)


def test_tables_of_indices_follow_division_and_remainder() -> None:
    x = _RNG.normal(size=(128, 8, 8)).astype(np.float32)
    body = """
    f = nl.arange(64)[None, :]
    nl.store(out[nl.arange(128)[:, None], f], nl.load(x[nl.arange(128)[:, None], f % 8, f // 8]))
    """
    check(body, x.transpose(0, 2, 1).reshape(128, 64), x, out="(128, 64)")


def test_a_loop_whose_index_decides_is_unrolled() -> None:
    x = _RNG.normal(size=(128, 256)).astype(np.float32)
    body = """
    for i in nl.affine_range(4):
        t = nl.ndarray((128, 64), dtype=nl.float32)
        if i % 2 == 0:
            t[...] = nl.load(x[:, i * 64:(i + 1) * 64])
        else:
            t[...] = nl.load(x[:, i * 64:(i + 1) * 64]) * 2.0
        nl.store(out[:, i * 64:(i + 1) * 64], t)
    """
    expected: Any = x.copy()
    expected[:, 64:128] *= 2
    expected[:, 192:] *= 2
    check(body, expected, x)


def test_rows_are_added_at_positions_given_by_a_tile() -> None:
    rows = _RNG.permutation(300)[:128].reshape(128, 1).astype(np.int32)
    body = """
    zero = nl.zeros((100, 64), dtype=nl.float32)
    for i in nl.affine_range(3):
        nl.store(out[i * 100:(i + 1) * 100, :], zero)
    r = nl.load(rows)
    nl.atomic_rmw(out[r[nl.arange(128)[:, None], 0], nl.arange(64)[None, :]], nl.load(x), op=np.add)
    """
    expected = np.zeros((300, 64), np.float32)
    expected[rows[:, 0]] += _X
    check(body, expected, _X, rows, parameters="x, rows", out="(300, 64)")


def test_a_transposing_dma() -> None:
    check("nl.store(out, nisa.dma_transpose(x))", _X.T, _X, out="(64, 128)")


def test_random_numbers_lie_in_the_unit_interval() -> None:
    values = run("nl.store(out, nl.rand((128, 64)))", _X)
    assert ((values >= 0) & (values < 1)).all()
    assert abs(float(values.mean()) - 0.5) < 0.05


def test_tensors_with_an_address_of_their_own() -> None:
    body = """
    t = nl.ndarray((2, nl.par_dim(128), 64), dtype=nl.float32, buffer=nki.compiler.sbuf.mod_alloc(base_addr=0))
    u = nl.empty_like(t)
    for i in nl.affine_range(2):
        t[i] = nl.load(x)
        u[i] = nl.add(t[i], float(1))
        nl.store(out[:, i * 64:(i + 1) * 64], u[i])
    """
    check(body, np.concatenate([_X + 1, _X + 1], 1), _X, out="(128, 128)")
    check("t = nl.empty_like(nl.load(x))\nt[...] = 2.0\nnl.store(out, t)", np.full(_X.shape, 2.0), _X)


def test_a_result_used_after_its_assignment_keeps_its_value() -> None:
    body = """
    t = nl.ndarray((128, 64), dtype=nl.float32)
    r = nl.load(x)
    left = r[:, 0:32]
    t[...] = r
    t[...] = nl.multiply(t, 3.0)
    nl.store(out[:, 0:32], nl.exp(left))
    nl.store(out[:, 32:64], t[:, 32:64])
    nl.store(out[:, 64:128], r)
    """
    check(body, np.concatenate([np.exp(_X[:, :32]), 3 * _X[:, 32:], _X], 1), _X, out="(128, 128)")


def test_a_product_used_after_its_accumulation_keeps_its_value() -> None:
    body = """
    acc = nl.zeros((64, 200), dtype=nl.float32, buffer=nl.psum)
    for k in nl.sequential_range(2):
        product = nisa.nc_matmul(nl.load_transpose2d(x), nl.load(y))
        acc += product
        last = nl.copy(product)
        nl.store(out[0:64, :], last)
    nl.store(out[64:128, :], nl.copy(acc))
    """
    expected = np.concatenate([_A @ _B, 2 * (_A @ _B)])
    check(body, expected, _A, _B, parameters="x, y", out="(128, 200)", rtol=1e-4)


def test_two_tiles_in_psum_are_added() -> None:
    body = """
    p = nisa.nc_matmul(nl.load_transpose2d(x), nl.load(y))
    q = nisa.nc_matmul(nl.load_transpose2d(x), nl.load(y))
    nl.store(out, nl.add(p, q))
    """
    check(body, 2 * (_A @ _B), _A, _B, parameters="x, y", out="(64, 200)", rtol=1e-4)
