"""Affine index arithmetic over the loops of a program."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from accelopt_ray.nki_sim.program import Access, Affine, DimIndex, Instruction, Loop, Node, Opcode, Program

#: Entry of a shuffle pattern that leaves the partition as it is.
SHUFFLE_KEEPS = 255


@dataclass(frozen=True)
class Interval:
    """An inclusive range of integers."""

    low: int
    high: int

    def __add__(self, other: Interval) -> Interval:
        return Interval(self.low + other.low, self.high + other.high)

    @staticmethod
    def multiples(step: int, count: int) -> Interval:
        """Returns the hull of ``step * i`` for ``i`` in ``range(count)``."""
        reach = step * (count - 1)
        return Interval(min(0, reach), max(0, reach))


def coefficient(affine: Affine, loop: int) -> int:
    """Returns the factor of ``loop`` in ``affine``."""
    for candidate, factor in affine.terms:
        if candidate == loop:
            return factor
    return 0


def without(affine: Affine, loops: Container[int]) -> Affine:
    """Returns ``affine`` with the terms of ``loops`` dropped."""
    if not affine.terms:
        return affine
    return Affine(affine.constant, tuple(term for term in affine.terms if term[0] not in loops))


def value_range(affine: Affine, trips: Mapping[int, int]) -> Interval:
    """Returns the hull of ``affine`` over all iterations."""
    low = high = affine.constant
    for loop, factor in affine.terms:
        reach = factor * (trips[loop] - 1)
        low, high = low + min(0, reach), high + max(0, reach)
    return Interval(low, high)


def tile_range(index: DimIndex, shape: tuple[int, ...]) -> Interval:
    """Returns the hull of what the tile axes add to an index (the start left out)."""
    low = high = 0
    for axis, stride in index.strides:
        reach = stride * (shape[axis] - 1)
        low, high = low + min(0, reach), high + max(0, reach)
    for _, table in index.tables:
        low, high = low + min(table), high + max(table)
    return Interval(low, high)


@dataclass(frozen=True)
class Statement:
    """An instruction with the loops around it.

    Attributes:
        instruction: The instruction.
        loops: Ids of the enclosing loops, outermost first.
        position: Place in program order.
    """

    instruction: Instruction
    loops: tuple[int, ...]
    position: int


@dataclass(frozen=True)
class Touch:
    """One access of one statement."""

    statement: Statement
    access: Access
    is_write: bool


def is_rewrite(instruction: Instruction) -> bool:
    """Tells whether elements of ``outputs[0]`` keep, or build on, the value they had before.

    A loop reduction does so only after its first iteration, which it begins by overwriting, and is not counted.
    """
    return (
        instruction.accumulate
        or instruction.opcode is Opcode.COPY_PREDICATED
        or instruction.attributes.get("rmw_op") is not None
        or (instruction.opcode is Opcode.STREAM_SHUFFLE and _leaves_partitions(instruction))
    )


def _leaves_partitions(instruction: Instruction) -> bool:
    pattern = instruction.attributes.get("shuffle_mask")
    return isinstance(pattern, tuple) and SHUFFLE_KEEPS in pattern


def carries_registers(instruction: Instruction) -> bool:
    """Tells whether the instruction uses or leaves partial sums in the scalar engine's registers."""
    command = instruction.attributes.get("reduce_cmd")
    return command in ("reduce", "reset") or (command == "reset_reduce" and len(instruction.outputs) < 2)


def touches(statement: Statement) -> Iterable[Touch]:
    """Yields every access of a statement: its reads, then its writes."""
    instruction = statement.instruction
    for operand in instruction.operands.values():
        if isinstance(operand, Access):
            yield Touch(statement, operand, is_write=False)
            yield from _index_reads(statement, operand)
    for number, output in enumerate(instruction.outputs):
        yield from _index_reads(statement, output)
        if number == 0 and is_rewrite(instruction):
            yield Touch(statement, output, is_write=False)
        yield Touch(statement, output, is_write=True)


def _index_reads(statement: Statement, access: Access) -> Iterable[Touch]:
    for index in access.index:
        if index.indirect is not None:
            yield Touch(statement, index.indirect, is_write=False)


class Nest:
    """The statements and loops of a program, indexed.

    Attributes:
        program: The program.
        trips: Trip count by loop id.
        loops: Loop node by id.
        statements: All statements in program order.
        touches: Accesses by buffer id, in program order.
        has_registers: Whether some instruction continues the partial sums of an earlier one.
    """

    def __init__(self, program: Program):
        self.program = program
        self.trips: dict[int, int] = {}
        self.loops: dict[int, Loop] = {}
        self.statements: list[Statement] = []
        self.by_instruction: dict[int, Statement] = {}
        self.touches: dict[int, list[Touch]] = {identity: [] for identity in program.buffers}
        self._collect(program.body, ())
        for statement in self.statements:
            for touch in touches(statement):
                self.touches[touch.access.buffer].append(touch)
        self.has_registers = any(carries_registers(statement.instruction) for statement in self.statements)

    def _collect(self, nodes: tuple[Node, ...], loops: tuple[int, ...]) -> None:
        for node in nodes:
            if isinstance(node, Loop):
                self.trips[node.id] = node.trips
                self.loops[node.id] = node
                self._collect(node.body, (*loops, node.id))
            else:
                statement = Statement(node, loops, len(self.statements))
                self.statements.append(statement)
                self.by_instruction[node.id] = statement

    def common_loops(self, buffer: int) -> tuple[int, ...]:
        """Returns the loops around every access of a buffer, outermost first."""
        entries = self.touches[buffer]
        if not entries:
            return ()
        common = entries[0].statement.loops
        for entry in entries[1:]:
            length = 0
            for mine, theirs in zip(common, entry.statement.loops, strict=False):
                if mine != theirs:
                    break
                length += 1
            common = common[:length]
        return common
