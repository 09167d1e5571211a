"""The cost model's stages: what is executed, what moves, what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_kernels import Kernel, at, elementwise, matmul, tile

from accelopt_ray.nki_sim.cost import DEVICES, ModelOptions, predict
from accelopt_ray.nki_sim.cost.fusion import fuse
from accelopt_ray.nki_sim.cost.predict import simulate
from accelopt_ray.nki_sim.cost.rewriting import rewrite, walk_nodes
from accelopt_ray.nki_sim.program import Affine, Engine, LoopKind, MaskTerm, Opcode, Role

TRN1 = DEVICES["trn1"]
MIB = 1 << 20


def opcodes(program, options=None):
    run = simulate(program, TRN1, options or ModelOptions())
    return [run.events.operations[op].instruction.opcode for op in run.events.op]


class TestRepeatedWork:
    def test_a_load_repeated_in_every_iteration_is_issued_once(self):
        kernel = Kernel()
        x, y = kernel.hbm((128, 512)), kernel.hbm((16 * 128, 512), Role.OUTPUT)
        with kernel.loop(16) as i:
            data, result = kernel.sbuf((128, 512)), kernel.sbuf((128, 512))
            kernel.load(tile(data), tile(x))
            kernel.emit(Opcode.MEMSET, tile(result), attributes={"value": 1.0})
            kernel.emit(Opcode.TENSOR_TENSOR, tile(result), a=tile(data), b=tile(data), attributes={"op": "add"})
            kernel.store(at(y, ({i: 128}, 128), (0, 512)), tile(result))
        counters = predict(kernel.program()).counters
        assert counters["hbm_read_bytes"] == 128 * 512 * 4
        assert counters["hbm_write_bytes"] == 16 * 128 * 512 * 4
        assert counters["vector_engine_instruction_count"] == 1

    def test_redundant_transposes_are_executed_once(self):
        nominal = predict(matmul(rows=2, depth=4, columns=3), options=ModelOptions(deduplicate=False)).counters
        real = predict(matmul(rows=2, depth=4, columns=3)).counters
        assert nominal["transpose_flops"] == 3 * real["transpose_flops"]
        assert real["transpose_flops"] == 2 * 4 * 2 * 2 * 128**3

    def test_transposes_of_a_high_level_matmul_stay_redundant(self):
        kernel = Kernel()
        a, b, c = kernel.hbm((128, 128)), kernel.hbm((128, 2048)), kernel.hbm((128, 2048), Role.OUTPUT)
        left = kernel.sbuf((128, 128))
        kernel.load(tile(left), tile(a))
        with kernel.loop(4) as j:
            right, turned, copied = kernel.sbuf((128, 512)), kernel.psum((128, 128)), kernel.sbuf((128, 128))
            result, out = kernel.psum((128, 512)), kernel.sbuf((128, 512))
            kernel.load(tile(right), at(b, (0, 128), ({j: 512}, 512)))
            kernel.emit(Opcode.TRANSPOSE, tile(turned), Engine.TENSOR, data=tile(left))
            kernel.emit(Opcode.COPY, tile(copied), src=tile(turned))
            kernel.emit(
                Opcode.MATMUL,
                tile(result),
                Engine.TENSOR,
                stationary=tile(copied),
                moving=tile(right),
                attributes={"high_level": True},
            )
            kernel.emit(Opcode.COPY, tile(out), src=tile(result))
            kernel.store(at(c, (0, 128), ({j: 512}, 512)), tile(out))
        assert predict(kernel.program()).counters["transpose_flops"] == 4 * 2 * 2 * 128**3

    def test_a_tensor_the_kernel_writes_is_loaded_again_after_the_write(self):
        kernel = Kernel()
        scratch = kernel.hbm((128, 512), Role.TEMPORARY)
        y = kernel.hbm((128, 512), Role.OUTPUT)
        value = kernel.sbuf((128, 512))
        kernel.emit(Opcode.MEMSET, tile(value), attributes={"value": 1.0})
        for _ in range(2):
            kernel.store(tile(scratch), tile(value))
            value = kernel.sbuf((128, 512))
            kernel.load(tile(value), tile(scratch))
        kernel.store(tile(y), tile(value))
        counters = predict(kernel.program()).counters
        assert counters["hbm_read_bytes"] == 2 * 128 * 512 * 4
        assert counters["spill_save_bytes"] == counters["spill_reload_bytes"] == 2 * 128 * 512 * 4

    def test_work_that_nobody_reads_is_dropped(self):
        program = elementwise(rows=2, passes=1)
        kernel = Kernel()
        x, y = kernel.hbm((128, 512)), kernel.hbm((128, 512), Role.OUTPUT)
        data, unused = kernel.sbuf((128, 512)), kernel.sbuf((128, 512))
        kernel.load(tile(data), tile(x))
        kernel.emit(Opcode.ACTIVATION, tile(unused), data=tile(data), scale=1.0, attributes={"op": "exp"})
        kernel.store(tile(y), tile(data))
        assert opcodes(kernel.program()) == [Opcode.LOAD, Opcode.STORE]
        assert opcodes(program).count(Opcode.ACTIVATION) == 4


class TestResidency:
    @staticmethod
    def _held(tiles, columns=2048):
        """Makes ``tiles`` tiles, then reads them all again in the same order, accumulating in place."""
        kernel = Kernel()
        y = kernel.hbm((tiles * 128, columns), Role.OUTPUT)
        held = kernel.sbuf((tiles, 128, columns), block_dims=1)
        with kernel.loop(tiles) as i:
            kernel.emit(
                Opcode.IOTA, at(held, {i: 1}, (0, 128), (0, columns)), attributes={"start": Affine(0, ((i, 1),))}
            )
        with kernel.loop(tiles, LoopKind.SEQUENTIAL) as j:
            kernel.store(at(y, ({j: 128}, 128), (0, columns)), at(held, {j: 1}, (0, 128), (0, columns)))
        return replace_kinds(kernel.program())

    def test_what_fits_is_not_spilled(self):
        counters = predict(self._held(16)).counters
        assert counters["spill_save_bytes"] == counters["spill_reload_bytes"] == 0

    def test_what_does_not_fit_is_saved_and_reloaded(self):
        counters = predict(self._held(32)).counters
        overflow = 32 - TRN1.sbuf_bytes // 8192
        assert counters["spill_save_bytes"] >= overflow * MIB
        assert counters["spill_reload_bytes"] == counters["spill_save_bytes"]
        assert counters["hbm_write_bytes"] == 32 * MIB + counters["spill_save_bytes"]

    def test_infinite_sbuf_never_spills_and_is_never_slower(self):
        program = self._held(64)
        free = predict(program, options=ModelOptions(infinite_sbuf=True))
        assert free.counters["spill_save_bytes"] == 0
        assert free.latency_ms <= predict(program).latency_ms

    def test_loaded_tiles_are_dropped_and_read_again_without_spill(self):
        kernel = Kernel()
        x, y = kernel.hbm((32 * 128, 2048)), kernel.hbm((96 * 128, 2048), Role.OUTPUT)
        with kernel.loop(3) as i, kernel.loop(32) as j:
            data = kernel.sbuf((128, 2048))
            kernel.load(tile(data), at(x, ({j: 128}, 128), (0, 2048)))
            kernel.store(at(y, ({i: 4096, j: 128}, 128), (0, 2048)), tile(data))
        counters = predict(kernel.program()).counters
        assert 64 * MIB < counters["hbm_read_bytes"] <= 96 * MIB
        assert counters["spill_save_bytes"] == 0

    def test_narrow_tiles_share_columns(self):
        wide = simulate(elementwise(rows=1), TRN1, ModelOptions()).steps.peak_bytes
        kernel = Kernel()
        x, y = kernel.hbm((32, 1024)), kernel.hbm((32, 1024), Role.OUTPUT)
        data = kernel.sbuf((32, 1024))
        kernel.load(tile(data), tile(x))
        kernel.store(tile(y), tile(data))
        assert simulate(kernel.program(), TRN1, ModelOptions()).steps.peak_bytes * 4 <= wide


class TestRewrites:
    def test_partition_broadcast_becomes_matmuls_and_evictions_of_a_bank_each(self):
        kernel = Kernel()
        x, y = kernel.hbm((1, 2048)), kernel.hbm((128, 2048), Role.OUTPUT)
        row, spread = kernel.sbuf((1, 2048)), kernel.sbuf((128, 2048))
        kernel.load(tile(row), tile(x))
        kernel.emit(Opcode.PARTITION_BROADCAST, tile(spread), Engine.TENSOR, src=tile(row))
        kernel.store(tile(y), tile(spread))
        prediction = predict(kernel.program())
        assert prediction.counters["hardware_flops"] == 2 * 128 * 2048
        assert prediction.counters["psum_write_bytes"] == prediction.counters["psum_read_bytes"] == 2048 * 4
        assert prediction.counters["scalar_engine_instruction_count"] == 4

    def test_short_loop_of_narrow_instructions_merges(self):
        long, short = self._columns(2048, 1), self._columns(64, 32)
        launch = TRN1.launch_us / 1e3
        assert predict(short).latency_ms - launch < (predict(long).latency_ms - launch) / 5
        apart = ModelOptions(merge_short_loops=False)
        assert predict(short, options=apart).latency_ms == pytest.approx(
            predict(long, options=apart).latency_ms, rel=0.02
        )

    @staticmethod
    def _columns(inner, outer):
        kernel = Kernel()
        x, y = kernel.hbm((128, 2050)), kernel.hbm((128, 2048), Role.OUTPUT)
        data, out = kernel.sbuf((128, 2050)), kernel.sbuf((128, 2048))
        kernel.load(tile(data), tile(x))
        with kernel.loop(outer) as i, kernel.loop(inner) as j:
            kernel.emit(
                Opcode.TENSOR_REDUCE,
                at(out, (0, 128), ({i: inner, j: 1}, 1)),
                Engine.VECTOR,
                data=at(data, (0, 128), ({i: inner, j: 1}, 3)),
                attributes={"op": "add", "axes": (1,)},
            )
        kernel.store(tile(y), tile(out))
        return kernel.program()

    def test_a_sequential_loop_is_not_merged(self):
        kernel = Kernel()
        y = kernel.hbm((128, 64), Role.OUTPUT)
        out = kernel.sbuf((128, 64))
        with kernel.loop(64, LoopKind.SEQUENTIAL) as j:
            kernel.emit(Opcode.MEMSET, at(out, (0, 128), ({j: 1}, 1)), attributes={"value": 0.0})
        kernel.store(tile(y), tile(out))
        assert opcodes(kernel.program()).count(Opcode.MEMSET) == 64

    def test_producer_and_consumer_loops_fuse_and_the_intermediate_stays_on_chip(self):
        program = self._two_nests(shift=0)
        fused = fuse(program)
        assert len(fused.body) == len(program.body) - 1
        assert predict(program).counters["spill_save_bytes"] == 0
        assert predict(program, options=ModelOptions(fuse_loops=False)).counters["spill_save_bytes"] > 0

    def test_loops_with_a_shifted_dependence_do_not_fuse(self):
        program = self._two_nests(shift=1)
        assert len(fuse(program).body) == len(program.body)

    @staticmethod
    def _two_nests(shift):
        count = 40
        kernel = Kernel()
        x, y = kernel.hbm((count * 128, 2048)), kernel.hbm((count * 128, 2048), Role.OUTPUT)
        middle = kernel.sbuf((count + shift, 128, 2048), block_dims=1)
        with kernel.loop(count) as i:
            data = kernel.sbuf((128, 2048))
            kernel.load(tile(data), at(x, ({i: 128}, 128), (0, 2048)))
            kernel.emit(
                Opcode.ACTIVATION,
                at(middle, {i: 1, None: shift}, (0, 128), (0, 2048)),
                data=tile(data),
                scale=1.0,
                attributes={"op": "exp"},
            )
        with kernel.loop(count) as j:
            result = kernel.sbuf((128, 2048))
            kernel.emit(
                Opcode.ACTIVATION,
                tile(result),
                data=at(middle, {j: 1}, (0, 128), (0, 2048)),
                scale=1.0,
                attributes={"op": "exp"},
            )
            kernel.store(at(y, ({j: 128}, 128), (0, 2048)), tile(result))
        return kernel.program()

    def test_a_reduction_reads_a_freshly_evicted_tile_from_psum(self):
        kernel = Kernel()
        a, y = kernel.hbm((128, 512)), kernel.hbm((128, 1), Role.OUTPUT)
        z = kernel.hbm((128, 512), Role.OUTPUT)
        data, product = kernel.sbuf((128, 512)), kernel.psum((128, 512))
        kernel.load(tile(data), tile(a))
        kernel.emit(
            Opcode.MATMUL, tile(product), Engine.TENSOR, stationary=at(data, (0, 128), (0, 128)), moving=tile(data)
        )
        copied, largest = kernel.sbuf((128, 512)), kernel.sbuf((128, 1))
        kernel.emit(Opcode.COPY, tile(copied), src=tile(product))
        kernel.emit(
            Opcode.TENSOR_REDUCE,
            tile(largest),
            Engine.VECTOR,
            data=tile(copied),
            attributes={"op": "maximum", "axes": (1,)},
        )
        kernel.store(tile(y), tile(largest))
        kernel.store(tile(z), tile(copied))
        program = kernel.program()
        assert predict(program).counters["psum_read_bytes"] == 2 * 512 * 4
        assert predict(program, options=ModelOptions(psum_operands=False)).counters["psum_read_bytes"] == 512 * 4

    def test_a_transposing_load_goes_through_the_tensor_engine(self):
        kernel = Kernel()
        x, y = kernel.hbm((128, 64)), kernel.hbm((64, 128), Role.OUTPUT)
        turned = kernel.sbuf((64, 128))
        kernel.emit(Opcode.LOAD, tile(turned), Engine.DMA, src=transposed(x))
        kernel.store(tile(y), tile(turned))
        assert [node.opcode for node in walk_nodes(rewrite(kernel.program(), ModelOptions()).body)] == [
            Opcode.LOAD,
            Opcode.TRANSPOSE,
            Opcode.COPY,
            Opcode.STORE,
        ]


class TestCounters:
    def test_fp32_matmul_counts_two_passes_and_engine_bytes_one_partition(self):
        counters = predict(matmul(rows=1, depth=1, columns=1)).counters
        assert counters["hardware_flops"] == 2 * 2 * 128 * 128 * (128 + 512)
        assert counters["psum_write_bytes"] == 2 * (128 + 512) * 4
        assert counters["psum_read_bytes"] == (128 + 512) * 4
        reads = 2 * (128 + 128) * 4 + 2 * (128 + 512) * 4
        assert counters["sbuf_read_bytes"] == counters["hbm_write_bytes"] + reads
        assert counters["sbuf_write_bytes"] == counters["hbm_read_bytes"] + (128 + 512) * 4

    def test_kernels_without_matmul_have_no_flops_fields(self):
        counters = predict(elementwise()).counters
        assert {"hardware_flops", "transpose_flops", "psum_read_bytes", "psum_write_bytes"}.isdisjoint(counters)
        assert counters["mm_arithmetic_intensity"] == counters["hfu_estimated_percent"] == 0

    def test_ratio_of_peaks_is_the_profilers(self):
        assert predict(elementwise()).counters["peak_flops_bandwidth_ratio"] == pytest.approx(223.781463973542)

    def test_masked_transfers_are_clipped_and_empty_ones_not_issued(self):
        kernel = Kernel()
        x, y = kernel.hbm((300, 512)), kernel.hbm((300, 512), Role.OUTPUT)
        with kernel.loop(4) as i:
            data = kernel.sbuf((128, 512))
            mask = (MaskTerm(Affine(299, ((i, -128),)), ((0, -1),)),)
            kernel.emit(Opcode.LOAD, tile(data), Engine.DMA, mask, src=at(x, ({i: 128}, 128), (0, 512)))
            kernel.emit(Opcode.STORE, at(y, ({i: 128}, 128), (0, 512)), Engine.DMA, mask, src=tile(data))
        counters = predict(kernel.program()).counters
        assert counters["hbm_read_bytes"] == counters["hbm_write_bytes"] == 300 * 512 * 4
        assert counters["dma_transfer_count"] == 6


def transposed(buffer):
    """The whole of a two-dimensional HBM tensor with its axes swapped."""
    access = at(buffer, (0, buffer.shape[0]), (0, buffer.shape[1]))
    swapped = tuple(
        replace(index, strides=tuple((1 - axis, step) for axis, step in index.strides)) for index in access.index
    )
    return replace(access, shape=access.shape[::-1], index=swapped)


def replace_kinds(program):
    """The program with sequential loops where fusion would otherwise remove what a test is about."""
    body = tuple(replace(node, kind=LoopKind.SEQUENTIAL) for node in program.body)
    return replace(program, body=body)
