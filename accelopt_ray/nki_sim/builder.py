"""The program under construction, from the first buffer of a trace to the finished program.

Instructions stay mutable until :meth:`Builder.finish`, because assigning a fresh result into a tensor names its
destination instead of copying it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Union

from accelopt_ray.nki_sim import errors
from accelopt_ray.nki_sim.freeze import Freezer
from accelopt_ray.nki_sim.loop_variables import LoopVariable, Site
from accelopt_ray.nki_sim.program import (
    Buffer,
    Engine,
    LoopKind,
    Opcode,
    Program,
    Role,
    Space,
)
from accelopt_ray.nki_sim.symbolic import Index
from accelopt_ray.nki_sim.trace_records import LoopRecord, Naming, Record, Scope, TracedBuffer

if TYPE_CHECKING:
    from accelopt_ray.nki_sim.tile import Tensor

#: Name under which the kernel's source is compiled, by which its frames are recognised.
KERNEL_FILENAME = "<nki kernel>"

#: Instructions that one trace may hold; unrolled loops reach it first.
MAX_INSTRUCTIONS = 200_000

_PLACEMENT_COMPUTE = frozenset({Space.SBUF, Space.PSUM})


class Builder:
    """Collects what one execution of the kernel function does.

    Args:
        target: Hardware generation: ``trn1``, ``trn2`` or ``trn3``.
        concrete_sites: Loops that must be unrolled, by their site.
        names: Source line to the name that a simple assignment on it binds.
    """

    def __init__(self, target: str, concrete_sites: frozenset[Site], names: Mapping[int, str]) -> None:
        self.target = target
        self.concrete_sites = concrete_sites
        self.names = names
        self.buffers: list[TracedBuffer] = []
        self.root: list[Union[Record, LoopRecord]] = []
        self.body = self.root
        self.loops: list[LoopVariable] = []
        self.scopes: list[Scope] = []
        self.grid: tuple[LoopVariable, ...] = ()
        self.grid_indices: tuple[Any, ...] = ()
        self.grid_shape: tuple[int, ...] = ()
        self.entry_code: Any = None
        self.pending: set[Site] = set()
        self.allocated_kernel = False
        self._sequence = 0
        self._loop_ids = 0
        self._last_named: tuple[TracedBuffer, int] | None = None

    # Where the kernel is.

    def frame(self) -> FrameType | None:
        """The innermost frame of the kernel's own code."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename != KERNEL_FILENAME:
            frame = frame.f_back
        return frame

    def line(self) -> int:
        """The source line being traced."""
        frame = self.frame()
        return frame.f_lineno if frame is not None else 0

    # Buffers.

    def new_buffer(
        self,
        space: Space,
        shape: tuple[int, ...],
        dtype: str,
        *,
        role: Role = Role.TEMPORARY,
        name: str = "",
        block_dims: int = 0,
        fill: float | None = None,
        outside: Sequence[LoopVariable] = (),
    ) -> TracedBuffer:
        """Creates a buffer in the current scope, or outside of the loops ``outside``."""
        frame = self.frame()
        line, offset = (frame.f_lineno, frame.f_lasti) if frame is not None else (0, 0)
        statement = self.names.get(line, "")
        if statement and self._last_named is not None:
            # An argument of the call that makes this buffer was made first and took the statement's name.
            earlier, made_at = self._last_named
            if earlier.line == line and earlier.name == statement and made_at < offset:
                earlier.name = earlier.given_name or f"t{earlier.id}"
        loops = tuple(loop for loop in self.loops if loop not in outside)
        scopes = tuple(self.scopes)
        if outside:
            keep = next((i for i, loop in enumerate(self.loops) if loop in outside), len(self.loops))
            scopes = tuple(scope for scope in scopes if scope.depth < keep)
        buffer = TracedBuffer(
            id=len(self.buffers),
            name=statement or name or f"t{len(self.buffers)}",
            given_name=name,
            space=space,
            shape=shape,
            dtype=dtype,
            role=role,
            block_dims=block_dims,
            loops=loops,
            scopes=scopes,
            fill=fill,
            line=line,
        )
        self.buffers.append(buffer)
        self._last_named = (buffer, offset)
        return buffer

    # Loops.

    def open_loop(self, trips: int, kind: LoopKind, site: Site, name: str) -> tuple[LoopVariable, Any]:
        """Starts a symbolic loop; returns its variable and a token for :meth:`close_loop`."""
        variable = LoopVariable(self._loop_ids, trips, kind, site, name)
        self._loop_ids += 1
        record = LoopRecord(variable, self.line())
        self.body.append(record)
        outer = self.body
        self.body = record.body
        scope = self.push_scope()
        self.loops.append(variable)
        return variable, (outer, scope)

    def close_loop(self, variable: LoopVariable, token: Any) -> None:
        """Ends the body of a symbolic loop."""
        outer, scope = token
        while self.loops:
            inner = self.loops.pop()
            inner.open = False
            if inner is variable:
                break
        self.pop_scope(scope)
        self.body = outer

    def push_scope(self) -> Scope:
        """Opens a scope for tensors."""
        scope = Scope(len(self.loops))
        self.scopes.append(scope)
        return scope

    def pop_scope(self, scope: Scope) -> None:
        """Closes a scope and all scopes within it."""
        while self.scopes:
            inner = self.scopes.pop()
            inner.open = False
            if inner is scope:
                break

    # Instructions.

    def emit(
        self,
        opcode: Opcode,
        engine: Engine,
        outputs: list[Tensor],
        operands: Mapping[str, Union[Tensor, float, int]],
        attributes: Mapping[str, Any] | None = None,
        mask: Sequence[Index] = (),
    ) -> Record:
        """Appends an instruction; its operands stop being fresh."""
        if self._sequence >= MAX_INSTRUCTIONS:
            raise errors.compile_error(
                f"the kernel unrolls into more than {MAX_INSTRUCTIONS} instructions; use nl.affine_range or fewer "
                "iterations of unrolled loops"
            )
        record = Record(
            opcode,
            engine,
            outputs,
            dict(operands),
            dict(attributes or {}),
            list(mask),
            self.line(),
            self._sequence,
            self.body,
        )
        for value in record.operands.values():
            if not isinstance(value, (int, float)):
                if value.buffer.naming is not None:
                    self._take_back(value.buffer)
                self.touch(value, record)
                value.buffer.producer = None
        for output in outputs:
            self.touch(output, record)
            output.buffer.written = True
        for term in record.mask:
            _check_loops(term)
        self._sequence += 1
        self.body.append(record)
        return record

    def touch(self, tensor: Tensor, record: Record) -> None:
        """Notes a use of a tensor, after checking that its scope is still open."""
        self.check_scope(tensor)
        tensor.buffer.last_touch = record.sequence

    def check_scope(self, tensor: Tensor) -> None:
        """Raises when a tensor, or a loop index that its access uses, is out of scope."""
        for scope in tensor.buffer.scopes:
            if not scope.open:
                raise errors.local_variable_out_of_scope(tensor.buffer.name)
        for dim in tensor.dims:
            _check_loops(dim)

    def can_name(self, value: Tensor, destination: Tensor) -> bool:
        """Whether assigning ``value`` to ``destination`` may rename the result of the instruction that made it."""
        record = value.buffer.producer
        if record is None or not value.is_whole() or value.shape != destination.shape or value.indirect:
            return False
        if record.body is not self.body:
            return False
        if destination.buffer is value.buffer or destination.buffer.last_touch > record.sequence:
            return False
        if record.explicit_dtype and value.buffer.dtype != destination.buffer.dtype:
            return False
        space = destination.buffer.space
        if record.opcode is Opcode.MATMUL or (record.opcode is Opcode.TRANSPOSE and record.engine is Engine.TENSOR):
            return space is Space.PSUM
        if record.engine in (Engine.DMA, Engine.GPSIMD):
            return space is Space.SBUF
        return space in _PLACEMENT_COMPUTE

    def rename(self, value: Tensor, destination: Tensor) -> Record:
        """Lets the instruction that made ``value`` write ``destination`` instead."""
        record = value.buffer.producer
        assert record is not None
        record.outputs[0] = destination
        value.buffer.producer = None
        value.buffer.naming = Naming(record, value, destination, self.body[-1])
        self.touch(destination, record)
        destination.buffer.written = True
        return record

    def _take_back(self, buffer: TracedBuffer) -> None:
        """Copies after all: the kernel goes on using a result that was assigned elsewhere."""
        naming = buffer.naming
        assert naming is not None
        buffer.naming = None
        record, value, destination = naming.record, naming.value, naming.destination

        def extra(
            opcode: Opcode, out: Tensor, operands: dict[str, Union[Tensor, float, int]], **attributes: Any
        ) -> Record:
            return Record(
                opcode,
                Engine.ANY,
                [out],
                operands,
                attributes,
                list(record.mask),
                record.line,
                record.sequence,
                record.body,
            )

        if record.accumulate:  # the addition that PSUM would have done; one of its operands must leave PSUM
            moved = self.new_buffer(Space.SBUF, value.shape, value.buffer.dtype)
            moved.name, moved.loops, moved.scopes = f"t{moved.id}", value.buffer.loops, value.buffer.scopes
            tile = type(value)(moved, value.shape)
            added = [
                extra(Opcode.COPY, tile, {"src": value}),
                extra(Opcode.TENSOR_TENSOR, destination, {"a": destination, "b": tile}, op="add"),
            ]
        else:
            added = [extra(Opcode.COPY, destination, {"src": value})]
        record.outputs[0] = value
        record.accumulate = False
        position = record.body.index(naming.after) + 1
        record.body[position:position] = added

    def check_output_dependencies(self, destination: Tensor) -> None:
        """Raises when iterations of a parallel loop around here would all write the same place."""
        buffer = destination.buffer
        if buffer.space is Space.HBM and self.grid:
            parallel: Sequence[LoopVariable] = [loop for loop in self.loops if loop not in self.grid]
        else:
            parallel = self.loops
        for loop in parallel:
            if loop.kind is not LoopKind.AFFINE or loop.trips <= 1 or loop in buffer.loops:
                continue
            if not any(dim.terms.get(loop) for dim in destination.dims) and not destination.indirect:
                raise errors.unexpected_output_dependencies(loop.name, f"{buffer.name}{destination.index_text()}")

    # The result.

    def finish(self, inputs: Sequence[TracedBuffer], outputs: Sequence[Tensor]) -> Program:
        """Turns the trace into plain data."""
        used: set[int] = {buffer.id for buffer in inputs}
        reshaped: dict[int, tuple[int, ...]] = {}
        for tensor in outputs:
            used.add(tensor.buffer.id)
            if tensor.buffer.role is not Role.INPUT:
                tensor.buffer.role = Role.OUTPUT
                reshaped[tensor.buffer.id] = tensor.shape
        freeze = Freezer(used)
        body = freeze.nodes(self.root)
        buffers = {
            buffer.id: Buffer(
                id=buffer.id,
                name=buffer.name,
                space=buffer.space,
                shape=reshaped.get(buffer.id, buffer.shape),
                dtype=buffer.dtype,
                role=buffer.role,
                block_dims=buffer.block_dims,
                loops=tuple(loop.id for loop in buffer.loops),
                fill=buffer.fill,
                line=buffer.line,
            )
            for buffer in self.buffers
            if buffer.id in used
        }
        constants = {
            buffer.id: buffer.constant for buffer in self.buffers if buffer.constant is not None and buffer.id in used
        }
        return Program(
            buffers=buffers,
            inputs=tuple(buffer.id for buffer in inputs),
            outputs=tuple(tensor.buffer.id for tensor in outputs),
            body=body,
            constants=constants,
            target=self.target,
        )


def _check_loops(index: Index) -> None:
    for loop in index.terms:
        if not loop.open:
            raise errors.local_variable_out_of_scope(loop.name)


_active: list[Builder] = []


def activate(builder: Builder) -> None:
    """Makes ``builder`` the one that API calls write to."""
    _active.append(builder)


def deactivate(builder: Builder) -> None:
    """Ends :func:`activate`."""
    _active.remove(builder)


def current() -> Builder:
    """The builder of the kernel being traced.

    Raises:
        KernelError: Outside of a kernel.
    """
    if not _active:
        raise errors.outside_of_kernel()
    return _active[-1]


def is_tracing() -> bool:
    """Whether a kernel is being traced."""
    return bool(_active)
