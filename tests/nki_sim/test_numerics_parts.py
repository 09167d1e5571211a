"""The parts of the executor by themselves: casts, product arrangement, BLAS threads, scans, forwarding."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from accelopt_ray.nki_sim.numerics.blas import Products
from accelopt_ray.nki_sim.numerics.casts import cast, round_to_tfloat32
from accelopt_ray.nki_sim.numerics.forwarding import forward_loads
from accelopt_ray.nki_sim.numerics.layout import Tile
from accelopt_ray.nki_sim.numerics.matmul import arrange, suits_blas
from accelopt_ray.nki_sim.numerics.operations import operation
from accelopt_ray.nki_sim.numerics.scan import scan
from accelopt_ray.nki_sim.program import Opcode
from accelopt_ray.nki_sim.tracer import TensorSpec, trace_kernel


def test_integers_round_to_even_and_saturate() -> None:
    values = np.array([0.5, 1.5, 2.5, -0.5, 300.0, -300.0, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(cast(values, "int8"), [0, 2, 2, 0, 127, -128, 127, -128, 0])
    np.testing.assert_array_equal(cast(values, "uint8"), [0, 2, 2, 0, 255, 0, 255, 0, 0])
    assert cast(np.array([3e9], np.float32), "int32")[0] == 2**31 - 1


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100))
def test_tfloat32_keeps_ten_mantissa_bits(value: float) -> None:
    rounded = round_to_tfloat32(np.array([value], np.float32))
    assert (rounded.view(np.uint32)[0] & 0x1FFF) == 0
    if abs(value) > 1e-30:
        assert abs(float(rounded[0]) - value) <= abs(value) * 2.0**-11
    np.testing.assert_array_equal(round_to_tfloat32(rounded), rounded)


def test_tfloat32_ties_go_to_even_and_special_values_stay() -> None:
    ulp = 2.0**-10
    values = np.array([1 + ulp / 2, 1 + 3 * ulp / 2, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(round_to_tfloat32(values), [1, 1 + 2 * ulp, np.inf, -np.inf, np.nan])


def test_narrow_floats_are_those_of_ml_dtypes() -> None:
    values = np.linspace(-500, 500, 1001, dtype=np.float32)
    for name in ("bfloat16", "float8_e4m3", "float8_e5m2"):
        np.testing.assert_array_equal(
            cast(values, name).astype(np.float32), values.astype(getattr(ml_dtypes, name)).astype(np.float32)
        )


def tile(shape: tuple[int, ...], strides: tuple[int, ...], batch: int) -> Tile:
    return Tile(0, "float32", shape, strides, 0, (), batch)


def test_contraction_loops_merge_into_one_product() -> None:
    stationary = tile((5, 8, 128, 64), (8 * 128 * 64, 128 * 64, 64, 1), 2)
    moving = tile((5, 8, 128, 512), (8 * 128 * 512, 128 * 512, 512, 1), 2)
    out = tile((5, 8, 64, 512), (0, 0, 512, 1), 2)
    plan = arrange(stationary, moving, out, 0)
    assert plan.stationary_shape == (64, 5120) and plan.moving_shape == (5120, 512) and plan.steps == ((0, 0),)
    assert suits_blas(plan.stationary_shape, plan.stationary_strides)


def test_contraction_loops_that_do_not_merge_become_steps() -> None:
    stationary = tile((4, 128, 64), (64, 256, 1), 1)
    moving = tile((4, 128, 512), (128 * 512, 512, 1), 1)
    plan = arrange(stationary, moving, tile((4, 64, 512), (0, 512, 1), 1), 0)
    assert plan.stationary_shape == (64, 128)
    assert plan.steps == tuple((64 * k, 128 * 512 * k) for k in range(4))


def test_column_loops_widen_the_product() -> None:
    stationary = tile((2, 128, 64), (0, 64, 1), 1)
    moving = tile((2, 128, 512), (512, 1024, 1), 1)
    plan = arrange(stationary, moving, tile((2, 64, 512), (512, 1024, 1), 1), 0)
    assert plan.out_shape == (64, 1024) and plan.moving_shape == (128, 1024)


def test_large_products_are_right_whatever_the_threads() -> None:
    generator = np.random.default_rng(0)
    left = generator.standard_normal((2048, 128)).astype(np.float32).T
    right = generator.standard_normal((2048, 512)).astype(np.float32)
    expected = left.astype(np.float64) @ right
    products = Products()
    with products.running():
        for _ in range(4):
            out = np.empty((128, 512), np.float32)
            products.matmul(left, right, out)
            assert np.linalg.norm(out - expected) < 1e-6 * np.linalg.norm(expected)


@given(rows=st.integers(1, 9), columns=st.integers(1, 70))
def test_scan_equals_the_sequential_recurrence(rows: int, columns: int) -> None:
    generator = np.random.default_rng(rows * 100 + columns)
    data0, data1 = generator.standard_normal((2, rows, columns)).astype(np.float32) / 2
    initial = generator.standard_normal(rows).astype(np.float32)
    out = np.empty((rows, columns), np.float32)
    scan(data0, data1, initial, operation("multiply", 0), False, operation("add", 0), False, out)
    running = initial
    for t in range(columns):
        running = running * data0[:, t] + data1[:, t]
        np.testing.assert_array_equal(out[:, t], running)


def test_loads_that_readers_can_do_without_are_dropped() -> None:
    source = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit
def kernel(x):
    out = nl.ndarray((4, 128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    last = nl.ndarray((128, 64), dtype=nl.float32)
    for i in nl.sequential_range(4):
        tile = nl.load(x[i])
        last[...] = nl.load(x[i])
        nl.store(out[i], nl.exp(tile))
    nl.store(out[0], last)
    return out
"""
    program = trace_kernel(source, [TensorSpec((4, 128, 64), "float32")])
    loads = [i for _, i in program.walk() if i.opcode is Opcode.LOAD]
    kept = [i for _, i in forward_loads(program).walk() if i.opcode is Opcode.LOAD]
    assert len(loads) == 2 and len(kept) == 1, "the load whose loop has ended must stay"
