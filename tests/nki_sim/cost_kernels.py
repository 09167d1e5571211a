"""Small programs for the cost model's tests, built by hand so that they do not depend on the tracer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

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


class Kernel:
    """Builds a program statement by statement."""

    def __init__(self) -> None:
        self.buffers: dict[int, Buffer] = {}
        self._ids = itertools.count(1)
        self._bodies: list[list[Node]] = [[]]
        self._loops: list[int] = []

    def hbm(self, shape, role=Role.INPUT, dtype="float32") -> Buffer:
        return self._buffer(Space.HBM, shape, role, dtype, 0)

    def sbuf(self, shape, dtype="float32", block_dims=0, fill=None) -> Buffer:
        return self._buffer(Space.SBUF, shape, Role.TEMPORARY, dtype, block_dims, fill)

    def psum(self, shape, dtype="float32", block_dims=0) -> Buffer:
        return self._buffer(Space.PSUM, shape, Role.TEMPORARY, dtype, block_dims, 0.0)

    def _buffer(self, space, shape, role, dtype, block_dims, fill=None) -> Buffer:
        loops = tuple(self._loops) if space is not Space.HBM else ()
        number = next(self._ids)
        buffer = Buffer(
            number,
            f"b{number}",
            space,
            tuple(shape),
            dtype,
            role,
            block_dims=block_dims,
            loops=loops,
            fill=fill,
            line=number,
        )
        self.buffers[number] = buffer
        return buffer

    @contextmanager
    def loop(self, trips: int, kind: LoopKind = LoopKind.AFFINE) -> Iterator[int]:
        number = next(self._ids)
        self._bodies.append([])
        self._loops.append(number)
        yield number
        self._loops.pop()
        body = tuple(self._bodies.pop())
        self._bodies[-1].append(Loop(number, trips, kind, body))

    def emit(self, opcode, out, engine=Engine.ANY, mask=(), accumulate=False, **operands) -> None:
        attributes = operands.pop("attributes", {})
        outputs = out if isinstance(out, tuple) else (out,)
        number = next(self._ids)
        self._bodies[-1].append(
            Instruction(number, opcode, engine, outputs, operands, attributes, mask, accumulate, line=number)
        )

    def load(self, out: Access, src: Access) -> None:
        self.emit(Opcode.LOAD, out, Engine.DMA, src=src)

    def store(self, out: Access, src: Access) -> None:
        self.emit(Opcode.STORE, out, Engine.DMA, src=src)

    def program(self) -> Program:
        (body,) = self._bodies
        inputs = tuple(number for number, buffer in self.buffers.items() if buffer.role is Role.INPUT)
        outputs = tuple(number for number, buffer in self.buffers.items() if buffer.role is Role.OUTPUT)
        return Program(self.buffers, inputs, outputs, tuple(body))


def at(buffer: Buffer, *dims) -> Access:
    """A tile: each dimension is ``(start, extent)`` for an axis or ``start`` alone; a start may be a dict of steps.

    ``{loop: 128}`` stands for ``128 * index of loop``; the key None holds the constant.
    """
    index, shape = [], []
    for dim in dims:
        start, extent = dim if isinstance(dim, tuple) else (dim, None)
        if isinstance(start, dict):
            constant = start.get(None, 0)
            terms = tuple(sorted((loop, step) for loop, step in start.items() if loop is not None and step))
            start = Affine(constant, terms)
        else:
            start = Affine(start)
        if extent is None:
            index.append(DimIndex(start))
        else:
            index.append(DimIndex(start, ((len(shape), 1),)))
            shape.append(extent)
    return Access(buffer.id, tuple(shape), tuple(index), buffer.shape)


def tile(buffer: Buffer) -> Access:
    """The whole of a two-dimensional tile."""
    return at(buffer, (0, buffer.shape[0]), (0, buffer.shape[1]))


def elementwise(rows=8, columns=1024, passes=1, width=512, dtype="float32") -> Program:
    """Loads rows x columns tiles, applies a chain of activations in pieces of ``width``, stores them."""
    kernel = Kernel()
    x = kernel.hbm((rows * 128, columns), dtype=dtype)
    y = kernel.hbm((rows * 128, columns), Role.OUTPUT, dtype)
    with kernel.loop(rows) as i:
        data = kernel.sbuf((128, columns), dtype)
        kernel.load(tile(data), at(x, ({i: 128}, 128), (0, columns)))
        for _ in range(passes):
            result = kernel.sbuf((128, columns), dtype)
            with kernel.loop(columns // width) as j:
                kernel.emit(
                    Opcode.ACTIVATION,
                    at(result, (0, 128), ({j: width}, width)),
                    data=at(data, (0, 128), ({j: width}, width)),
                    scale=1.0,
                    attributes={"op": "exp"},
                )
            data = result
        kernel.store(at(y, ({i: 128}, 128), (0, columns)), tile(data))
    return kernel.program()


def matmul(rows=4, depth=4, columns=2, hoisted=False, reload_rhs=False) -> Program:
    """(rows*128, depth*128) x (depth*128, columns*512), transposing the left operand on the tensor engine.

    ``hoisted`` transposes each left tile once instead of once per column block.
    """
    kernel = Kernel()
    a = kernel.hbm((rows * 128, depth * 128))
    b = kernel.hbm((depth * 128, columns * 512))
    c = kernel.hbm((rows * 128, columns * 512), Role.OUTPUT)

    def transposed_row(i, block):
        with kernel.loop(depth) as k:
            raw = kernel.sbuf((128, 128))
            turned = kernel.psum((128, 128))
            kernel.load(tile(raw), at(a, ({i: 128}, 128), ({k: 128}, 128)))
            kernel.emit(Opcode.TRANSPOSE, tile(turned), Engine.TENSOR, data=tile(raw))
            kernel.emit(Opcode.COPY, at(block, {k: 1}, (0, 128), (0, 128)), src=tile(turned))

    with kernel.loop(rows) as i:
        block = kernel.sbuf((depth, 128, 128), block_dims=1) if hoisted else None
        if block is not None:
            transposed_row(i, block)
        with kernel.loop(columns) as j:
            left = block
            if left is None:
                left = kernel.sbuf((depth, 128, 128), block_dims=1)
                transposed_row(i, left)
            total = kernel.psum((128, 512))
            with kernel.loop(depth) as k:
                right = kernel.sbuf((128, 512))
                kernel.load(tile(right), at(b, ({k: 128}, 128), ({j: 512}, 512)))
                kernel.emit(
                    Opcode.MATMUL,
                    tile(total),
                    Engine.TENSOR,
                    accumulate=True,
                    stationary=at(left, {k: 1}, (0, 128), (0, 128)),
                    moving=tile(right),
                )
            result = kernel.sbuf((128, 512))
            kernel.emit(Opcode.COPY, tile(result), src=tile(total))
            kernel.store(at(c, ({i: 128}, 128), ({j: 512}, 512)), tile(result))
    return kernel.program()
