"""What a rule needs to turn one statement into an executable step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.dtypes import is_integer
from accelopt_ray.nki_sim.numerics.blas import Products
from accelopt_ray.nki_sim.numerics.coverage import Initialisation
from accelopt_ray.nki_sim.numerics.errors import NumericsError
from accelopt_ray.nki_sim.numerics.geometry import Nest, Statement, tile_range, value_range
from accelopt_ray.nki_sim.numerics.layout import Storage, Tile, check_bounds, make_tile
from accelopt_ray.nki_sim.numerics.masks import Mask
from accelopt_ray.nki_sim.numerics.memory import Clip, Memory, Reader, reads_as_float32
from accelopt_ray.nki_sim.program import Access, Affine, Instruction, MaskTerm, Operand
from accelopt_ray.outcome import EvaluationOutcome

Array = NDArray[Any]
Step = Callable[[], None]


@dataclass(frozen=True)
class Plan:
    """All decisions about one program, shared by the statements.

    Attributes:
        nest: Loops and statements.
        storages: Memory by buffer id.
        initialisations: What each buffer needs before use.
        memory: The memory of the run.
        products: Computes matrix products.
    """

    nest: Nest
    storages: dict[int, Storage]
    initialisations: Mapping[int, Initialisation]
    memory: Memory
    products: Products


class Site:
    """One statement in the making.

    Args:
        plan: Decisions about the program.
        statement: The statement.
        batch_loops: The loops that become leading axes of every tile.
    """

    def __init__(self, plan: Plan, statement: Statement, batch_loops: tuple[int, ...]):
        self.plan = plan
        self.memory = plan.memory
        self.statement = statement
        self.instruction: Instruction = statement.instruction
        self.line = self.instruction.line
        self.batch_loops = batch_loops
        self.batch = len(batch_loops)
        self.outputs = [self.tile(access) for access in self.instruction.outputs]
        self.mask: Mask | None = None
        if self.instruction.mask:
            self.mask = Mask(self.instruction.mask, self.outputs[0].shape, self.batch, self.memory)
        else:
            for access in self._accesses():
                check_bounds(access, plan.nest.program.buffers[access.buffer], self.line, plan.nest)
        self._clamp = self.mask is not None and self.mask.needs_choice

    def _accesses(self) -> list[Access]:
        return [*self.instruction.outputs, *(o for o in self.instruction.operands.values() if isinstance(o, Access))]

    @property
    def out(self) -> Tile:
        """The main output."""
        return self.outputs[0]

    def tile(self, access: Access) -> Tile:
        """Returns the access as strided memory."""
        return make_tile(access, self.batch_loops, self.plan.storages, self.plan.nest)

    def attribute(self, name: str, default: Any = None) -> Any:
        """Returns a static attribute of the instruction."""
        return self.instruction.attributes.get(name, default)

    def operand(self, *names: str) -> Operand | None:
        """Returns the operand under the first of ``names`` that exists."""
        for name in names:
            if name in self.instruction.operands:
                return self.instruction.operands[name]
        return None

    def access(self, *names: str) -> Access:
        """As :meth:`operand`, which must be a tile.

        Raises:
            NumericsError: It is missing or a number.
        """
        found = self.operand(*names)
        if not isinstance(found, Access):
            raise NumericsError(f"'{self.instruction.opcode}' lacks its operand '{names[0]}'", self.line)
        return found

    def unsupported(self, what: str) -> NumericsError:
        """Returns the error for something that the executor does not do."""
        return NumericsError(what, self.line, EvaluationOutcome.UNSUPPORTED)

    def raw(self, tile: Tile) -> Reader:
        """Returns a reader of the tile in its storage type; the clip counts the tile's own axes."""
        return self.memory.reader(tile, clamp=self._clamp and not self._is_inside(tile))

    def values(self, tile: Tile) -> Reader:
        """As :meth:`raw`, in float32."""
        return reads_as_float32(self.raw(tile), tile.dtype)

    def aligned(self, operand: Operand, exact: bool = False) -> Reader:
        """Returns a reader of an operand that broadcasts against the main output, clipped as that is.

        Args:
            operand: A tile or a number.
            exact: Keep the storage type instead of converting to float32.
        """
        if not isinstance(operand, Access):
            constant: Any = operand if exact else np.float32(operand)
            return lambda clip: constant
        tile = self.tile(operand)
        read = self.raw(tile) if exact else self.values(tile)
        rank, wanted = len(tile.shape), len(self.out.shape)
        if self.mask is not None:
            read = _clipped_where_wide(read, tile)
        if rank < wanted:
            widen = (Ellipsis, *(np.newaxis,) * (wanted - rank))
            return lambda clip: read(clip)[widen]
        if rank > wanted:
            raise NumericsError(f"operands of '{self.instruction.opcode}' have different ranks", self.line)
        return read

    def _is_inside(self, tile: Tile) -> bool:
        nest = self.plan.nest
        for access in self._accesses():
            if access.buffer != tile.buffer:
                continue
            for index, extent in zip(access.index, access.view_shape, strict=False):
                reach = value_range(index.start, nest.trips) + tile_range(index, access.shape)
                if reach.low < 0 or reach.high >= extent:
                    return False
        return True

    def elementwise(self, compute: Callable[..., None], readers: list[Reader], late: list[Operand | None]) -> Step:
        """Returns the step ``compute(out, *values)`` for results of the output's shape.

        Args:
            compute: Writes float32 results into its first argument.
            readers: Readers of the other arguments.
            late: Operands that ``compute`` reads after it has begun to write; when one shares the output's buffer,
                the results go through scratch space.
        """
        shares = any(isinstance(o, Access) and o.buffer == self.out.buffer for o in late)
        if self.is_direct(self.out) and self.mask is None and not shares:
            target = self.memory.reader(self.out)
            return _direct_step(compute, target, readers)
        commit = self.commit
        shape = self.out.shape
        scratch = self.memory.scratch
        direct = self.memory.reader(self.out) if self.is_direct(self.out) and not shares else None
        mask = self.mask

        def step() -> None:
            clip: Clip = None
            where = None
            if mask is not None:
                extent = mask.extent()
                if extent.empty:
                    return
                clip, where = extent.clip, extent.where
            values = [read(clip) for read in readers]
            if direct is not None and where is None:
                compute(direct(clip), *values)
                return
            results = scratch(clipped_shape(shape, clip))
            compute(results, *values)
            write(results, clip, where)

        write = commit()
        return step

    def is_direct(self, tile: Tile) -> bool:
        """Tells whether results may be written to the tile without a conversion."""
        return (
            tile.dtype == "float32" and tile.scatter is None and not tile.indirect and not self.instruction.accumulate
        )

    def commit(self, number: int = 0) -> Callable[[Array, Clip, Array | None], None]:
        """Returns the writer of an output; it adds where the instruction accumulates."""
        tile = self.outputs[number]
        write = self.memory.writer(tile)
        if not self.instruction.accumulate or number:
            return write
        read = reads_as_float32(self.memory.reader(tile), tile.dtype)

        def add(values: Array, clip: Clip, where: Array | None) -> None:
            write(read(clip) + values, clip, where)

        return add

    def term_grid(self, term: MaskTerm, shape: tuple[int, ...]) -> tuple[Affine, NDArray[np.int64]]:
        """Returns a condition's loop part and its values over the axes of a tile (batch axes first)."""
        grid = np.zeros((1,) * len(shape), np.int64)
        for tile_axis, stride in term.strides:
            axis = tile_axis + self.batch
            along = np.arange(shape[axis], dtype=np.int64) * stride
            grid = grid + along.reshape([-1 if a == axis else 1 for a in range(len(shape))])
        return term.start, grid

    @property
    def is_exact_integer(self) -> bool:
        """Whether every tile is an integer."""
        return all(is_integer(self.plan.nest.program.buffers[a.buffer].dtype) for a in self._accesses())


def _direct_step(compute: Callable[..., None], target: Reader, readers: list[Reader]) -> Step:
    if len(readers) == 1:
        only = readers[0]

        def step_one() -> None:
            compute(target(None), only(None))

        return step_one
    if len(readers) == 2:
        first, second = readers

        def step_two() -> None:
            compute(target(None), first(None), second(None))

        return step_two

    def step_many() -> None:
        compute(target(None), *[read(None) for read in readers])

    return step_many


def clipped_shape(shape: tuple[int, ...], clip: Clip) -> tuple[int, ...]:
    """Returns the extents that a clip leaves."""
    if clip is None:
        return shape
    result = list(shape)
    for axis, low, high in clip:
        result[axis] = high - low
    return tuple(result)


def _clipped_where_wide(read: Reader, tile: Tile) -> Reader:
    """Drops clips along axes that the tile broadcasts along."""
    wide = {axis for axis, extent in enumerate(tile.shape) if extent != 1}

    def narrowed(clip: Clip) -> Any:
        if clip is None:
            return read(None)
        return read(tuple(entry for entry in clip if entry[0] in wide) or None)

    return narrowed
