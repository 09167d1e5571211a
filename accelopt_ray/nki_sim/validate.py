"""Re-checks a program as plain data: the hardware's limits, bounds, memory spaces, operands, scopes.

The process that traced a kernel executed the kernel's own code and may have been tampered with. Whoever executes or
prices a program calls :func:`validate` first; after it, no index of the program addresses anything outside its buffer
for any loop values, every loop is finite, and every instruction has the operands and shapes that its rule needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from accelopt_ray.nki_sim import bounds, dtypes, errors, operators
from accelopt_ray.nki_sim.bounds import Linear, Variable
from accelopt_ray.nki_sim.instruction_rules import RULES, Rule
from accelopt_ray.nki_sim.operand_shapes import OperandShapes
from accelopt_ray.nki_sim.program import (
    Access,
    Affine,
    Buffer,
    DimIndex,
    Engine,
    Instruction,
    Loop,
    MaskTerm,
    Node,
    Opcode,
    Program,
    Role,
    Space,
)

#: Bytes that all constants of a program may have together.
MAX_CONSTANT_BYTES = 64 << 20
#: Bytes that all HBM tensors may have together: one core's share of the device's memory.
MAX_HBM_BYTES = 16 << 30
#: Instructions that an execution may run, all iterations counted.
MAX_DYNAMIC_INSTRUCTIONS = 100_000_000
#: Instructions that a program may hold.
MAX_INSTRUCTIONS = 200_000

_PARTITIONS = 128
_TARGETS = ("trn1", "trn2", "trn3")

_OPS: dict[str, frozenset[str]] = {
    "op0": operators.ALU_OPS,
    "op1": operators.ALU_OPS,
    "reduce_op": operators.REDUCE_OPS,
    "comp_op0": operators.COMPARISON_OPS,
    "comp_op1": operators.COMPARISON_OPS,
}


def validate(program: Program) -> None:
    """Checks a program.

    Raises:
        KernelError: In the compiler's wording where the compiler has one.
    """
    _Validator(program).run()


class _Validator:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._extents: dict[Variable, int] = {}
        self._open: dict[int, int] = {}
        self._trips: dict[int, int] = {}
        self._written: set[int] = set()
        self._instructions = 0
        self._dynamic = 0
        self._line = 0
        self._known: dict[tuple[int, int, tuple[int, ...]], bool] = {}
        self._shapes = OperandShapes(program, self._broken, self._check_mask)

    def run(self) -> None:
        program = self._program
        if program.target not in _TARGETS:
            raise self._broken(f"unknown target '{program.target}'")
        self._check_buffers()
        self._check_constants()
        self._walk(program.body, 1)
        for identifier in program.outputs:
            buffer = program.buffers[identifier]
            if identifier not in self._written and buffer.role is not Role.INPUT:
                raise errors.output_not_written(buffer.name)

    def _broken(self, reason: str) -> errors.KernelError:
        """A program that the tracer never writes."""
        return errors.compile_error(f"malformed program: {reason}", line=self._line)

    # Buffers.

    def _check_buffers(self) -> None:
        program = self._program
        total = 0
        for identifier, buffer in program.buffers.items():
            self._line = buffer.line
            if identifier != buffer.id:
                raise self._broken(f"buffer {identifier} calls itself {buffer.id}")
            if buffer.dtype not in dtypes.NAMES:
                raise self._broken(f"buffer '{buffer.name}' has the unknown dtype '{buffer.dtype}'")
            if any(size <= 0 for size in buffer.shape):
                raise self._broken(f"buffer '{buffer.name}' has shape {buffer.shape}")
            if buffer.space is Space.HBM:
                total += prod(buffer.shape) * dtypes.itemsize(buffer.dtype)
                if buffer.block_dims or buffer.fill is not None:
                    raise self._broken(f"HBM tensor '{buffer.name}' has block dimensions or a fill value")
            else:
                self._check_on_chip(buffer)
        self._line = 0
        if total > MAX_HBM_BYTES:
            raise errors.compile_error(
                f"the kernel's HBM tensors take {total} bytes, more than the {MAX_HBM_BYTES} bytes of one core"
            )
        for identifier in (*program.inputs, *program.outputs):
            owner = program.buffers.get(identifier)
            if owner is None or owner.space is not Space.HBM:
                raise self._broken(f"argument or result {identifier} is no HBM tensor")
        if len(set(program.outputs)) != len(program.outputs) or not program.outputs:
            raise self._broken("results must be different tensors, at least one")
        for identifier in program.inputs:
            if program.buffers[identifier].role is not Role.INPUT:
                raise self._broken(f"argument {identifier} is no input")

    def _check_on_chip(self, buffer: Buffer) -> None:
        rank = len(buffer.shape)
        if not 0 <= buffer.block_dims <= rank - 2:
            raise self._broken(f"buffer '{buffer.name}' has {buffer.block_dims} block dimensions of {rank}")
        if buffer.role is not Role.TEMPORARY:
            raise self._broken(f"buffer '{buffer.name}' on chip is an argument, a result or a constant")
        partitions = buffer.shape[buffer.block_dims]
        if partitions > _PARTITIONS:
            raise errors.partitions_exceed_limit(partitions)

    def _check_constants(self) -> None:
        program = self._program
        total = 0
        for identifier, values in program.constants.items():
            buffer = program.buffers.get(identifier)
            if buffer is None or buffer.role is not Role.CONSTANT or tuple(values.shape) != buffer.shape:
                raise self._broken(f"constant {identifier} has no buffer of its shape")
            if values.dtype != dtypes.storage(buffer.dtype):
                raise self._broken(f"constant '{buffer.name}' is not of its dtype")
            total += values.nbytes
        if total > MAX_CONSTANT_BYTES:
            raise errors.compile_error(f"constants take {total} bytes, more than {MAX_CONSTANT_BYTES}")
        for buffer in program.buffers.values():
            if (buffer.role is Role.CONSTANT) != (buffer.id in program.constants):
                raise self._broken(f"constant '{buffer.name}' has no values")

    # The loop nest.

    def _walk(self, nodes: Sequence[Node], times: int) -> None:
        for node in nodes:
            self._line = node.line
            if isinstance(node, Loop):
                if node.id in self._trips or node.trips < 1:
                    raise self._broken(f"loop {node.id} appears twice or has {node.trips} iterations")
                self._trips[node.id] = node.trips
                self._open[node.id] = node.trips
                self._extents[0, node.id] = node.trips
                self._walk(node.body, times * node.trips)
                del self._open[node.id]
                continue
            self._instructions += 1
            self._dynamic += times
            if self._instructions > MAX_INSTRUCTIONS or self._dynamic > MAX_DYNAMIC_INSTRUCTIONS:
                raise errors.compile_error(
                    f"the kernel has more than {MAX_INSTRUCTIONS} instructions or runs more than "
                    f"{MAX_DYNAMIC_INSTRUCTIONS}",
                    line=node.line,
                )
            try:
                self._check_instruction(node)
            except errors.KernelError as error:
                error.line = error.line or node.line
                raise

    def _check_instruction(self, node: Instruction) -> None:
        rule = RULES.get(node.opcode)
        if rule is None:
            raise self._broken(f"no rule for '{node.opcode}'")
        if not 1 <= len(node.outputs) <= rule.outputs:
            raise self._broken(f"'{node.opcode}' has {len(node.outputs)} outputs")
        if node.engine not in rule.engines:
            raise errors.op_not_supported(f"{node.engine} engine", str(node.opcode))
        self._check_attributes(node, rule)
        for output in node.outputs:
            self._check_access(output, "out", node, rule.output, writes=True)
            self._written.add(output.buffer)
        for name in node.operands:
            if name not in rule.operands:
                raise self._broken(f"'{node.opcode}' has an unknown operand '{name}'")
        for name, spaces in rule.operands.items():
            value = node.operands.get(name)
            if value is None:
                if name not in rule.optional:
                    raise self._broken(f"'{node.opcode}' lacks operand '{name}'")
            elif isinstance(value, Access):
                self._check_access(value, name, node, spaces)
            elif name not in rule.numbers:
                raise self._broken(f"operand '{name}' of '{node.opcode}' must be a tile")
        self._shapes.check(node, rule)
        self._check_mask(node.mask, node.outputs[0].shape)
        self._check_bounds(node)

    def _check_attributes(self, node: Instruction, rule: Rule) -> None:
        for name in rule.attributes:
            if name not in node.attributes:
                raise self._broken(f"'{node.opcode}' lacks attribute '{name}'")
        for name, value in node.attributes.items():
            allowed = _OPS.get(name)
            if name == "op":
                allowed = {Opcode.ACTIVATION: operators.ACTIVATION_OPS, Opcode.TENSOR_TENSOR: operators.ALU_OPS}.get(
                    node.opcode, operators.REDUCE_OPS
                )
            if allowed is not None and value not in allowed:
                raise self._broken(f"'{node.opcode}' has {name} {value!r}")
            for affine in _affines(value):
                self._check_terms(affine)
        loops = node.attributes.get("loops", ())
        if not isinstance(loops, tuple) or any(loop not in self._open for loop in loops):
            raise self._broken(f"'{node.opcode}' reduces over loops that are not around it")

    # Accesses.

    def _check_access(
        self, access: Access, name: str, node: Instruction, spaces: frozenset[Space], *, writes: bool = False
    ) -> None:
        buffer = self._program.buffers.get(access.buffer)
        if buffer is None:
            raise self._broken(f"'{node.opcode}' uses the unknown buffer {access.buffer}")
        if buffer.space not in spaces:
            expected = "|".join(sorted(str(space) for space in spaces))
            raise errors.unsupported_memory(name, str(node.opcode), expected, str(buffer.space))
        if writes and buffer.role is Role.CONSTANT:
            raise errors.immutable_parameter(buffer.name)
        if writes and buffer.role is Role.INPUT and buffer.id not in self._program.outputs:
            raise errors.immutable_parameter(buffer.name)
        if any(loop not in self._open for loop in buffer.loops):
            raise errors.local_variable_out_of_scope(buffer.name)
        if not access.shape or any(size <= 0 for size in access.shape):
            raise self._broken(f"a tile of '{buffer.name}' has shape {access.shape}")
        if prod(access.view_shape) != prod(buffer.shape) or any(size <= 0 for size in access.view_shape):
            raise self._broken(f"'{buffer.name}' of shape {buffer.shape} is viewed as {access.view_shape}")
        if len(access.index) != len(access.view_shape):
            raise self._broken(
                f"'{buffer.name}' is indexed in {len(access.index)} of {len(access.view_shape)} dimensions"
            )
        for dim in access.index:
            self._check_dim(dim, access, buffer, node)
        if buffer.space is not Space.HBM:
            self._check_tile(access, buffer, node)

    def _check_dim(self, dim: DimIndex, access: Access, buffer: Buffer, node: Instruction) -> None:
        rank = len(access.shape)
        self._check_terms(dim.start)
        for axis, _ in dim.strides:
            if not 0 <= axis < rank:
                raise self._broken(f"'{buffer.name}' is indexed by axis {axis} of a tile of rank {rank}")
        for axis, table in dim.tables:
            if not 0 <= axis < rank or len(table) != access.shape[axis]:
                raise self._broken(f"'{buffer.name}' is indexed by a table of the wrong length")
        if dim.indirect is not None:
            if buffer.space is not Space.HBM or node.engine is not Engine.DMA:
                raise errors.indirect_index_not_allowed(buffer.name)
            if dim.indirect.index and any(inner.indirect is not None for inner in dim.indirect.index):
                raise self._broken("an index tile is itself indexed indirectly")
            if len(dim.indirect.shape) != rank or any(
                inner not in (1, outer) for inner, outer in zip(dim.indirect.shape, access.shape, strict=True)
            ):
                raise self._broken("an index tile does not fit the tile it indexes")
            self._check_access(dim.indirect, "index", node, frozenset({Space.SBUF}))

    def _check_terms(self, affine: Affine) -> None:
        for loop, _ in affine.terms:
            if loop not in self._open:
                raise self._broken(f"loop {loop} is used outside of its body")

    def _check_tile(self, access: Access, buffer: Buffer, node: Instruction) -> None:
        partition = buffer.block_dims
        if access.view_shape[: partition + 1] != buffer.shape[: partition + 1]:
            raise self._broken(f"'{buffer.name}' is viewed across partitions")
        if len(access.shape) < 2:
            raise errors.failed_to_infer_tile(buffer.name)
        if access.shape[0] > _PARTITIONS:
            raise errors.partitions_exceed_limit(access.shape[0])
        for position, dim in enumerate(access.index):
            axes = {axis for axis, stride in dim.strides if stride} | {axis for axis, _ in dim.tables}
            wrong = axes - {0} if position == partition else axes & {0}
            if wrong and not (position != partition and access.shape[0] == 1):
                raise errors.failed_to_infer_tile(buffer.name)
        index = access.index[partition]
        if access.shape[0] > 1 and (index.tables or dict(index.strides).get(0) != 1):
            raise errors.compile_error(
                f"tile of tensor `{buffer.name}` must use contiguous partitions, one after the other"
            )
        if node.engine is not Engine.DMA:
            self._check_start_partition(access, index)

    def _check_start_partition(self, access: Access, index: DimIndex) -> None:
        """Engines reach partitions from fixed starting points: 0, multiples of 64, multiples of 32, by size."""
        size = access.shape[0]
        step = 32 if size <= 32 else 64 if size <= 64 else 128
        if index.start.constant % step == 0 and all(value % step == 0 for _, value in index.start.terms):
            return
        low, _ = bounds.extremes(Linear(index.start.constant, bounds.linear_affine(index.start)), self._extents)
        start = next(
            (value for value in (low, *(low + coefficient for _, coefficient in index.start.terms)) if value % step),
            low,
        )
        raise errors.compile_error(f"Invalid access of {size} partitions starting at partition {start}")

    # Masks and bounds.

    def _check_mask(self, terms: Sequence[object], shape: tuple[int, ...]) -> None:
        for term in terms:
            if not isinstance(term, MaskTerm):
                raise self._broken("a mask is no condition")
            self._check_terms(term.start)
            if any(not 0 <= axis < len(shape) for axis, _ in term.strides):
                raise self._broken(f"a mask uses an axis that a tile of shape {shape} does not have")

    def _check_bounds(self, node: Instruction) -> None:
        for output in node.outputs:
            self._stay_inside(output, node, {axis: axis for axis in range(len(node.outputs[0].shape))}, ())
        for name, value in node.operands.items():
            if isinstance(value, Access):
                axes, own = self._axis_map(node, name, value)
                self._stay_inside(value, node, axes, own)

    def _axis_map(self, node: Instruction, name: str, operand: Access) -> tuple[dict[int, int], tuple[MaskTerm, ...]]:
        """Which axis of the operand runs with each axis of the output, and masks over the operand's own axes."""
        if node.opcode is Opcode.MATMUL:
            contraction = node.attributes.get("contraction_mask", ())
            own = (
                tuple(term for term in contraction if isinstance(term, MaskTerm))
                if isinstance(contraction, tuple)
                else ()
            )
            return ({0: 1} if name == "stationary" else {1: 1}), own
        if node.opcode is Opcode.TRANSPOSE:
            return {0: 1, 1: 0}, ()
        if node.opcode is Opcode.TENSOR_REDUCE:
            axes = node.attributes["axes"]
            assert isinstance(axes, tuple)
            own = _mask_attribute(node, "input_mask")
            rank = len(operand.shape)
            if len(node.outputs[0].shape) == rank:
                return {axis: axis for axis in range(rank) if axis not in axes}, own
            kept = [axis for axis in range(rank) if axis not in axes]
            return dict(enumerate(kept)), own
        if node.opcode in (Opcode.PARTITION_REDUCE, Opcode.PARTITION_BROADCAST):
            own = _mask_attribute(node, "input_mask")
            return {axis: axis for axis in range(1, len(operand.shape))}, own
        if len(operand.shape) != len(node.outputs[0].shape):
            return {0: 0}, ()
        return {axis: axis for axis in range(len(operand.shape))}, ()

    def _stay_inside(self, access: Access, node: Instruction, axes: Mapping[int, int], own: Sequence[MaskTerm]) -> None:
        buffer = self._program.buffers[access.buffer]
        for position, dim in enumerate(access.index):
            size = access.view_shape[position]
            key = (id(dim), size, access.shape)
            if self._known.get(key):
                continue
            expression = bounds.linear_dim(dim)
            extents = self._axis_extents(access.shape)
            low, high = bounds.extremes(expression, extents)
            if low >= 0 and high < size:
                self._known[key] = True
                continue
            masks = [bounds.linear_mask(term, axes) for term in node.mask]
            masks += [bounds.linear_mask(term, {a: a for a in range(len(access.shape))}) for term in own]
            for axis, extent in enumerate(node.outputs[0].shape):
                extents[1, -1 - axis] = extent
            if dim.indirect is not None:
                low, high = max(low, 0), min(high, size - 1)
            if not bounds.stays_below(expression, size - 1, masks, extents) or not bounds.stays_above(
                expression, 0, masks, extents
            ):
                raise errors.out_of_bound(buffer.name, position, low, high, size)
            if dim.indirect is not None:
                self._stay_inside(dim.indirect, node, {0: 0}, ())

    def _axis_extents(self, shape: tuple[int, ...]) -> dict[Variable, int]:
        extents = dict(self._extents)
        for axis, extent in enumerate(shape):
            extents[1, axis] = extent
        return extents


def _mask_attribute(node: Instruction, name: str) -> tuple[MaskTerm, ...]:
    value = node.attributes.get(name, ())
    return tuple(term for term in value if isinstance(term, MaskTerm)) if isinstance(value, tuple) else ()


def _affines(value: object) -> Sequence[Affine]:
    if isinstance(value, Affine):
        return (value,)
    if isinstance(value, MaskTerm):
        return (value.start,)
    if isinstance(value, tuple):
        return [term.start for term in value if isinstance(term, MaskTerm)]
    return ()
