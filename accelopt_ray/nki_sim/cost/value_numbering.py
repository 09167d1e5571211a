"""Removing repeated work: every value is computed or loaded once, as published profiles show the compiler does.

Execution by execution, each result gets a number. A pure instruction whose function and operand numbers occurred before
is not executed again; its destination becomes another name of the earlier result. That is loop-invariant hoisting and
common subexpression elimination in one rule. What nobody reads afterwards is dropped.

Results live in *storages*: a new one for each complete overwrite, so that reuse of a name is not a dependence, and the
same one for accumulation or partial writes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from accelopt_ray.nki_sim.cost.engines import Pricer
from accelopt_ray.nki_sim.cost.stream import Operation, Stream
from accelopt_ray.nki_sim.program import (
    Access,
    Buffer,
    DimIndex,
    Engine,
    Instruction,
    Opcode,
    Program,
    Space,
)


@dataclass
class Events:
    """What is executed, in order; parallel lists.

    Attributes:
        operations: Static operations; those beyond the stream's own fill a buffer with its initial value.
        op: Operation number of each event.
        reads: Storages each event reads (accumulation included).
        writes: Storages it writes; one written before is written in part.
        storage_bytes: Bytes per partition of each storage.
        storage_space: 0 SBUF, 1 PSUM, 2 HBM.
        storage_buffer: Buffer that first named it.
        storage_loader: Operation that loads it from HBM when it holds nothing but loaded data, else -1.
    """

    operations: list[Operation]
    op: list[int] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    writes: list[list[int]] = field(default_factory=list)
    storage_bytes: list[int] = field(default_factory=list)
    storage_space: list[int] = field(default_factory=list)
    storage_buffer: list[int] = field(default_factory=list)
    storage_loader: list[int] = field(default_factory=list)


def number_values(
    stream: Stream, program: Program, pricer: Pricer, *, deduplicate: bool, blocked: Collection[int] = ()
) -> Events:
    """Assigns storages and drops repeated and unused executions.

    Args:
        stream: The unrolled program.
        program: The program it came from.
        pricer: Prices for the memsets that give a buffer its initial value.
        deduplicate: Whether repeated work is dropped at all.
        blocked: Operations whose executions are all kept.

    Returns:
        The events that are executed.
    """
    operations = list(stream.operations)
    events = Events(operations)
    rewritten = _rewritten_buffers(stream)
    pure = [
        deduplicate
        and operation.pure
        and number not in blocked
        and not any(access.buffer in rewritten for access in operation.instruction.outputs)
        for number, operation in enumerate(operations)
    ]
    keeps_old = [operation.keeps_old for operation in operations]
    accumulates = [
        operation.instruction.accumulate or operation.instruction.opcode is Opcode.LOOP_REDUCE
        for operation in operations
    ]
    key_of = [operation.key for operation in operations]
    loader = [number if operation.is_load else -1 for number, operation in enumerate(operations)]
    fill_op = _fill_operations(stream, program, pricer, operations)

    version_of_unit = [-1] * len(stream.unit_space)
    storage_of_version: list[int] = []
    seen: dict[tuple[int, ...], list[int]] = {}
    unit_bytes, unit_space, unit_buffer = stream.unit_bytes, stream.unit_space, stream.unit_buffer
    out_op, out_reads, out_writes = events.op, events.reads, events.writes
    storage_bytes, storage_space = events.storage_bytes, events.storage_space
    storage_buffer, storage_loader = events.storage_buffer, events.storage_loader

    def create(unit: int, load: int) -> int:
        """A new storage and version for a unit."""
        version_of_unit[unit] = len(storage_of_version)
        storage = len(storage_bytes)
        storage_of_version.append(storage)
        storage_bytes.append(unit_bytes[unit])
        storage_space.append(unit_space[unit])
        storage_buffer.append(unit_buffer[unit])
        storage_loader.append(load)
        return storage

    def initialise(unit: int) -> int:
        """Storage for a unit that is read or partly written before any complete write."""
        storage = create(unit, -1)
        filler = fill_op.get(unit_buffer[unit])
        if filler is not None:
            out_op.append(filler)
            out_reads.append([])
            out_writes.append([storage])
        return storage

    for op, reads, writes, detail in zip(stream.op, stream.reads, stream.writes, stream.detail, strict=True):
        versions = []
        for unit in reads:
            version = version_of_unit[unit]
            if version < 0:
                initialise(unit)
                version = version_of_unit[unit]
            versions.append(version)
        if pure[op]:
            key = (key_of[op], detail, *versions)
            earlier = seen.get(key)
            if earlier is not None:
                for unit, version in zip(writes, earlier, strict=True):
                    version_of_unit[unit] = version
                continue
            targets = [create(unit, loader[op]) for unit in writes]
            seen[key] = [version_of_unit[unit] for unit in writes]
            sources = [storage_of_version[version] for version in versions]
        elif keeps_old[op]:
            sources = [storage_of_version[version] for version in versions]
            targets = []
            for unit in writes:
                version = version_of_unit[unit]
                if version < 0:
                    storage = create(unit, -1) if accumulates[op] else initialise(unit)
                else:
                    storage = storage_of_version[version]
                    if accumulates[op]:
                        sources.append(storage)
                    version_of_unit[unit] = len(storage_of_version)
                    storage_of_version.append(storage)
                    storage_loader[storage] = -1
                targets.append(storage)
        else:
            sources = [storage_of_version[version] for version in versions]
            targets = [create(unit, loader[op]) for unit in writes]
        out_op.append(op)
        out_reads.append(sources)
        out_writes.append(targets)
    return _drop_unused(events)


def _rewritten_buffers(stream: Stream) -> set[int]:
    """Buffers that some operation updates in place; their values are not shared with others."""
    return {
        access.buffer
        for operation in stream.operations
        if operation.keeps_old
        for access in operation.instruction.outputs
    }


def _fill_operations(stream: Stream, program: Program, pricer: Pricer, operations: list[Operation]) -> dict[int, int]:
    """A memset operation for each SBUF buffer that starts with a value; PSUM starts accumulating without one."""
    fillers: dict[int, int] = {}
    assert stream.pieces is not None
    for buffer_id, placement in stream.pieces.placements.items():
        buffer = program.buffers[buffer_id]
        if buffer.fill is None or buffer.space is not Space.SBUF:
            continue
        instruction = _memset(buffer, placement.unit_bytes)
        fillers[buffer_id] = len(operations)
        price = pricer.price(instruction, instruction.outputs[0].shape)
        operations.append(Operation(instruction, price, (), False, False, False, False, -1))
    return fillers


def _memset(buffer: Buffer, unit_bytes: int) -> Instruction:
    rows = buffer.shape[buffer.block_dims]
    itemsize = {"float32": 4, "int32": 4, "uint32": 4, "tfloat32": 4}.get(buffer.dtype, 2)
    shape = (rows, max(1, unit_bytes // itemsize))
    tile = Access(buffer.id, shape, (DimIndex(strides=((0, 1),)), DimIndex(strides=((1, 1),))), shape)
    return Instruction(-1, Opcode.MEMSET, Engine.ANY, (tile,), {}, {"value": buffer.fill}, line=buffer.line)


def _drop_unused(events: Events) -> Events:
    """Drops events whose results nobody reads; stores are always used."""
    is_store = [operation.is_store for operation in events.operations]
    used = bytearray(len(events.storage_bytes))
    keep = bytearray(len(events.op))
    dropped = False
    for position in range(len(events.op) - 1, -1, -1):
        op = events.op[position]
        if is_store[op] or any(used[storage] for storage in events.writes[position]):
            keep[position] = 1
            for storage in events.reads[position]:
                used[storage] = 1
        else:
            dropped = True
    if dropped:
        chosen = [position for position in range(len(keep)) if keep[position]]
        events.op = [events.op[position] for position in chosen]
        events.reads = [events.reads[position] for position in chosen]
        events.writes = [events.writes[position] for position in chosen]
    return events
