"""Reads a tile where it comes from instead of copying it first.

A tensor on chip whose only write is a plain load from memory that never changes holds nothing of its own. Its readers
can read that memory directly, and the load disappears. What matters is that every read is proven to see the load's
values, and that the load's index map can be inverted.

This pays for slices, which need little of what a load brings in. Whole runs read each loaded tile many times and gain
as much from its compact copy as they would from leaving it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from accelopt_ray.nki_sim.numerics.coverage import plan_initialisation
from accelopt_ray.nki_sim.numerics.geometry import Nest, Touch
from accelopt_ray.nki_sim.program import (
    Access,
    Affine,
    DimIndex,
    Instruction,
    Loop,
    Node,
    Opcode,
    Operand,
    Program,
    Role,
    Space,
)


@dataclass(frozen=True)
class _Linear:
    """``constant`` plus factors of loops plus factors of the reader's tile axes."""

    constant: int
    loops: Mapping[int, int]
    axes: Mapping[int, int]

    @staticmethod
    def of(index: DimIndex) -> _Linear:
        axes: dict[int, int] = {}
        for axis, stride in index.strides:
            axes[axis] = axes.get(axis, 0) + stride
        return _Linear(index.start.constant, dict(index.start.terms), axes)

    def plus(self, other: _Linear, factor: int) -> _Linear:
        loops, axes = dict(self.loops), dict(self.axes)
        for loop, value in other.loops.items():
            loops[loop] = loops.get(loop, 0) + factor * value
        for axis, value in other.axes.items():
            axes[axis] = axes.get(axis, 0) + factor * value
        return _Linear(self.constant + factor * other.constant, loops, axes)

    def index(self) -> DimIndex:
        terms = tuple(sorted((loop, factor) for loop, factor in self.loops.items() if factor))
        return DimIndex(Affine(self.constant, terms), tuple((a, s) for a, s in sorted(self.axes.items()) if s))


def forward_loads(program: Program) -> Program:
    """Returns an equivalent program without the loads whose readers can read the source themselves."""
    nest = Nest(program)
    replacements: dict[tuple[int, Access], Access] = {}
    dropped: set[int] = set()
    for buffer in program.buffers.values():
        if buffer.role is not Role.TEMPORARY or buffer.space is Space.HBM or buffer.fill is not None:
            continue
        found = _forwarded(buffer.id, nest)
        if found is not None:
            load, accesses = found
            dropped.add(load)
            replacements.update(accesses)
    if not dropped:
        return program
    return replace(program, body=_rewritten(program.body, dropped, replacements))


def _forwarded(buffer: int, nest: Nest) -> tuple[int, dict[tuple[int, Access], Access]] | None:
    """Returns the load to drop and the new accesses of its readers, by statement position and old access."""
    writes = [touch for touch in nest.touches[buffer] if touch.is_write]
    if len(writes) != 1:
        return None
    write = writes[0]
    instruction = write.statement.instruction
    source = instruction.operands.get("src")
    if (
        instruction.opcode not in (Opcode.LOAD, Opcode.DMA_COPY)
        or not isinstance(source, Access)
        or instruction.mask
        or instruction.accumulate
        or instruction.attributes
        or not _is_affine(source)
        or not _is_affine(write.access)
    ):
        return None
    origin = nest.program.buffers[source.buffer]
    if origin.role not in (Role.INPUT, Role.CONSTANT) or origin.dtype != nest.program.buffers[buffer].dtype:
        return None
    if any(touch.is_write for touch in nest.touches[source.buffer]):
        return None
    proof = plan_initialisation(buffer, None, nest)
    if proof.needed or proof.unless:
        return None
    accesses: dict[tuple[int, Access], Access] = {}
    for touch in nest.touches[buffer]:
        if touch.is_write:
            continue
        is_operand = touch.access in touch.statement.instruction.operands.values()
        direct = _composed(touch, write, source) if is_operand else None
        if direct is None:
            return None
        accesses[touch.statement.position, touch.access] = direct
    return instruction.id, accesses


def _is_affine(access: Access) -> bool:
    return not any(index.tables or index.indirect is not None for index in access.index)


def _composed(read: Touch, write: Touch, source: Access) -> Access | None:
    """Expresses a read of the loaded tensor as a read of the load's source; None where that is not affine."""
    if not _is_affine(read.access) or read.access.view_shape != write.access.view_shape:
        return None
    if read.statement.position < write.statement.position:
        return None
    shared = set(read.statement.loops) & set(write.statement.loops)
    wanted = [_Linear.of(index) for index in read.access.index]
    given = [_Linear.of(index) for index in write.access.index]
    loops = {loop: _Linear(0, {loop: 1}, {}) for loop in shared}
    for mine, theirs in zip(given, wanted, strict=True):
        moving = [(loop, factor) for loop, factor in mine.loops.items() if factor]
        if not mine.axes and len(moving) == 1 and moving[0][1] == 1:
            loops[moving[0][0]] = theirs.plus(_Linear(mine.constant, {}, {}), -1)
    axes: dict[int, _Linear] = {}
    for mine, theirs in zip(given, wanted, strict=True):
        if not mine.axes:
            continue
        if len(mine.axes) != 1:
            return None
        ((axis, stride),) = mine.axes.items()
        if stride != 1 or axis in axes:
            return None
        position = theirs.plus(_Linear(mine.constant, {}, {}), -1)
        for loop, factor in mine.loops.items():
            if loop not in loops:
                return None
            position = position.plus(loops[loop], -factor)
        axes[axis] = position
    result = []
    for index in source.index:
        linear = _Linear(index.start.constant, {}, {})
        for loop, factor in index.start.terms:
            if loop not in loops:
                return None
            linear = linear.plus(loops[loop], factor)
        for axis, stride in index.strides:
            if axis in axes:
                linear = linear.plus(axes[axis], stride)
            elif source.shape[axis] != 1:
                return None
        result.append(linear.index())
    return Access(source.buffer, read.access.shape, tuple(result), source.view_shape)


def _rewritten(
    nodes: tuple[Node, ...], dropped: set[int], replacements: dict[tuple[int, Access], Access]
) -> tuple[Node, ...]:
    position = 0

    def visit(body: tuple[Node, ...]) -> tuple[Node, ...]:
        nonlocal position
        result: list[Node] = []
        for node in body:
            if isinstance(node, Loop):
                inner = visit(node.body)
                if inner:
                    result.append(replace(node, body=inner))
                continue
            here = position
            position += 1
            if node.id not in dropped:
                result.append(_substituted(node, here, replacements))
        return tuple(result)

    return visit(nodes)


def _substituted(
    instruction: Instruction, position: int, replacements: dict[tuple[int, Access], Access]
) -> Instruction:
    def swap(operand: Operand) -> Operand:
        return replacements.get((position, operand), operand) if isinstance(operand, Access) else operand

    operands = {name: swap(operand) for name, operand in instruction.operands.items()}
    changed = any(operands[name] is not operand for name, operand in instruction.operands.items())
    return replace(instruction, operands=operands) if changed else instruction
