"""What one instruction costs: its engine, its time there, and what the profiler counts for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from accelopt_ray.nki_sim.cost.constants import DeviceConstants
from accelopt_ray.nki_sim.cost.options import ModelOptions
from accelopt_ray.nki_sim.cost.pieces import item_bytes, row_major_strides
from accelopt_ray.nki_sim.program import Access, Buffer, Engine, Instruction, Opcode, Space

TENSOR, VECTOR, SCALAR, GPSIMD, DMA = range(5)
ENGINE_NAMES = ("tensor", "vector", "scalar", "gpsimd", "dma")

_ENGINE_INDEX = {Engine.TENSOR: TENSOR, Engine.VECTOR: VECTOR, Engine.SCALAR: SCALAR, Engine.GPSIMD: GPSIMD}

SCALAR_OPS = frozenset({"multiply", "add", "subtract"})
"""tensor_scalar operations that an activation's scale and bias can express, so that ScalarE can run them."""

DMA_OPCODES = frozenset({Opcode.LOAD, Opcode.STORE, Opcode.DMA_COPY})
FULL_OVERHEAD_ELEMENTS = 128
"""Vector instructions of at least this many cycles of work showed the full fixed cost; tiny ones only the minimum."""


@dataclass(frozen=True)
class Tally:
    """What the profiler counts for one execution; engine SBUF and PSUM bytes are counted for one partition."""

    hbm_read_bytes: int = 0
    hbm_write_bytes: int = 0
    psum_read_bytes: int = 0
    psum_write_bytes: int = 0
    sbuf_read_bytes: int = 0
    sbuf_write_bytes: int = 0
    hardware_flops: int = 0
    transpose_flops: int = 0


@dataclass(frozen=True)
class Price:
    """Cost of one execution.

    Attributes:
        engine: Index into :data:`ENGINE_NAMES`.
        busy_us: Time the engine reports as active; for a DMA the time it takes of the whole pipe.
        span_us: Least duration of a DMA on the queues its partitions give it; equal to ``busy_us`` elsewhere.
        tally: Counted bytes and operations.
    """

    engine: int
    busy_us: float
    span_us: float
    tally: Tally


class Pricer:
    """Prices instructions of one program on one device."""

    def __init__(self, buffers: Mapping[int, Buffer], device: DeviceConstants, options: ModelOptions) -> None:
        self._buffers = buffers
        self._device = device
        self._options = options

    def price(self, instruction: Instruction, extents: tuple[int, ...]) -> Price:
        """Prices one execution.

        Args:
            instruction: A single-engine instruction.
            extents: Extents of the output tile that the mask leaves in this execution.

        Returns:
            Engine, time and counts.
        """
        if instruction.opcode in DMA_OPCODES:
            return self._dma(instruction, extents)
        if instruction.opcode in (Opcode.MATMUL, Opcode.PARTITION_BROADCAST):
            return self._matmul(instruction)
        engine = self.engine(instruction)
        if instruction.opcode is Opcode.TRANSPOSE and engine == TENSOR:
            return self._transpose(instruction)
        return self._elementwise(instruction, engine, extents)

    def engine(self, instruction: Instruction) -> int:
        """The engine the compiler chooses.

        ScalarE takes PSUM evictions, copies and the tensor_scalar operations it can express; all 14 published profiles
        agree with that. What names an engine runs there.
        """
        opcode = instruction.opcode
        if opcode in (Opcode.MATMUL, Opcode.PARTITION_BROADCAST):
            return TENSOR
        if opcode is Opcode.TRANSPOSE:
            return VECTOR if instruction.engine is Engine.VECTOR else TENSOR
        if instruction.engine in _ENGINE_INDEX and instruction.engine is not Engine.TENSOR:
            return _ENGINE_INDEX[instruction.engine]
        if opcode in (Opcode.ACTIVATION, Opcode.COPY):
            return SCALAR
        if opcode is Opcode.TENSOR_SCALAR:
            ops = {str(instruction.attributes.get(name)) for name in ("op0", "op1")} - {"None"}
            return SCALAR if ops <= SCALAR_OPS else VECTOR
        if opcode in (Opcode.IOTA, Opcode.AFFINE_SELECT, Opcode.PARTITION_REDUCE, Opcode.LOCAL_GATHER, Opcode.MEMSET):
            return GPSIMD
        return VECTOR

    def space(self, access: Access) -> Space:
        """Memory space of an access."""
        return self._buffers[access.buffer].space

    def _bytes(self, access: Access) -> int:
        return item_bytes(self._buffers[access.buffer].dtype)

    def _matmul(self, instruction: Instruction) -> Price:
        device = self._device
        out = instruction.outputs[0]
        if instruction.opcode is Opcode.PARTITION_BROADCAST:
            # Ones in the stationary operand: one pass, contraction over a single partition.
            source = instruction.operands["src"]
            itemsize = self._bytes(source) if isinstance(source, Access) else 4
            rows, columns = out.shape[0], math.prod(out.shape[1:])
            chunks = -(-columns // 512)
            cycles = max(columns, 64 * chunks) * (device.fp32_row_cycles / 2 if itemsize == 4 else 1)
            tally = Tally(
                sbuf_read_bytes=(rows * chunks + columns) * itemsize,
                psum_write_bytes=columns * 4,
                hardware_flops=2 * rows * columns,
            )
        else:
            stationary, moving = instruction.operands["stationary"], instruction.operands["moving"]
            assert isinstance(stationary, Access) and isinstance(moving, Access)
            itemsize = max(self._bytes(stationary), self._bytes(moving))
            depth, rows = stationary.shape[0], math.prod(stationary.shape[1:])
            columns = math.prod(moving.shape[1:])
            single_pass = itemsize < 4 or self._dtype(moving) == "tfloat32"
            passes = 1 if single_pass else 2
            cycles = max(columns, min(64, rows)) * (1 if single_pass else device.fp32_row_cycles)
            flops = passes * 2 * depth * rows * columns
            tally = Tally(
                sbuf_read_bytes=passes * (rows * self._bytes(stationary) + columns * self._bytes(moving)),
                psum_write_bytes=passes * columns * 4,
                hardware_flops=flops,
                transpose_flops=flops if instruction.attributes.get("is_transpose") else 0,
            )
        busy = cycles * device.pe_inefficiency / device.tensor_ghz / 1e3
        return Price(TENSOR, busy, busy, tally)

    def _transpose(self, instruction: Instruction) -> Price:
        """A transpose is a matmul with the data stationary and an identity moving (one column per data partition)."""
        device = self._device
        data = instruction.operands["data"]
        assert isinstance(data, Access)
        itemsize = self._bytes(data)
        depth, rows = data.shape[0], math.prod(data.shape[1:])
        passes = 2 if itemsize == 4 else 1
        cycles = max(depth, min(64, rows)) * (device.fp32_row_cycles if itemsize == 4 else 1)
        flops = passes * 2 * depth * rows * depth
        busy = cycles * device.pe_inefficiency / device.tensor_ghz / 1e3
        tally = Tally(
            sbuf_read_bytes=passes * (rows + depth) * itemsize,
            psum_write_bytes=passes * depth * 4,
            hardware_flops=flops,
            transpose_flops=flops,
        )
        return Price(TENSOR, busy, busy, tally)

    def _dtype(self, access: Access) -> str:
        return self._buffers[access.buffer].dtype

    def _elementwise(self, instruction: Instruction, engine: int, extents: tuple[int, ...]) -> Price:
        device = self._device
        out = instruction.outputs[0]
        inputs = [value for value in instruction.operands.values() if isinstance(value, Access)]
        clipped = math.prod(extents[1:])
        full = math.prod(out.shape[1:])
        share = clipped / full if full else 1.0

        def free(access: Access) -> int:
            return math.ceil(math.prod(access.shape[1:]) * share)

        elements = max([clipped, *(free(access) for access in inputs)])
        work = elements * self._cycles_per_element(instruction, engine, inputs)
        if engine == SCALAR:
            cycles, clock = work + device.scalar_overhead_cycles, device.scalar_ghz
            if len(instruction.outputs) > 1:
                cycles += device.minimum_cycles  # reading the accumulator
            cycles = max(cycles, device.minimum_cycles)
        elif engine == GPSIMD:
            cycles, clock = work + device.gpsimd_overhead_cycles, device.gpsimd_ghz
        else:
            overhead = device.vector_overhead_cycles * min(1.0, work / FULL_OVERHEAD_ELEMENTS)
            cycles, clock = max(work + overhead, device.minimum_cycles + 2.0), device.vector_ghz
            if instruction.opcode is Opcode.TENSOR_SCALAR_REDUCE:
                cycles += device.minimum_cycles
        busy = cycles / clock / 1e3
        return Price(engine, busy, busy, self._elementwise_tally(instruction, inputs, free, clipped))

    def _cycles_per_element(self, instruction: Instruction, engine: int, inputs: list[Access]) -> float:
        """Documented cycles per element and partition, with the measured cost of reciprocal."""
        device = self._device
        opcode = instruction.opcode
        accesses = [*inputs, *instruction.outputs]
        on_sbuf = all(self.space(access) is Space.SBUF for access in accesses)
        half = all(self._bytes(access) == 2 for access in accesses)
        if engine == GPSIMD:
            if opcode is Opcode.PARTITION_REDUCE:
                return 4.0
            return 1.0 if opcode in (Opcode.IOTA, Opcode.AFFINE_SELECT, Opcode.MEMSET, Opcode.COPY) else 2.0
        if engine == SCALAR:
            return 1.0
        if opcode in (Opcode.TENSOR_TENSOR, Opcode.LOOP_REDUCE, Opcode.SCALAR_TENSOR_TENSOR, Opcode.SCAN,
                      Opcode.COPY_PREDICATED, Opcode.SELECT):  # fmt: skip
            tensors = [access for access in inputs if math.prod(access.shape[1:]) > 1]
            from_psum = sum(self.space(access) is Space.PSUM for access in tensors)
            if opcode is Opcode.SCAN:
                return 2.0
            # A quotient of two tiles is a reciprocal and a product.
            division = device.reciprocal_cycles if instruction.attributes.get("op") == "divide" else 0.0
            if from_psum == 1 and len(tensors) == 2:
                return 1.0 + division
            if half and on_sbuf and opcode is Opcode.TENSOR_TENSOR:
                return 0.5 if device.vector_fast_modes else 1.0
            return (2.0 if len(tensors) > 1 else 1.0) + division
        if opcode is Opcode.RECIPROCAL or self._divides_by_tile(instruction):
            return device.reciprocal_cycles
        if opcode is Opcode.BN_AGGR:
            return 13 / 3
        if opcode is Opcode.TENSOR_REDUCE:
            return 0.5 if half and str(instruction.attributes.get("op")) in ("add", "maximum", "max") else 1.0
        if opcode is Opcode.MEMSET:
            return 0.5 if half and instruction.attributes.get("value") == 0 else 1.0
        if device.vector_fast_modes and half and opcode in (Opcode.COPY, Opcode.TENSOR_SCALAR):
            return 0.25 if on_sbuf else 0.5
        return 1.0

    @staticmethod
    def _divides_by_tile(instruction: Instruction) -> bool:
        attributes = instruction.attributes
        return instruction.opcode is Opcode.TENSOR_SCALAR and any(
            attributes.get(f"op{number}") == "divide" and bool(attributes.get(f"reverse{number}")) for number in (0, 1)
        )

    def _elementwise_tally(self, instruction: Instruction, inputs: list[Access], free: object, clipped: int) -> Tally:
        assert callable(free)
        counts = {Space.SBUF: [0, 0], Space.PSUM: [0, 0], Space.HBM: [0, 0]}
        # The profiler does not count the SBUF side of tensor_tensor and scan.
        silent = instruction.opcode in (
            Opcode.TENSOR_TENSOR, Opcode.SCAN, Opcode.LOOP_REDUCE, Opcode.SCALAR_TENSOR_TENSOR
        )  # fmt: skip
        for access in inputs:
            if access is instruction.operands.get("bias") or access is instruction.operands.get("scale"):
                continue
            if math.prod(access.shape[1:]) == 1 and clipped > 1:
                continue  # a per-partition operand
            if not silent:
                counts[self.space(access)][0] += int(free(access)) * self._bytes(access)
        for position, access in enumerate(instruction.outputs):
            size = clipped if position == 0 else math.prod(access.shape[1:])
            if not silent or self.space(access) is Space.PSUM:
                counts[self.space(access)][1] += size * self._bytes(access)
        return Tally(
            psum_read_bytes=counts[Space.PSUM][0],
            psum_write_bytes=counts[Space.PSUM][1],
            sbuf_read_bytes=counts[Space.SBUF][0],
            sbuf_write_bytes=counts[Space.SBUF][1],
        )

    def _dma(self, instruction: Instruction, extents: tuple[int, ...]) -> Price:
        device = self._device
        out = instruction.outputs[0]
        source = instruction.operands["src"]
        assert isinstance(source, Access)
        elements = math.prod(extents)
        tally = Tally()
        far = [access for access in (source, out) if self.space(access) is Space.HBM]
        transfer_bytes = elements * max((self._bytes(access) for access in far), default=self._bytes(out))
        if self.space(source) is Space.HBM:
            tally = Tally(hbm_read_bytes=elements * self._bytes(source))
        if self.space(out) is Space.HBM:
            tally = Tally(tally.hbm_read_bytes, elements * self._bytes(out))
        run_bytes = min((run_elements(access, extents) * self._bytes(access) for access in far), default=transfer_bytes)
        minimum = device.dma_run_bytes if self._options.short_run_cost else 0
        effective = transfer_bytes / max(run_bytes, 1) * max(run_bytes, minimum)
        busy = max(effective / device.dma_bytes_per_us, device.dma_minimum_us)
        partitions = min(extents[0] if extents else 1, 128)
        engines = max(1, min(device.dma_engines, -(-partitions // 8)))
        return Price(DMA, busy, max(busy, effective / device.dma_bytes_per_us * device.dma_engines / engines), tally)


def run_elements(access: Access, extents: tuple[int, ...]) -> int:
    """Contiguous elements of one descriptor: free axes that follow each other in HBM without gaps.

    Axis 0 is the partition axis of the other side, and a descriptor does not span partitions.
    """
    strides = row_major_strides(access.view_shape)
    axis_strides = [0] * len(access.shape)
    for stride, index in zip(strides, access.index, strict=True):
        for axis, step in index.strides:
            axis_strides[axis] += step * stride
        for axis, table in index.tables:
            axis_strides[axis] += (table[1] - table[0] if len(table) > 1 else 0) * stride
    run = 1
    for axis in sorted(range(1, len(axis_strides)), key=lambda axis: abs(axis_strides[axis])):
        if axis_strides[axis] == run:
            run *= extents[axis] if axis < len(extents) else access.shape[axis]
    return max(run, 1)
