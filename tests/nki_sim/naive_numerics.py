"""A slow and obvious executor for programs of few opcodes: the yardstick for the fast one.

Every buffer has all its elements, every instance of a loop-local buffer starts anew, and every instruction runs once
per iteration on index arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from accelopt_ray.nki_sim.program import Access, Affine, Instruction, Loop, Node, Opcode, Program, Role

BINARY = {"add": np.add, "multiply": np.multiply, "maximum": np.maximum, "subtract": np.subtract}


def _value(affine: Affine, indices: dict[int, int]) -> int:
    return affine.constant + sum(factor * indices[loop] for loop, factor in affine.terms)


class Naive:
    """Runs a float32 program."""

    def __init__(self, program: Program, inputs: Sequence[np.ndarray]):
        self.program = program
        self.indices: dict[int, int] = {}
        self.instances: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
        for identity, array in zip(program.inputs, inputs, strict=True):
            self.instances[identity, ()] = array.copy()
        for identity, array in program.constants.items():
            self.instances[identity, ()] = np.array(array)
        self._run(program.body)
        self.results = [self._memory(identity) for identity in program.outputs]

    def _memory(self, identity: int) -> np.ndarray:
        buffer = self.program.buffers[identity]
        key = (identity, tuple(self.indices[loop] for loop in buffer.loops) if buffer.role is Role.TEMPORARY else ())
        if key not in self.instances:
            start = np.nan if buffer.fill is None else buffer.fill
            self.instances[key] = np.full(buffer.shape, start, np.float32)
        return self.instances[key]

    def _where(self, access: Access) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
        memory = self._memory(access.buffer).reshape(access.view_shape)
        grid = np.indices(access.shape, sparse=True)
        where = []
        for index in access.index:
            position: Any = np.full((1,) * len(access.shape), _value(index.start, self.indices))
            for axis, stride in index.strides:
                position = position + stride * grid[axis]
            for axis, table in index.tables:
                position = position + np.asarray(table)[grid[axis]]
            where.append(np.broadcast_to(position, access.shape))
        return memory, tuple(where)

    def _read(self, operand: Any) -> Any:
        if not isinstance(operand, Access):
            return np.float32(operand)
        memory, where = self._where(operand)
        return memory[where]

    def _run(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            if isinstance(node, Loop):
                for index in range(node.trips):
                    self.indices[node.id] = index
                    self._run(node.body)
                self.indices.pop(node.id, None)
            else:
                self._execute(node)

    def _execute(self, instruction: Instruction) -> None:
        operands = {name: self._read(operand) for name, operand in instruction.operands.items()}
        attributes = instruction.attributes
        memory, where = self._where(instruction.outputs[0])
        if instruction.opcode in (Opcode.LOAD, Opcode.STORE, Opcode.COPY):
            result = operands["src"]
        elif instruction.opcode is Opcode.TENSOR_TENSOR:
            result = BINARY[str(attributes["op"])](operands["a"], operands["b"])
        elif instruction.opcode is Opcode.TENSOR_SCALAR and attributes.get("op1") is None:
            result = BINARY[str(attributes["op0"])](operands["data"], operands["operand0"])
        elif instruction.opcode is Opcode.MATMUL:
            result = operands["stationary"].T @ operands["moving"]
        elif instruction.opcode is Opcode.TRANSPOSE:
            result = operands["data"].T
        elif instruction.opcode is Opcode.LOOP_REDUCE:
            loops = attributes["loops"]
            assert isinstance(loops, tuple)
            first = not any(self.indices[int(loop)] for loop in loops)  # type: ignore[arg-type]
            result = operands["data"] if first else BINARY[str(attributes["op"])](memory[where], operands["data"])
        else:
            raise NotImplementedError(instruction.opcode)
        if instruction.accumulate:
            result = memory[where] + result
        memory[where] = result
