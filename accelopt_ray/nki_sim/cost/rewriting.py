"""Program rewrites that a compiler makes before scheduling: composite instructions become what the engines run.

Each rewrite maps a program to an equivalent one in the same representation, so that the rest of the model sees only
instructions that one engine executes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from accelopt_ray.nki_sim.cost.options import ModelOptions
from accelopt_ray.nki_sim.cost.pieces import accesses_of
from accelopt_ray.nki_sim.program import (
    Access,
    Affine,
    Buffer,
    DimIndex,
    Engine,
    Instruction,
    Loop,
    LoopKind,
    Node,
    Opcode,
    Program,
    Role,
    Space,
)

PSUM_COLUMNS = 512
"""fp32 columns of one PSUM bank; the widest moving operand of one matmul."""

MERGED_TRIPS = 128
NARROW_ELEMENTS = 256
MERGED_ELEMENTS = 16384
"""A loop of at most ``MERGED_TRIPS`` iterations merges when its instructions are narrower than ``NARROW_ELEMENTS``.

Published measurements show where the line runs. An output loop of 2,048 tiny instructions costs a fixed minimum each;
split into 32 x 64 it runs ten times faster, as if both loops had become dimensions of one access pattern. A loop of 100
tiny transfers behaves like few transfers, loops of 200 and 25,600 like as many as are written.
"""


def rewrite(program: Program, options: ModelOptions) -> Program:
    """Returns the program in terms of single-engine instructions."""
    rewriter = _Rewriter(program, options)
    body = rewriter.nodes(program.body, ())
    return replace(program, buffers=rewriter.buffers, body=body)


def walk_nodes(nodes: tuple[Node, ...]) -> Iterator[Instruction]:
    """All instructions below some nodes, in program order."""
    for node in nodes:
        if isinstance(node, Loop):
            yield from walk_nodes(node.body)
        else:
            yield node


def whole_tile(buffer: int, shape: tuple[int, ...]) -> Access:
    """The access that covers a buffer without block dimensions."""
    return Access(buffer, shape, tuple(DimIndex(strides=((axis, 1),)) for axis in range(len(shape))), shape)


class _Rewriter:
    def __init__(self, program: Program, options: ModelOptions) -> None:
        self.buffers: dict[int, Buffer] = dict(program.buffers)
        self._options = options
        self._buffer_ids = itertools.count(max(program.buffers, default=0) + 1)
        loops = [loop.id for path, _ in program.walk() for loop in path]
        self._loop_ids = itertools.count(max(loops, default=0) + 1)
        self._readers: dict[int, int] = {}
        for instruction in walk_nodes(program.body):
            for access in accesses_of(instruction):
                self._readers[access.buffer] = self._readers.get(access.buffer, 0) + 1

    def nodes(self, nodes: tuple[Node, ...], loops: tuple[int, ...]) -> tuple[Node, ...]:
        result: list[Node] = []
        for node in nodes:
            if isinstance(node, Loop):
                rewritten = replace(node, body=self.nodes(node.body, (*loops, node.id)))
                merged = self._merge(rewritten) if self._options.merge_short_loops else None
                result.extend(merged if merged is not None else (rewritten,))
            else:
                result.extend(self._instruction(node, loops))
        return tuple(self._read_from_psum(_mark_late_transposes(result)))

    def _read_from_psum(self, nodes: list[Node]) -> list[Node]:
        """Lets vector instructions read a tile from PSUM that a copy has just evicted.

        A published profile counts the maxima of freshly evicted matmul results as PSUM reads. For tensor_tensor it is
        also cheaper: one operand from PSUM halves its documented cost. A copy that nobody else reads is dropped later.
        """
        if not self._options.psum_operands:
            return nodes
        evicted: dict[Access, Access] = {}
        result: list[Node] = []
        for node in nodes:
            if isinstance(node, Loop):
                evicted.clear()
                result.append(node)
                continue
            if node.opcode in _PSUM_READERS and not self._reads_psum(node):
                for name, value in node.operands.items():
                    source = evicted.get(value) if isinstance(value, Access) else None
                    if source is not None:
                        node = replace(node, operands={**node.operands, name: source})  # noqa: PLW2901
                        break
            written = {access.buffer for access in node.outputs}
            evicted = {
                copy: source
                for copy, source in evicted.items()
                if copy.buffer not in written and source.buffer not in written
            }
            copied = node.operands.get("src")
            if (
                node.opcode is Opcode.COPY
                and isinstance(copied, Access)
                and not node.mask
                and copied.shape == node.outputs[0].shape
                and self.buffers[copied.buffer].space is Space.PSUM
                and self.buffers[copied.buffer].dtype == self.buffers[node.outputs[0].buffer].dtype
            ):
                evicted[node.outputs[0]] = copied
            result.append(node)
        return self._write_to_psum(result)

    def _reads_psum(self, node: Instruction) -> bool:
        return any(
            isinstance(value, Access) and self.buffers[value.buffer].space is Space.PSUM
            for value in node.operands.values()
        )

    def _write_to_psum(self, nodes: list[Node]) -> list[Node]:
        """Places a scalar engine's result in PSUM when one tensor_tensor is all that reads it.

        That halves the documented cost of the tensor_tensor; a published optimiser kernel's profile counts such writes.
        A result wider than a bank passes through PSUM bank by bank.
        """
        producers: dict[int, Instruction] = {}
        for node in nodes:
            if isinstance(node, Loop):
                producers.clear()
                continue
            if node.opcode is Opcode.TENSOR_TENSOR and not self._reads_psum(node):
                for value in node.operands.values():
                    if isinstance(value, Access) and value.buffer in producers:
                        self.buffers[value.buffer] = replace(self.buffers[value.buffer], space=Space.PSUM)
                        break
            out = node.outputs[0]
            producers.pop(out.buffer, None)
            if (
                node.opcode in (Opcode.ACTIVATION, Opcode.TENSOR_SCALAR)
                and node.engine in (Engine.SCALAR, Engine.ANY)
                and len(node.outputs) == 1
                and self._readers[out.buffer] == 2  # one write, one read
                and self.buffers[out.buffer].space is Space.SBUF
                and self.buffers[out.buffer].dtype == "float32"
                and math.prod(out.shape[1:]) > 1
            ):
                producers[out.buffer] = node
        return nodes

    def _temporary(self, space: Space, shape: tuple[int, ...], dtype: str, loops: tuple[int, ...], name: str) -> Buffer:
        buffer = Buffer(next(self._buffer_ids), name, space, shape, dtype, Role.TEMPORARY, loops=loops)
        self.buffers[buffer.id] = buffer
        return buffer

    def _instruction(self, node: Instruction, loops: tuple[int, ...]) -> list[Node]:
        match node.opcode:
            case Opcode.PARTITION_BROADCAST:
                return self._broadcast(node, loops)
            case Opcode.TRANSPOSE:
                return self._transpose(node, loops)
            case Opcode.LOAD:
                return self._transposing_load(node, loops)
            case Opcode.STORE:
                return self._psum_store(node, loops)
            case _:
                return [node]

    def _broadcast(self, node: Instruction, loops: tuple[int, ...]) -> list[Node]:
        """A broadcast over partitions is a matmul with a stationary vector of ones, evicted by the scalar engine."""
        out, source = node.outputs[0], node.operands["src"]
        if not isinstance(source, Access) or math.prod(source.shape[1:]) != math.prod(out.shape[1:]):
            return [node]
        if self.buffers[out.buffer].space is Space.PSUM or len(out.shape) != 2 or out.shape != self._plain(out):
            return [replace(node, engine=Engine.TENSOR)]
        rows, columns = out.shape
        chunk = next(size for size in range(min(PSUM_COLUMNS, columns), 0, -1) if columns % size == 0)
        loop = next(self._loop_ids)
        inner = (*loops, loop)
        temporary = self._temporary(Space.PSUM, (rows, chunk), "float32", inner, "broadcast")
        matmul = replace(
            node,
            engine=Engine.TENSOR,
            outputs=(whole_tile(temporary.id, (rows, chunk)),),
            operands={"src": _columns(source, loop, chunk)},
            attributes={"broadcast": out.buffer},
            mask=(),
        )
        copy = replace(
            node,
            opcode=Opcode.COPY,
            engine=Engine.ANY,
            outputs=(_columns(out, loop, chunk),),
            operands={"src": whole_tile(temporary.id, (rows, chunk))},
            attributes={"broadcast": out.buffer},
        )
        return [Loop(loop, columns // chunk, LoopKind.AFFINE, (matmul, copy), node.line)]

    def _plain(self, access: Access) -> tuple[int, ...]:
        """The access's shape if its last axis walks the last dimension in unit steps, else an empty shape."""
        last = access.index[-1]
        return access.shape if last.strides == ((1, 1),) and not last.tables else ()

    def _transpose(self, node: Instruction, loops: tuple[int, ...]) -> list[Node]:
        """A transpose on the tensor engine lands in PSUM; a destination in SBUF needs a copy behind it."""
        out = node.outputs[0]
        if node.engine is Engine.VECTOR or self.buffers[out.buffer].space is Space.PSUM:
            return [node]
        data = node.operands["data"]
        dtype = self.buffers[data.buffer].dtype if isinstance(data, Access) else "float32"
        temporary = self._temporary(Space.PSUM, out.shape, dtype, loops, "transposed")
        tile = whole_tile(temporary.id, out.shape)
        return [
            replace(node, engine=Engine.TENSOR, outputs=(tile,), mask=()),
            replace(node, opcode=Opcode.COPY, engine=Engine.ANY, operands={"src": tile}, attributes={}),
        ]

    def _transposing_load(self, node: Instruction, loops: tuple[int, ...]) -> list[Node]:
        """A load whose partition axis is HBM's contiguous one is a plain load and a transpose on the tensor engine.

        Element-wise descriptors would take longer than whole kernels that use such loads were measured to run.
        """
        source, out = node.operands["src"], node.outputs[0]
        if not isinstance(source, Access) or len(out.shape) != 2 or min(out.shape) < 2 or max(out.shape) > 128:
            return [node]
        last = source.index[-1]
        if last.strides != ((0, 1),) or last.tables:
            return [node]
        dtype = self.buffers[out.buffer].dtype
        rows, columns = out.shape
        raw = self._temporary(Space.SBUF, (columns, rows), dtype, loops, "untransposed")
        swapped = replace(
            source,
            shape=(columns, rows),
            index=tuple(
                replace(
                    index,
                    strides=tuple(sorted((1 - axis, stride) for axis, stride in index.strides)),
                    tables=tuple(sorted((1 - axis, table) for axis, table in index.tables)),
                )
                for index in source.index
            ),
        )
        load = replace(node, outputs=(whole_tile(raw.id, (columns, rows)),), operands={"src": swapped}, mask=())
        transpose = replace(
            node,
            opcode=Opcode.TRANSPOSE,
            engine=Engine.TENSOR,
            operands={"data": whole_tile(raw.id, (columns, rows))},
            attributes={},
        )
        return [load, *self._transpose(transpose, loops)]

    def _psum_store(self, node: Instruction, loops: tuple[int, ...]) -> list[Node]:
        """DMA does not read PSUM: a store from there goes through a copy in SBUF."""
        source = node.operands["src"]
        if not isinstance(source, Access) or self.buffers[source.buffer].space is not Space.PSUM:
            return [node]
        temporary = self._temporary(Space.SBUF, source.shape, self.buffers[source.buffer].dtype, loops, "evicted")
        tile = whole_tile(temporary.id, source.shape)
        copy = replace(node, opcode=Opcode.COPY, engine=Engine.ANY, outputs=(tile,), mask=(), attributes={})
        return [copy, replace(node, operands={"src": tile})]

    def _merge(self, loop: Loop) -> tuple[Node, ...] | None:
        """Turns a short innermost affine loop of small instructions into wider instructions, if every one allows it."""
        if loop.kind is not LoopKind.AFFINE or not 2 <= loop.trips <= MERGED_TRIPS:
            return None
        inside = {buffer.id for buffer in self.buffers.values() if loop.id in buffer.loops}
        for node in loop.body:
            if isinstance(node, Loop) or not self._mergeable(node, loop, inside):
                return None
        widened: list[Node] = []
        for node in loop.body:
            assert isinstance(node, Instruction)
            widened.append(self._widen(node, loop, inside))
        for buffer_id in inside:
            buffer = self.buffers[buffer_id]
            self.buffers[buffer_id] = replace(
                buffer,
                shape=(*buffer.shape, loop.trips),
                loops=tuple(other for other in buffer.loops if other != loop.id),
            )
        return tuple(widened)

    def _mergeable(self, node: Instruction, loop: Loop, inside: set[int]) -> bool:
        if node.opcode in _NEVER_MERGED or node.mask or node.accumulate:
            return False
        if any(isinstance(value, Affine) and value.terms for value in node.attributes.values()):
            return False
        out = node.outputs[0]
        varies = out.buffer in inside or any(term[0] == loop.id for index in out.index for term in index.start.terms)
        if not varies:
            return False
        for access in accesses_of(node):
            space = self.buffers[access.buffer].space
            if space is not Space.HBM and access.view_shape != self.buffers[access.buffer].shape:
                return False
            if any(index.indirect is not None for index in access.index):
                return False
            partition = self.buffers[access.buffer].block_dims
            if space is not Space.HBM and any(
                term[0] == loop.id for index in access.index[: partition + 1] for term in index.start.terms
            ):
                return False
            width = math.prod(access.shape[1:])
            if width > NARROW_ELEMENTS or width * loop.trips > MERGED_ELEMENTS:
                return False
        return True

    def _widen(self, node: Instruction, loop: Loop, inside: set[int]) -> Instruction:
        def widen(access: Access) -> Access:
            axis = len(access.shape)
            index = []
            for dim in access.index:
                coefficient = dict(dim.start.terms).get(loop.id, 0)
                start = Affine(dim.start.constant, tuple(term for term in dim.start.terms if term[0] != loop.id))
                strides = (*dim.strides, (axis, coefficient)) if coefficient else dim.strides
                index.append(replace(dim, start=start, strides=strides))
            view = access.view_shape
            if access.buffer in inside:
                index.append(DimIndex(strides=((axis, 1),)))
                view = (*view, loop.trips)
            return Access(access.buffer, (*access.shape, loop.trips), tuple(index), view)

        return replace(
            node,
            outputs=tuple(widen(access) for access in node.outputs),
            operands={
                name: widen(value) if isinstance(value, Access) else value for name, value in node.operands.items()
            },
        )


_PSUM_READERS = frozenset({Opcode.TENSOR_TENSOR, Opcode.TENSOR_REDUCE})


def _mark_late_transposes(nodes: list[Node]) -> list[Node]:
    """Marks the transposes that a high-level matmul call brings along.

    Two published profiles count them as often as they are written, so the compiler inserts them after it removes
    repeated work.
    """
    wanted: set[int] = set()
    result: list[Node] = []
    for node in reversed(nodes):
        if isinstance(node, Instruction):
            stationary = node.operands.get("stationary")
            if node.attributes.get("high_level") and isinstance(stationary, Access):
                wanted.add(stationary.buffer)
            elif node.outputs[0].buffer in wanted and node.opcode in (Opcode.COPY, Opcode.TRANSPOSE):
                source = node.operands.get("src")
                if isinstance(source, Access):
                    wanted.add(source.buffer)
                node = replace(node, attributes={**node.attributes, "late": True})  # noqa: PLW2901
        result.append(node)
    return result[::-1]


_NEVER_MERGED = frozenset(
    {
        Opcode.MATMUL, Opcode.TRANSPOSE, Opcode.SCAN, Opcode.LOOP_REDUCE, Opcode.PARTITION_BROADCAST,
        Opcode.PARTITION_REDUCE, Opcode.BN_STATS, Opcode.BN_AGGR, Opcode.MAX8, Opcode.FIND_INDEX8,
        Opcode.MATCH_REPLACE8, Opcode.LOCAL_GATHER, Opcode.STREAM_SHUFFLE, Opcode.DMA_COPY, Opcode.IOTA,
    }
)  # fmt: skip


def _columns(access: Access, loop: int, chunk: int) -> Access:
    """The part of a two-axis access that iteration ``loop`` of a column loop covers."""
    axis = len(access.shape) - 1
    index = []
    for dim in access.index:
        stride = dict(dim.strides).get(axis, 0)
        terms = (*dim.start.terms, (loop, stride * chunk)) if stride else dim.start.terms
        index.append(replace(dim, start=Affine(dim.start.constant, tuple(sorted(terms)))))
    return Access(access.buffer, (*access.shape[:-1], chunk), tuple(index), access.view_shape)
