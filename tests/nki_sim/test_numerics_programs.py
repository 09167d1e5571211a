"""Whole kernels: loops, accumulation, masks, memory reuse, uninitialised memory, batching and slices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelopt_ray.nki_sim.numerics import NumericsError, Region, run_program, run_slice
from accelopt_ray.nki_sim.numerics.dependence import Batching, choose_batched_loops
from accelopt_ray.nki_sim.numerics.execute import Executable
from accelopt_ray.nki_sim.numerics.geometry import Nest
from accelopt_ray.nki_sim.numerics.layout import plan_storage
from accelopt_ray.nki_sim.program import Program
from accelopt_ray.nki_sim.tracer import TensorSpec, trace_kernel

HEADER = """
import numpy as np
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl
import neuronxcc.nki.isa as nisa

@nki.jit
"""

NOTHING_BATCHED = Batching(frozenset(), frozenset())


def trace(source: str, inputs: Sequence[np.ndarray]) -> Program:
    return trace_kernel(HEADER + source, [TensorSpec(array.shape, str(array.dtype)) for array in inputs])


def run(source: str, *inputs: np.ndarray) -> list[np.ndarray]:
    """Runs a kernel batched and iteration by iteration, and requires both to agree."""
    program = trace(source, inputs)
    plain = Executable(program, inputs, None, batching=NOTHING_BATCHED)
    plain.run()
    results = run_program(program, inputs)
    for fast, slow in zip(results, plain.results, strict=True):
        largest = float(np.max(np.abs(slow), initial=0.0, where=np.isfinite(slow)))
        np.testing.assert_allclose(fast.astype(np.float64), slow.astype(np.float64), rtol=1e-6, atol=1e-6 * largest)
    return results


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected))


MATMUL = """
def kernel(lhs_t, rhs):
    out = nl.ndarray((lhs_t.shape[1], rhs.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    for m in nl.affine_range(lhs_t.shape[1] // 128):
        left = nl.ndarray((4, nl.par_dim(128), 128), dtype=nl.float32)
        for k in nl.affine_range(4):
            left[k] = nl.load(lhs_t[nl.ds(k * 128, 128), nl.ds(m * 128, 128)])
        for n in nl.affine_range(rhs.shape[1] // 512):
            acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
            for k in nl.affine_range(4):
                right = nl.load(rhs[nl.ds(k * 128, 128), nl.ds(n * 512, 512)])
                acc += nisa.nc_matmul(left[k], right)
            nl.store(out[nl.ds(m * 128, 128), nl.ds(n * 512, 512)], nl.copy(acc))
    return out
"""


def test_matmul_accumulates_over_the_contraction_loop() -> None:
    a, b = normal(0, 512, 384), normal(1, 512, 1024)
    (found,) = run(MATMUL, a, b)
    assert relative_error(found, a.T.astype(np.float64) @ b) < 1e-6


def test_results_are_written_in_place_and_inputs_stay() -> None:
    a, b = normal(0, 512, 256), normal(1, 512, 512)
    kept = a.copy(), b.copy()
    out = np.zeros((256, 512), np.float32)
    a.setflags(write=False)
    (found,) = run_program(trace(MATMUL, (a, b)), [a, b], [out])
    assert found is out
    assert relative_error(out, a.T.astype(np.float64) @ b) < 1e-6
    np.testing.assert_array_equal(a, kept[0])
    np.testing.assert_array_equal(b, kept[1])


def test_memory_mapped_inputs_and_outputs(tmp_path) -> None:  # type: ignore[no-untyped-def]
    a, b = normal(0, 512, 256), normal(1, 512, 512)
    np.save(tmp_path / "a.npy", a)
    target = np.lib.format.open_memmap(tmp_path / "out.npy", mode="w+", dtype=np.float32, shape=(256, 512))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    run_program(trace(MATMUL, (a, b)), [mapped, b], [target])
    target.flush()
    assert relative_error(np.load(tmp_path / "out.npy"), a.T.astype(np.float64) @ b) < 1e-6


@pytest.mark.parametrize("inner", ["affine_range", "sequential_range", "static_range"])
def test_running_sum_in_sbuf(inner: str) -> None:
    source = f"""
def kernel(x):
    out = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    total = nl.zeros((128, 64), dtype=nl.float32)
    for i in nl.{inner}(8):
        total += nl.load(x[i])
    nl.store(out, total)
    return out
"""
    x = normal(2, 8, 128, 64)
    (found,) = run(source, x)
    assert relative_error(found, x.astype(np.float64).sum(0)) < 1e-6


def test_values_carried_between_sequential_iterations() -> None:
    source = """
def kernel(x):
    out = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
    state = nl.zeros((128, 1), dtype=nl.float32)
    for i in nl.sequential_range(8):
        state[...] = nl.multiply(state, 0.5)
        state[...] = nl.add(state, nl.load(x[:, nl.ds(i, 1)]))
        nl.store(out[:, nl.ds(i, 1)], state)
    return out
"""
    x = normal(3, 128, 8)
    state, expected = np.zeros(128), np.empty((128, 8))
    for i in range(8):
        state = state * 0.5 + x[:, i]
        expected[:, i] = state
    (found,) = run(source, x)
    assert relative_error(found, expected) < 1e-6


def test_scan_chained_over_chunks() -> None:
    source = """
def kernel(a, b):
    out = nl.ndarray((128, 256), dtype=nl.float32, buffer=nl.shared_hbm)
    last = nl.zeros((128, 1), dtype=nl.float32)
    for i in nl.sequential_range(4):
        x, y = nl.load(a[:, nl.ds(64 * i, 64)]), nl.load(b[:, nl.ds(64 * i, 64)])
        part = nisa.tensor_tensor_scan(x, y, initial=last, op0=np.multiply, op1=np.add)
        last[...] = nl.copy(part[:, 63:64])
        nl.store(out[:, nl.ds(64 * i, 64)], part)
    return out
"""
    a, b = normal(4, 128, 256) / 3, normal(5, 128, 256)
    expected, state = np.empty((128, 256)), np.zeros(128)
    for t in range(256):
        state = state * a[:, t].astype(np.float64) + b[:, t]
        expected[:, t] = state
    (found,) = run(source, a, b)
    assert relative_error(found, expected) < 1e-6


def test_loop_reduce_starts_from_the_first_iteration() -> None:
    source = """
def kernel(x):
    out = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    parts = nl.ndarray((4, 2, nl.par_dim(128), 1), dtype=nl.float32)
    best = nl.ndarray((nl.par_dim(128), 1), dtype=nl.float32)
    p = nl.arange(128)[:, None]
    for i in nl.affine_range(4):
        for j in nl.affine_range(2):
            tile = nl.load(x[i, j])
            parts[i, j, p, 0] = nisa.tensor_reduce(nl.max, data=tile, axis=[1])
            best[p, 0] = nl.loop_reduce(parts[i, j, p, 0], op=np.max, loop_indices=[i, j])
    nl.store(out, best)
    return out
"""
    x = normal(6, 4, 2, 128, 32) - 10
    (found,) = run(source, x)
    np.testing.assert_array_equal(found, x.max(axis=(0, 1, 3)).reshape(128, 1))


MASKED = """
def kernel(x):
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    p, f = nl.arange(128)[:, None], nl.arange(64)[None, :]
    for i in nl.affine_range((x.shape[0] + 127) // 128):
        for j in nl.affine_range((x.shape[1] + 63) // 64):
            inside = (i * 128 + p < x.shape[0]) & (j * 64 + f < x.shape[1])
            tile = nl.load(x[i * 128 + p, j * 64 + f], mask=inside)
            scaled = nl.multiply(tile, 2.0, mask=inside)
            nl.store(out[i * 128 + p, j * 64 + f], scaled, mask=inside)
    return out
"""


@given(rows=st.integers(1, 300), columns=st.integers(1, 150))
@settings(max_examples=15)
def test_masks_clip_tiles_at_the_border(rows: int, columns: int) -> None:
    x = normal(rows, rows, columns)
    (found,) = run(MASKED, x)
    np.testing.assert_array_equal(found, x * 2)


def test_masks_over_two_axes_at_once() -> None:
    source = """
def kernel(x):
    out = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    p, f = nl.arange(128)[:, None], nl.arange(128)[None, :]
    r = nl.zeros((128, 128), dtype=nl.float32)
    r[p, f] = nl.add(nl.load(x), 1.0, mask=(p >= f))
    nl.store(out, r)
    return out
"""
    x = normal(7, 128, 128)
    (found,) = run(source, x)
    rows, columns = np.indices(x.shape)
    kept = np.where(rows >= columns, x + 1, 0)
    assert np.array_equal(found, kept) or np.isnan(found[rows < columns]).all()
    np.testing.assert_array_equal(found[rows >= columns], kept[rows >= columns])


def test_what_was_never_written_is_marked() -> None:
    source = """
def kernel(x):
    out = nl.ndarray((256, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, 64), dtype=nl.float32)
    tile[:, 0:32] = nl.load(x[:, 0:32])
    nl.store(out[0:128], tile)
    return out
"""
    x = normal(8, 128, 64)
    (found,) = run(source, x)
    np.testing.assert_array_equal(found[:128, :32], x[:, :32])
    assert np.isnan(found[:128, 32:]).all() and np.isnan(found[128:]).all()


def test_uninitialised_tiles_are_marked_in_every_iteration() -> None:
    source = """
def kernel(x):
    out = nl.ndarray((4, 128, 64), dtype=nl.int32, buffer=nl.shared_hbm)
    for i in nl.sequential_range(4):
        tile = nl.ndarray((128, 64), dtype=nl.int32)
        tile[nl.arange(128)[:, None], nl.arange(64)[None, :]] = nl.load(
            x[nl.arange(128)[:, None], nl.arange(64)[None, :]], mask=(nl.arange(128)[:, None] < 100 - 20 * i))
        nl.store(out[i], tile)
    return out
"""
    x = np.full((128, 64), 9, np.int32)
    (found,) = run(source, x)
    for i in range(4):
        assert (found[i, : 100 - 20 * i] == 9).all()
        assert (found[i, 100 - 20 * i :] == 4).all()


BLOCKED = """
def kernel(x):
    out = nl.ndarray((8, 128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    a = nl.ndarray((8, nl.par_dim(128), 64), dtype=nl.float32)
    b = nl.ndarray((8, nl.par_dim(128), 64), dtype=nl.float32)
    p, f = nl.arange(128)[:, None], nl.arange(64)[None, :]
    for i in nl.affine_range(4):
        for j in nl.affine_range(2):
            a[2 * i + j, p, f] = nl.load(x[2 * i + j, p, f])
            b[2 * i + j, p, f] = nl.exp(a[2 * i + j, p, f])
            nl.store(out[2 * i + j, p, f], b[2 * i + j, p, f])
    return out
"""


def test_blocked_tensors_need_room_for_live_blocks_only() -> None:
    x = normal(9, 8, 128, 64)
    program = trace(BLOCKED, [x])
    storages = plan_storage(Nest(program), frozenset())
    on_chip = [s for s in storages.values() if s.buffer.space != "hbm"]
    assert on_chip and all(storage.elements == 128 * 64 for storage in on_chip)
    (found,) = run(BLOCKED, x)
    assert relative_error(found, np.exp(x.astype(np.float64))) < 1e-6


def test_a_block_that_outlives_its_loop_keeps_its_room() -> None:
    source = """
def kernel(x):
    out = nl.ndarray((4, 128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    acc = nl.zeros((4, nl.par_dim(128), 64), dtype=nl.float32)
    p, f = nl.arange(128)[:, None], nl.arange(64)[None, :]
    for s in nl.sequential_range(3):
        for i in nl.affine_range(4):
            acc[i, p, f] += nl.load(x[s, i, p, f])
            nl.store(out[i, p, f], acc[i, p, f])
    return out
"""
    x = normal(10, 3, 4, 128, 64)
    (found,) = run(source, x)
    assert relative_error(found, x.astype(np.float64).sum(0)) < 1e-6


def test_small_loops_are_batched_and_dependent_ones_are_not() -> None:
    x = normal(9, 8, 128, 64)
    nest = Nest(trace(BLOCKED, [x]))
    assert len(choose_batched_loops(nest).loops) >= 1
    dependent = """
def kernel(x):
    out = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    state = nl.zeros((128, 1), dtype=nl.float32)
    other = nl.zeros((128, 1), dtype=nl.float32)
    for i in nl.sequential_range(8):
        other[...] = nl.add(state, 1.0)
        state[...] = nl.multiply(other, 0.5)
    nl.store(out, state)
    return out
"""
    program = trace(dependent, [x])
    assert not choose_batched_loops(Nest(program)).loops
    expected = 0.0
    for _ in range(8):
        expected = (expected + 1) / 2
    (found,) = run(dependent, x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_transposes_inside_a_batched_contraction() -> None:
    source = """
def kernel(x, w):
    out = nl.ndarray((256, 256), dtype=nl.float32, buffer=nl.shared_hbm)
    for i in nl.affine_range(2):
        rows = nl.load(x[nl.ds(i * 128, 128), :])
        acc = nl.zeros((128, 256), dtype=nl.float32, buffer=nl.psum)
        for k in nl.affine_range(3):
            acc += nl.matmul(rows[:, nl.ds(k * 128, 128)], nl.load(w[nl.ds(k * 128, 128), :]))
        nl.store(out[nl.ds(i * 128, 128), :], nl.copy(acc))
    return out
"""
    x, w = normal(11, 256, 384), normal(12, 384, 256)
    (found,) = run(source, x, w)
    assert relative_error(found, x.astype(np.float64) @ w) < 1e-6


def test_bfloat16_operands_accumulate_in_float32() -> None:
    source = """
def kernel(a, b):
    out = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
    acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
    for k in nl.affine_range(2):
        x = nl.load(a[nl.ds(k * 128, 128), :], dtype=nl.bfloat16)
        y = nl.load(b[nl.ds(k * 128, 128), :], dtype=nl.bfloat16)
        acc += nisa.nc_matmul(x, y)
    nl.store(out, nl.copy(acc))
    return out
"""
    import ml_dtypes

    a, b = normal(13, 256, 128), normal(14, 256, 512)
    rounded = [v.astype(ml_dtypes.bfloat16).astype(np.float64) for v in (a, b)]
    (found,) = run(source, a, b)
    assert relative_error(found, rounded[0].T @ rounded[1]) < 1e-6


def test_gather_by_a_tile_of_indices() -> None:
    source = """
def kernel(x, rows):
    out = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    index = nl.load(rows)
    f = nl.arange(64)[None, :]
    tile = nl.load(x[index, f])
    nl.store(out, tile)
    return out
"""
    x = normal(15, 500, 64)
    rows = np.random.default_rng(0).integers(0, 500, (128, 1)).astype(np.int32)
    (found,) = run(source, x, rows)
    np.testing.assert_array_equal(found, x[rows[:, 0]])
    rows[5] = 500
    with pytest.raises(NumericsError, match=r"Out-of-bound access.*\(line \d+\)"):
        run_program(trace(source, (x, rows)), [x, rows])


def test_nan_and_infinity_stay_in_their_element_when_transposed() -> None:
    source = """
def kernel(x):
    out = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.shared_hbm)
    eye = nl.load(nl.shared_constant(np.identity(128, dtype=np.float32)))
    nl.store(out, nl.copy(nisa.nc_matmul(nl.load(x), eye, is_moving_onezero=True, is_transpose=True)))
    return out
"""
    x = normal(16, 128, 128)
    x[3, 5], x[7, 9] = np.nan, np.inf
    (found,) = run(source, x)
    np.testing.assert_array_equal(found, x.T)


def test_wrong_number_of_inputs_is_a_typed_error() -> None:
    a, b = normal(0, 512, 128), normal(1, 512, 512)
    with pytest.raises(NumericsError, match="takes 2 tensors"):
        run_program(trace(MATMUL, (a, b)), [a])


@given(row=st.integers(0, 383), height=st.integers(1, 200), column=st.integers(0, 1023), width=st.integers(1, 600))
@settings(max_examples=15)
def test_slices_equal_the_whole_run(row: int, height: int, column: int, width: int) -> None:
    a, b = normal(0, 512, 384), normal(1, 512, 1024)
    program = trace(MATMUL, (a, b))
    bounds = ((row, min(384, row + height)), (column, min(1024, column + width)))
    (part,) = run_slice(program, [a, b], [Region(0, bounds)])
    whole = a.T.astype(np.float64) @ b
    expected = whole[slice(*bounds[0]), slice(*bounds[1])]
    assert part.shape == expected.shape
    np.testing.assert_allclose(part, expected, atol=1e-4)


def test_slices_of_dependent_loops_run_what_they_need() -> None:
    source = """
def kernel(x):
    out = nl.ndarray((8, 128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    total = nl.zeros((128, 64), dtype=nl.float32)
    for i in nl.sequential_range(8):
        total[...] = nl.add(total, nl.load(x[i]))
        nl.store(out[i], total)
    return out
"""
    x = normal(17, 8, 128, 64)
    (part,) = run_slice(trace(source, [x]), [x], [Region(0, ((5, 6), (10, 20), (0, 64)))])
    np.testing.assert_allclose(part[0], x[:6, 10:20].sum(0), atol=1e-5)


def test_a_region_outside_its_result_is_refused() -> None:
    a, b = normal(0, 512, 128), normal(1, 512, 512)
    with pytest.raises(NumericsError, match="does not lie within"):
        run_slice(trace(MATMUL, (a, b)), [a, b], [Region(0, ((0, 129), (0, 512)))])
