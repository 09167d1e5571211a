"""Runs a traced program on arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.dtypes import storage
from accelopt_ray.nki_sim.numerics import rules_elementwise, rules_special, rules_tensor
from accelopt_ray.nki_sim.numerics.blas import Products
from accelopt_ray.nki_sim.numerics.casts import cast
from accelopt_ray.nki_sim.numerics.coverage import Initialisation, plan_initialisation
from accelopt_ray.nki_sim.numerics.dependence import Batching, choose_batched_loops
from accelopt_ray.nki_sim.numerics.errors import NumericsError
from accelopt_ray.nki_sim.numerics.geometry import Nest, Statement
from accelopt_ray.nki_sim.numerics.layout import plan_storage
from accelopt_ray.nki_sim.numerics.masks import evaluate
from accelopt_ray.nki_sim.numerics.memory import Memory
from accelopt_ray.nki_sim.numerics.site import Plan, Site, Step
from accelopt_ray.nki_sim.program import Access, Buffer, Instruction, Loop, MaskTerm, Node, Opcode, Program, Role
from accelopt_ray.outcome import EvaluationOutcome

Array = NDArray[Any]


class Guard(Protocol):
    """Says which iterations are wanted."""

    def statement_test(self, instruction: int, indices: dict[int, int]) -> Callable[[], bool] | None:
        """Returns a test of whether the current iteration wants the instruction; None when all do."""

    def loop_test(self, loop: Loop, indices: dict[int, int]) -> Callable[[], bool] | None:
        """Returns a test of whether the current iteration wants anything of the loop's body; None when all do."""


_RULES: dict[Opcode, Callable[[Site], Step]] = {
    Opcode.LOAD: rules_elementwise.move,
    Opcode.STORE: rules_elementwise.move,
    Opcode.DMA_COPY: rules_elementwise.move,
    Opcode.COPY: rules_elementwise.move,
    Opcode.PARTITION_BROADCAST: rules_elementwise.move,
    Opcode.ACTIVATION: rules_elementwise.activation,
    Opcode.TENSOR_TENSOR: rules_elementwise.tensor_tensor,
    Opcode.TENSOR_SCALAR: rules_elementwise.tensor_scalar,
    Opcode.TENSOR_SCALAR_REDUCE: rules_elementwise.tensor_scalar,
    Opcode.SCALAR_TENSOR_TENSOR: rules_elementwise.tensor_scalar,
    Opcode.RECIPROCAL: rules_elementwise.reciprocal,
    Opcode.MEMSET: rules_elementwise.memset,
    Opcode.IOTA: rules_elementwise.iota,
    Opcode.SELECT: rules_elementwise.select,
    Opcode.AFFINE_SELECT: rules_elementwise.affine_select,
    Opcode.COPY_PREDICATED: rules_elementwise.copy_predicated,
    Opcode.MATMUL: rules_tensor.matmul,
    Opcode.TRANSPOSE: rules_tensor.transpose,
    Opcode.TENSOR_REDUCE: rules_tensor.tensor_reduce,
    Opcode.PARTITION_REDUCE: rules_tensor.partition_reduce,
    Opcode.LOOP_REDUCE: rules_tensor.loop_reduce,
    Opcode.SCAN: rules_tensor.scan,
    **rules_special.RULES,
}


class Executable:
    """A program made ready to run on given arrays.

    Args:
        program: The program.
        inputs: One array or number per kernel argument.
        outputs: Arrays to write the results to, one per result, or None to allocate them.
        batching: Which loops run batched; chosen for speed when omitted.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[Array | float | int],
        outputs: Sequence[Array] | None,
        nest: Nest | None = None,
        batching: Batching | None = None,
    ):
        self.program = program
        self.nest = Nest(program) if nest is None else nest
        self.batching = choose_batched_loops(self.nest) if batching is None else batching
        storages = plan_storage(self.nest, self.batching.loops)
        self.memory = Memory(storages)
        initialisations = {
            identity: plan_initialisation(identity, storages[identity].scope, self.nest)
            for identity in program.buffers
            if self.nest.touches[identity]
        }
        self.plan = Plan(self.nest, storages, initialisations, self.memory, Products())
        self.results = self._attach(inputs, outputs)

    def _attach(self, inputs: Sequence[Array | float | int], outputs: Sequence[Array] | None) -> list[Array]:
        program = self.program
        arrays = [value for value in inputs if isinstance(value, np.ndarray)]
        if len(arrays) != len(program.inputs):
            raise NumericsError(f"the kernel takes {len(program.inputs)} tensors, got {len(arrays)}")
        results: dict[int, Array] = {}
        if outputs is not None:
            if len(outputs) != len(program.outputs):
                raise NumericsError(f"the kernel returns {len(program.outputs)} tensors, got {len(outputs)} to write")
            for identity, array in zip(program.outputs, outputs, strict=False):
                buffer = program.buffers[identity]
                if array.shape != buffer.shape or array.dtype != storage(buffer.dtype):
                    raise NumericsError(f"output '{buffer.name}' does not match the array to write it to")
                if not array.flags.c_contiguous:
                    raise NumericsError(f"the array for output '{buffer.name}' must be contiguous")
                results[identity] = array
        for identity, array in zip(program.inputs, arrays, strict=False):
            buffer = program.buffers[identity]
            if array.size != int(np.prod(buffer.shape)):
                raise NumericsError(f"input '{buffer.name}' has shape {array.shape}, traced with {buffer.shape}")
            values = np.ascontiguousarray(cast(array, buffer.dtype))
            is_written = any(touch.is_write for touch in self.nest.touches[identity])
            if identity in results:
                np.copyto(results[identity], values.reshape(buffer.shape))
                values = results[identity]
            elif is_written or identity in program.outputs:
                values = values.copy()
                results[identity] = values.reshape(buffer.shape)
            self.memory.attach(identity, values)
        for identity, constant in program.constants.items():
            self.memory.attach(identity, np.ascontiguousarray(cast(constant, program.buffers[identity].dtype)))
        for identity in program.outputs:
            if identity not in results:
                buffer = program.buffers[identity]
                results[identity] = np.empty(buffer.shape, storage(buffer.dtype))
            if identity not in program.inputs:
                self.memory.attach(identity, results[identity])
        return [results[identity] for identity in program.outputs]

    def run(self, guard: Guard | None = None) -> None:
        """Executes the program.

        Args:
            guard: Restricts the run to the iterations that are wanted; None runs everything.

        Raises:
            NumericsError: A fault of the kernel at run time, or something unsupported.
        """
        steps = self._prepare(self.program.body, (), guard)
        with self.plan.products.running():
            for step in [*self._fills(None), *steps]:
                step()

    def _prepare(self, nodes: Sequence[Node], batch: tuple[int, ...], guard: Guard | None) -> list[Step]:
        steps: list[Step] = []
        for node in nodes:
            if not isinstance(node, Loop):
                step = self._statement(self.nest.by_instruction[node.id], batch)
                wanted = guard.statement_test(node.id, self.memory.indices) if guard else None
                steps.append(_guarded(step, wanted))
            elif node.trips < 1:
                continue
            elif node.id in self.batching.loops:
                steps.extend(self._prepare(node.body, (*batch, node.id), guard))
            else:
                body = [*self._fills(node.id), *self._prepare(node.body, batch, guard)]
                wanted = guard.loop_test(node, self.memory.indices) if guard else None
                steps.append(_repeated(node.id, node.trips, body, self.memory.indices, wanted))
        return steps

    def _statement(self, statement: Statement, batch: tuple[int, ...]) -> Step:
        instruction = statement.instruction
        rule = _RULES.get(instruction.opcode)
        if rule is None:
            raise NumericsError(
                f"instruction '{instruction.opcode}' is not supported", instruction.line, EvaluationOutcome.UNSUPPORTED
            )
        if not instruction.outputs:
            raise NumericsError(f"instruction '{instruction.opcode}' has no output", instruction.line)
        own = tuple(loop for loop in batch if not self._iterates(statement, loop))
        site = Site(self.plan, statement, self._moving(statement, own))
        step = rule(site)
        if _gathers(instruction):  # whose indices are known, and may be wrong, only now
            step = _located(step, instruction.line)
        for loop in reversed(batch):
            if loop not in own:
                step = _repeated(loop, self.nest.trips[loop], [step], self.memory.indices, None)
        return step

    def _iterates(self, statement: Statement, loop: int) -> bool:
        """Tells whether a statement in a batched loop must still run iteration by iteration."""
        instruction = statement.instruction
        if (loop, instruction.id) not in self.batching.repeated:
            return False
        output = instruction.outputs[0]
        still = not any(factor for index in output.index for name, factor in index.start.terms if name == loop)
        if instruction.opcode is Opcode.MATMUL and instruction.accumulate and still:
            return False
        loops = instruction.attributes.get("loops")
        return not (instruction.opcode is Opcode.LOOP_REDUCE and still and isinstance(loops, tuple) and loop in loops)

    def _moving(self, statement: Statement, loops: tuple[int, ...]) -> tuple[int, ...]:
        """Drops batched loops that change nothing about the statement, unless it accumulates over them."""
        if not loops:
            return loops
        probe = Site(self.plan, statement, loops)
        tiles = [*probe.outputs, *(probe.tile(probe.access(name)) for name in _tile_operands(statement))]
        return tuple(
            loop
            for number, loop in enumerate(loops)
            if any(tile.strides[number] for tile in tiles) or (loop, statement.instruction.id) in self.batching.repeated
        )

    def _fills(self, scope: int | None) -> list[Step]:
        """Returns the steps that give buffers their initial values at the start of each iteration of ``scope``."""
        steps = []
        for identity, initialisation in self.plan.initialisations.items():
            buffer = self.program.buffers[identity]
            if buffer.role is Role.INPUT or buffer.role is Role.CONSTANT:
                continue
            if self.plan.storages[identity].scope == scope:
                step = self._fill(buffer, initialisation, scope)
                if step is not None:
                    steps.append(step)
        if scope is None:
            for identity in self.program.outputs:
                buffer = self.program.buffers[identity]
                if buffer.role is Role.OUTPUT and not self.nest.touches[identity]:
                    steps.append(lambda name=identity: self.memory.fill(name))  # type: ignore[misc]
        return steps

    def _fill(self, buffer: Buffer, initialisation: Initialisation, scope: int | None) -> Step | None:
        memory, identity = self.memory, buffer.id
        if initialisation.needed:
            return lambda: memory.fill(identity)
        if not initialisation.unless:
            return None
        outer: set[int] = set()
        for statement in self.nest.statements:
            if scope in statement.loops:
                outer = set(statement.loops[: statement.loops.index(scope) + 1])
                break
        worst = [_worst_case(term, shape, outer, self.nest.trips) for term, shape in initialisation.unless]
        indices = memory.indices

        def step() -> None:
            if any(evaluate(term.start, indices) < 0 for term in worst):
                memory.fill(identity)

        return step


def _gathers(instruction: Instruction) -> bool:
    accesses = [*instruction.outputs, *(o for o in instruction.operands.values() if isinstance(o, Access))]
    return any(index.indirect is not None for access in accesses for index in access.index)


def _located(step: Step, line: int) -> Step:
    """Gives the faults of a step the source line of its instruction."""

    def located() -> None:
        try:
            step()
        except NumericsError as error:
            raise error.at(line) from error

    return located


def _tile_operands(statement: Statement) -> list[str]:
    return [name for name, operand in statement.instruction.operands.items() if not isinstance(operand, (int, float))]


def _worst_case(term: MaskTerm, shape: tuple[int, ...], outer: set[int], trips: dict[int, int]) -> MaskTerm:
    """Returns the condition at the tile coordinates and inner iterations where it is hardest to meet."""
    start = term.start
    lowest = start.constant + sum(min(0, stride * (shape[axis] - 1)) for axis, stride in term.strides)
    lowest += sum(min(0, factor * (trips[loop] - 1)) for loop, factor in start.terms if loop not in outer)
    kept = tuple((loop, factor) for loop, factor in start.terms if loop in outer)
    return MaskTerm(type(start)(lowest, kept))


def _guarded(step: Step, wanted: Callable[[], bool] | None) -> Step:
    if wanted is None:
        return step

    def guarded() -> None:
        if wanted():
            step()

    return guarded


def _repeated(
    loop: int, trips: int, body: list[Step], indices: dict[int, int], wanted: Callable[[], bool] | None
) -> Step:
    def run() -> None:
        for index in range(trips):
            indices[loop] = index
            if wanted is None or wanted():
                for step in body:
                    step()

    return run


def run_program(
    program: Program, inputs: Sequence[Array | float | int], outputs: Sequence[Array] | None = None
) -> list[Array]:
    """Executes a traced program.

    Args:
        program: The program.
        inputs: The kernel's arguments; arrays are read in place, numbers were bound when tracing.
        outputs: Arrays to write the results to (contiguous, possibly memory-mapped), or None.

    Returns:
        The results in order. Elements that the kernel never wrote hold NaN, or 4 for integers.

    Raises:
        NumericsError: A fault of the kernel at run time, or something unsupported.
    """
    executable = Executable(program, inputs, outputs)
    executable.run()
    return executable.results
