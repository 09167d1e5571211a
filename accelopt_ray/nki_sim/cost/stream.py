"""Unrolling the loop nest into the stream of instructions that the device executes, with the units each one touches.

Positions in the stream, unit numbers and mask conditions are all affine in the loop indices, so they are computed for
all executions of an instruction at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from accelopt_ray.nki_sim.cost.engines import Price, Pricer
from accelopt_ray.nki_sim.cost.pieces import AccessPlan, Pieces, flat_position, row_major_strides
from accelopt_ray.nki_sim.program import (
    Access,
    Affine,
    Instruction,
    Loop,
    MaskTerm,
    Node,
    Opcode,
    Program,
    Space,
)

Integers = npt.NDArray[np.int64]

_NOT_FUNCTION = frozenset({"loops", "broadcast"})
"""Attributes that do not change what an instruction computes from its operands."""
_IMPURE = frozenset({Opcode.RANDOM, Opcode.DROPOUT, Opcode.STORE, Opcode.DMA_COPY})


@dataclass(frozen=True)
class Operation:
    """One static instruction under one clipping of its mask: what all its executions share.

    Attributes:
        instruction: The instruction.
        price: Cost of one execution.
        loops: Ids of the loops around it, outermost first.
        pure: Its result is a function of its operands, so a repeated execution is redundant.
        is_load: It copies from HBM that the kernel never writes.
        is_store: It writes HBM.
        keeps_old: It leaves parts of its destination as they were, or adds to it.
        key: Number shared by operations that compute the same function.
    """

    instruction: Instruction
    price: Price
    loops: tuple[int, ...]
    pure: bool
    is_load: bool
    is_store: bool
    keeps_old: bool
    key: int


@dataclass
class Stream:
    """The unrolled program; parallel lists over executions in program order.

    Attributes:
        operations: Static operations.
        op: Operation number of each execution.
        reads: Unit numbers each execution reads.
        writes: Unit numbers it writes.
        detail: Distinguishes executions of one operation that the units read do not: a load's HBM position.
        pieces: The unit numbering.
        unit_space: Memory space of each unit (0 SBUF, 1 PSUM, 2 HBM).
        unit_bytes: Bytes per partition of each unit.
        unit_buffer: Buffer of each unit.
    """

    operations: list[Operation] = field(default_factory=list)
    op: list[int] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    writes: list[list[int]] = field(default_factory=list)
    detail: list[int] = field(default_factory=list)
    pieces: Pieces | None = None
    unit_space: list[int] = field(default_factory=list)
    unit_bytes: list[int] = field(default_factory=list)
    unit_buffer: list[int] = field(default_factory=list)


SPACE_NUMBER = {Space.SBUF: 0, Space.PSUM: 1, Space.HBM: 2}


def executions(nodes: tuple[Node, ...]) -> int:
    """Number of instruction executions of one pass through some nodes."""
    return sum(node.trips * executions(node.body) if isinstance(node, Loop) else 1 for node in nodes)


def unroll(program: Program, pieces: Pieces, pricer: Pricer) -> Stream:
    """Unrolls a rewritten program.

    Args:
        program: Program of single-engine instructions.
        pieces: Its unit numbering.
        pricer: Prices for its instructions.

    Returns:
        The stream in program order; executions whose mask excludes every element are left out.
    """
    return _Unroller(program, pieces, pricer).run()


def affine_values(affine: Affine, loops: tuple[Loop, ...]) -> Integers:
    """Values of an affine expression over all iterations, outermost loop slowest."""
    return _grid(affine.constant, dict(affine.terms), loops)


def _grid(constant: int, coefficients: dict[int, int], loops: tuple[Loop, ...]) -> Integers:
    values: Integers = np.full((), constant, dtype=np.int64)
    for loop in loops:
        step = np.arange(loop.trips, dtype=np.int64) * coefficients.get(loop.id, 0)
        values = values[..., None] + step
    return np.asarray(values).ravel()


class _Unroller:
    def __init__(self, program: Program, pieces: Pieces, pricer: Pricer) -> None:
        self._program = program
        self._pieces = pieces
        self._pricer = pricer
        self._total = executions(program.body)
        self._keys: dict[object, int] = {}
        self._stream = Stream(pieces=pieces)
        self._op: Integers = np.full(self._total, -1, dtype=np.int64)
        self._reads: list[list[int]] = [[]] * self._total
        self._writes: list[list[int]] = [[]] * self._total
        self._detail: Integers = np.zeros(self._total, dtype=np.int64)

    def run(self) -> Stream:
        self._visit(self._program.body, (), 0, ())
        stream = self._stream
        kept = self._op >= 0
        stream.op = self._op[kept].tolist()
        stream.detail = self._detail[kept].tolist()
        if kept.all():
            stream.reads, stream.writes = self._reads, self._writes
        else:
            keep = np.flatnonzero(kept).tolist()
            stream.reads = [self._reads[position] for position in keep]
            stream.writes = [self._writes[position] for position in keep]
        for buffer_id, placement in self._pieces.placements.items():
            space = SPACE_NUMBER[self._program.buffers[buffer_id].space]
            stream.unit_space.extend([space] * placement.count)
            stream.unit_bytes.extend([placement.unit_bytes] * placement.count)
            stream.unit_buffer.extend([buffer_id] * placement.count)
        return stream

    def _visit(self, nodes: tuple[Node, ...], loops: tuple[Loop, ...], start: int, strides: tuple[int, ...]) -> None:
        offset = start
        for node in nodes:
            if isinstance(node, Loop):
                size = executions(node.body)
                self._visit(node.body, (*loops, node), offset, (*strides, size))
                offset += size * node.trips
            else:
                positions = _grid(offset, {loop.id: stride for loop, stride in zip(loops, strides, strict=True)}, loops)
                self._instruction(node, loops, positions)
                offset += 1

    def _instruction(self, node: Instruction, loops: tuple[Loop, ...], positions: Integers) -> None:
        variants = self._clip(node, loops, len(positions))
        plans_in = [
            plan
            for value in node.operands.values()
            if isinstance(value, Access) and (plan := self._pieces.plan(value)) is not None
        ]
        plans_out = [plan for access in node.outputs if (plan := self._pieces.plan(access)) is not None]
        reads = _unit_rows(plans_in, loops)
        writes = _unit_rows(plans_out, loops)
        where = positions.tolist()
        for position, units in zip(where, reads, strict=True):
            self._reads[position] = units
        for position, units in zip(where, writes, strict=True):
            self._writes[position] = units
        detail = self._details(node, plans_in, plans_out, loops)
        if detail is not None:
            self._detail[positions] = detail
        for plan in plans_out:
            # Equal values in different columns of a tile are different pieces: the tile is read as one.
            placement = self._pieces.placements[plan.buffer]
            if placement.tile_units > 1:
                unit = _grid(plan.base - placement.base, dict(plan.terms), loops)
                self._detail[positions] = self._detail[positions] * 4096 + unit % placement.tile_units
        for extents, chosen in variants:
            if not all(extents):
                continue
            number = len(self._stream.operations)
            self._stream.operations.append(self._operation(node, loops, extents, plans_in, plans_out))
            self._op[positions if chosen is None else positions[chosen]] = number

    def _details(
        self, node: Instruction, plans_in: list[AccessPlan], plans_out: list[AccessPlan], loops: tuple[Loop, ...]
    ) -> Integers | None:
        affines = [plan.position for plan in (*plans_in, *plans_out) if not plan.exact]
        affines += [value for value in node.attributes.values() if isinstance(value, Affine)]
        affines += [value.start for value in node.attributes.values() if isinstance(value, MaskTerm)]
        if node.opcode is Opcode.LOAD:
            source = node.operands["src"]
            assert isinstance(source, Access)
            affines.append(flat_position(source))
        if not affines:
            return None
        detail = np.zeros(math.prod(loop.trips for loop in loops), dtype=np.int64)
        for affine in affines:
            detail = detail * 1_000_003 + affine_values(affine, loops)
        return detail

    def _clip(
        self, node: Instruction, loops: tuple[Loop, ...], count: int
    ) -> list[tuple[tuple[int, ...], npt.NDArray[np.bool_] | None]]:
        """Distinct extents that the mask leaves, each with the executions that have them (None for all).

        The tensor engine runs masked matmuls at full width (seen in a published profile), so they are not clipped.
        """
        shape = node.outputs[0].shape
        if not node.mask or node.opcode is Opcode.MATMUL:
            return [(shape, None)]
        extents = np.tile(np.asarray(shape, dtype=np.int64), (count, 1))
        for term in node.mask:
            start = affine_values(term.start, loops)
            if not term.strides:
                extents[start < 0] = 0
            elif len(term.strides) == 1:
                axis, stride = term.strides[0]
                allowed = start // -stride + 1 if stride < 0 else shape[axis] + np.minimum(start // stride, 0)
                extents[:, axis] = np.minimum(extents[:, axis], np.clip(allowed, 0, shape[axis]))
        distinct, codes = np.unique(extents, axis=0, return_inverse=True)
        codes = codes.ravel()
        return [(tuple(int(extent) for extent in row), codes == code) for code, row in enumerate(distinct)]

    def _operation(
        self,
        node: Instruction,
        loops: tuple[Loop, ...],
        extents: tuple[int, ...],
        plans_in: list[AccessPlan],
        plans_out: list[AccessPlan],
    ) -> Operation:
        buffers = self._program.buffers
        price = self._pricer.price(node, extents)
        is_load = False
        if node.opcode is Opcode.LOAD:
            source = node.operands["src"]
            assert isinstance(source, Access)
            is_load = source.buffer not in self._pieces.written and not any(
                index.indirect is not None for index in source.index
            )
        keeps_old = (
            node.accumulate
            or node.opcode in (Opcode.LOOP_REDUCE, Opcode.COPY_PREDICATED)
            or any(not plan.exact for plan in plans_out)
            or (extents != node.outputs[0].shape and node.opcode is not Opcode.LOAD)
        )
        late_transpose = bool(node.attributes.get("late"))
        pure = (
            not keeps_old
            and node.opcode not in _IMPURE
            and (node.opcode is not Opcode.LOAD or is_load)
            and not late_transpose
        )
        signature = (
            node.opcode, price.engine, extents, node.accumulate,
            tuple(sorted((name, repr(value)) for name, value in node.attributes.items() if name not in _NOT_FUNCTION)),
            tuple(
                (name, self._pattern(value) if isinstance(value, Access) else value)
                for name, value in sorted(node.operands.items())
            ),
            tuple((access.shape, buffers[access.buffer].dtype, buffers[access.buffer].space)
                  for access in node.outputs),
            # Results cut differently have no units in common, so that neither can stand for the other.
            tuple(self._pieces.free_sizes(access) for access in node.outputs),
        )  # fmt: skip
        key = self._keys.setdefault(signature, len(self._keys))
        return Operation(
            instruction=node,
            price=price,
            loops=tuple(loop.id for loop in loops),
            pure=pure,
            is_load=is_load,
            is_store=any(buffers[access.buffer].space is Space.HBM for access in node.outputs),
            keeps_old=keeps_old,
            key=key,
        )

    def _pattern(self, access: Access) -> tuple[object, ...]:
        """What of an access matters to the function computed, beyond the units read: the walk within them."""
        strides = row_major_strides(access.view_shape)
        buffer = self._program.buffers[access.buffer]
        hbm = buffer.space is Space.HBM
        walk = tuple(
            (axis, step * (stride if hbm else 1), 0 if hbm else dim - buffer.block_dims)
            for dim, (stride, index) in enumerate(zip(strides, access.index, strict=True))
            for axis, step in index.strides
        )
        tables = tuple(index.tables for index in access.index)
        return (access.shape, walk, tables, access.buffer if hbm else -1)


def _unit_rows(plans: list[AccessPlan], loops: tuple[Loop, ...]) -> list[list[int]]:
    count = math.prod(loop.trips for loop in loops)
    if not plans:
        return [[]] * count
    columns = [
        _grid(plan.base, dict(plan.terms), loops)[:, None] + np.asarray(plan.offsets, dtype=np.int64) for plan in plans
    ]
    rows: list[list[int]] = np.concatenate(columns, axis=1).tolist()
    return rows
