"""What must hold for any kernel: doing less is never slower, and the same work costs the same however it is named.

List scheduling is not exactly monotone: a transfer that ends a little later may let others slip past it. The laws
therefore allow the length of one transfer.
"""

from __future__ import annotations

import itertools
import random

import pytest
from cost_kernels import Kernel, at, elementwise, matmul, tile
from hypothesis import given, settings
from hypothesis import strategies as st

from accelopt_ray.nki_sim.cost import DEVICES, ModelOptions, predict, steady_state
from accelopt_ray.nki_sim.cost.predict import simulate
from accelopt_ray.nki_sim.program import Engine, LoopKind, Opcode, Program, Role

TRN1 = DEVICES["trn1"]
TRANSFER_MS = 0.0055
"""Latency and duration of one 512 KiB transfer, rounded up."""


def latency(program: Program) -> float:
    return predict(program).latency_ms


@settings(max_examples=25)
@given(rows=st.integers(1, 24), passes=st.integers(1, 5), width=st.sampled_from([256, 512, 1024]))
def test_fewer_passes_are_never_slower(rows, passes, width):
    assert (
        latency(elementwise(rows, 1024, passes, width))
        <= latency(elementwise(rows, 1024, passes + 1, width)) + TRANSFER_MS
    )


@settings(max_examples=25)
@given(rows=st.integers(1, 24), passes=st.integers(1, 6))
def test_wider_instructions_over_the_same_tile_are_never_slower(rows, passes):
    wide = latency(elementwise(rows, 1024, passes, 1024))
    assert wide <= latency(elementwise(rows, 1024, passes, 512)) + TRANSFER_MS
    assert wide <= latency(elementwise(rows, 1024, passes, 256)) + TRANSFER_MS


@pytest.mark.parametrize(("rows", "depth", "columns"), [(2, 2, 2), (4, 4, 3), (6, 3, 4), (8, 8, 2)])
def test_hoisting_by_hand_is_never_slower(rows, depth, columns):
    by_hand = latency(matmul(rows, depth, columns, hoisted=True))
    assert by_hand <= latency(matmul(rows, depth, columns)) + 1e-9


@pytest.mark.parametrize("columns", [128, 256, 512, 1024, 2048])
def test_the_same_bytes_in_fewer_transfers_are_never_slower(columns):
    def stream(width):
        kernel = Kernel()
        x, y = kernel.hbm((32 * 128, 4096)), kernel.hbm((32 * 128, 4096), Role.OUTPUT)
        with kernel.loop(32) as i, kernel.loop(4096 // width) as j:
            data = kernel.sbuf((128, width))
            kernel.load(tile(data), at(x, ({i: 128}, 128), ({j: width}, width)))
            kernel.store(at(y, ({i: 128}, 128), ({j: width}, width)), tile(data))
        return latency(kernel.program())

    assert stream(2 * columns) <= stream(columns) + 4 * TRANSFER_MS


def test_short_runs_cost_more_per_byte_than_long_ones():
    def transfer(shape, access):
        kernel = Kernel()
        x, y = kernel.hbm(shape), kernel.hbm((128, 512), Role.OUTPUT)
        data = kernel.sbuf((128, 512))
        kernel.load(tile(data), access(x))
        kernel.store(tile(y), tile(data))
        return simulate(kernel.program(), TRN1, ModelOptions()).timeline.end[0]

    contiguous = transfer((128, 512), tile)
    in_short_runs = transfer((128, 512, 4), lambda x: at(x, (0, 128), (0, 512), 0))
    assert in_short_runs > 4 * contiguous


def test_a_strip_kept_on_chip_beats_one_that_goes_through_hbm():
    def softmax_like(through_hbm):
        kernel = Kernel()
        x, y = kernel.hbm((16 * 128, 2048)), kernel.hbm((16 * 128, 2048), Role.OUTPUT)
        scratch = kernel.hbm((16 * 128, 2048), Role.TEMPORARY)

        def exponential(result, data):
            kernel.emit(Opcode.ACTIVATION, tile(result), data=tile(data), scale=1.0, attributes={"op": "exp"})

        if through_hbm:
            for source, target in ((x, scratch), (scratch, y)):
                with kernel.loop(16, LoopKind.SEQUENTIAL) as i:
                    data, result = kernel.sbuf((128, 2048)), kernel.sbuf((128, 2048))
                    kernel.load(tile(data), at(source, ({i: 128}, 128), (0, 2048)))
                    exponential(result, data)
                    kernel.store(at(target, ({i: 128}, 128), (0, 2048)), tile(result))
        else:
            with kernel.loop(16) as i:
                data, middle, result = (kernel.sbuf((128, 2048)) for _ in range(3))
                kernel.load(tile(data), at(x, ({i: 128}, 128), (0, 2048)))
                exponential(middle, data)
                exponential(result, middle)
                kernel.store(at(y, ({i: 128}, 128), (0, 2048)), tile(result))
        return latency(kernel.program())

    assert softmax_like(False) < 0.75 * softmax_like(True)


def test_a_fused_reduction_is_never_slower_than_a_separate_one():
    def kernel_with(fused):
        kernel = Kernel()
        x, y = kernel.hbm((16 * 128, 2048)), kernel.hbm((16 * 128, 1), Role.OUTPUT)
        with kernel.loop(16) as i:
            data, result, total = kernel.sbuf((128, 2048)), kernel.sbuf((128, 2048)), kernel.sbuf((128, 1))
            kernel.load(tile(data), at(x, ({i: 128}, 128), (0, 2048)))
            if fused:
                kernel.emit(
                    Opcode.ACTIVATION,
                    (tile(result), tile(total)),
                    data=tile(data),
                    scale=1.0,
                    attributes={"op": "exp", "reduce_op": "add"},
                )
            else:
                kernel.emit(Opcode.ACTIVATION, tile(result), data=tile(data), scale=1.0, attributes={"op": "exp"})
                kernel.emit(
                    Opcode.TENSOR_REDUCE,
                    tile(total),
                    Engine.VECTOR,
                    data=tile(result),
                    attributes={"op": "add", "axes": (1,)},
                )
            kernel.store(at(y, ({i: 128}, 128), (0, 1)), tile(total))
        return latency(kernel.program())

    assert kernel_with(fused=True) <= kernel_with(fused=False)


def test_row_blocking_that_reloads_less_is_faster():
    """A large right operand read once per block of rows instead of once per row."""

    def product(block):
        kernel = Kernel()
        b, y = kernel.hbm((128 * 128, 512)), kernel.hbm((8 * 128, 512), Role.OUTPUT)
        with kernel.loop(8 // block, LoopKind.SEQUENTIAL) as i:
            result = [kernel.psum((128, 512)) for _ in range(block)]
            with kernel.loop(128) as k:
                right = kernel.sbuf((128, 512))
                kernel.load(tile(right), at(b, ({k: 128}, 128), (0, 512)))
                for total in result:
                    kernel.emit(
                        Opcode.MATMUL,
                        tile(total),
                        Engine.TENSOR,
                        accumulate=True,
                        stationary=at(right, (0, 128), (0, 128)),
                        moving=tile(right),
                    )
            for number, total in enumerate(result):
                out = kernel.sbuf((128, 512))
                kernel.emit(Opcode.COPY, tile(out), src=tile(total))
                kernel.store(at(y, ({i: 128 * block, None: 128 * number}, 128), (0, 512)), tile(out))
        return predict(kernel.program())

    one, four = product(1), product(4)
    assert four.counters["hbm_read_bytes"] < one.counters["hbm_read_bytes"] / 2
    assert four.latency_ms < one.latency_ms


@settings(max_examples=10)
@given(seed=st.integers(0, 1000))
def test_names_do_not_matter(seed):
    program = matmul(3, 3, 2)
    shuffled = list(program.buffers.items())
    random.Random(seed).shuffle(shuffled)
    again = Program(dict(shuffled), program.inputs, program.outputs, program.body)
    assert predict(again) == predict(program)


def test_predictions_repeat():
    assert predict(matmul(4, 4, 4)) == predict(matmul(4, 4, 4))


@settings(max_examples=20)
@given(rows=st.integers(1, 12), depth=st.integers(1, 4), columns=st.integers(1, 3))
def test_a_kernel_takes_at_least_its_busiest_engine_and_at_most_everything_in_turn(rows, depth, columns):
    run = simulate(matmul(rows, depth, columns), TRN1, ModelOptions())
    assert run.timeline.total_us >= max(run.timeline.busy_us) - 1e-6
    in_turn = sum(end - start for start, end in zip(run.timeline.start, run.timeline.end, strict=True))
    assert run.timeline.total_us <= in_turn + len(run.timeline.start) * TRN1.semaphore_us * 2
    assert all(end >= start >= 0 for start, end in zip(run.timeline.start, run.timeline.end, strict=True))


@settings(max_examples=15)
@given(rows=st.integers(1, 8), passes=st.integers(1, 3))
def test_engines_do_one_thing_at_a_time(rows, passes):
    run = simulate(elementwise(rows, 1024, passes), TRN1, ModelOptions())
    for engine in range(4):
        spans = sorted(
            (start, end)
            for start, end, lane in zip(run.timeline.start, run.timeline.end, run.timeline.engine, strict=True)
            if lane == engine
        )
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in itertools.pairwise(spans))


class TestSteadyState:
    def test_a_long_program_is_extended_to_what_the_full_simulation_gives(self, monkeypatch):
        program = elementwise(600, 1024, 2)
        full = predict(program)
        monkeypatch.setattr(steady_state, "FULL_EXECUTIONS", 1000)
        monkeypatch.setattr(steady_state, "SHORT_EXECUTIONS", 600)
        extended = predict(program)
        assert "extended_from_ms" in extended.explanation
        assert extended.latency_ms == pytest.approx(full.latency_ms, rel=0.03)
        assert set(extended.counters) == set(full.counters)
        for name in ("hbm_read_bytes", "hbm_write_bytes", "sbuf_read_bytes", "scalar_engine_instruction_count"):
            assert extended.counters[name] == full.counters[name]
        share = "scalar_engine_active_time_percent"
        assert extended.counters[share] == pytest.approx(full.counters[share], rel=0.03)

    def test_ordinary_programs_are_simulated_in_full(self):
        assert steady_state.shortened(elementwise(64, 1024, 3)) is None

    def test_a_long_program_without_a_long_loop_is_simulated_in_full(self, monkeypatch):
        monkeypatch.setattr(steady_state, "FULL_EXECUTIONS", 4)
        assert steady_state.shortened(elementwise(4, 1024, 3)) is None


def test_a_tile_loaded_again_and_used_in_smaller_pieces_is_loaded_twice_at_most():
    def passes(widths):
        kernel = Kernel()
        x, y = kernel.hbm((8 * 128, 1024)), kernel.hbm((len(widths), 8 * 128, 1024), Role.OUTPUT)
        with kernel.loop(8) as i:
            for number, width in enumerate(widths):
                data = kernel.sbuf((128, 1024))
                kernel.load(tile(data), at(x, ({i: 128}, 128), (0, 1024)))
                with kernel.loop(1024 // width) as j:
                    part = kernel.sbuf((128, width))
                    kernel.emit(
                        Opcode.ACTIVATION,
                        tile(part),
                        data=at(data, (0, 128), ({j: width}, width)),
                        scale=1.0,
                        attributes={"op": "exp"},
                    )
                    kernel.store(at(y, number, ({i: 128}, 128), ({j: width}, width)), tile(part))
        return predict(kernel.program()).counters["hbm_read_bytes"]

    once = passes([512])
    assert passes([512, 512]) == once
    assert once <= passes([512, 128]) <= 2 * once
    assert passes([512, 128]) == passes([128, 512])
