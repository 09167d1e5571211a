"""From the records of a trace to a program of plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Union

from accelopt_ray.nki_sim.masks import mask_term
from accelopt_ray.nki_sim.program import Access, Attribute, DimIndex, Instruction, Loop, Node
from accelopt_ray.nki_sim.symbolic import Index
from accelopt_ray.nki_sim.trace_records import LoopRecord, Record

if TYPE_CHECKING:
    from accelopt_ray.nki_sim.tile import Tensor


class Freezer:
    """Converts records to program nodes and collects the buffers in use."""

    def __init__(self, used: set[int]) -> None:
        """Starts with no instruction frozen.

        Args:
            used: Buffers in use; those that are met are added.
        """
        self._used = used
        self._next_id = 0
        self._dims: dict[object, DimIndex] = {}

    def nodes(self, body: Sequence[Union[Record, LoopRecord]]) -> tuple[Node, ...]:
        """Converts a body; loops without a single instruction are left out."""
        return tuple(self._nodes(body))

    def _nodes(self, body: Sequence[Union[Record, LoopRecord]]) -> Iterator[Node]:
        for record in body:
            if isinstance(record, LoopRecord):
                inner = self.nodes(record.body)
                if inner:
                    variable = record.variable
                    yield Loop(variable.id, variable.trips, variable.kind, inner, record.line)
            else:
                yield self._instruction(record)

    def _instruction(self, record: Record) -> Instruction:
        identifier = self._next_id
        self._next_id += 1
        return Instruction(
            id=identifier,
            opcode=record.opcode,
            engine=record.engine,
            outputs=tuple(self._access(output) for output in record.outputs),
            operands={
                name: value if isinstance(value, (int, float)) else self._access(value)
                for name, value in record.operands.items()
            },
            attributes={name: _attribute(value) for name, value in record.attributes.items()},
            mask=tuple(mask_term(term) for term in record.mask),
            accumulate=record.accumulate,
            line=record.line,
        )

    def _access(self, tensor: Tensor) -> Access:
        self._used.add(tensor.buffer.id)
        index = [self._dim(dim) for dim in tensor.dims]
        for position, tile in tensor.indirect.items():
            direct = index[position]
            index[position] = DimIndex(direct.start, direct.strides, direct.tables, self._access(tile))
        return Access(tensor.buffer.id, tensor.shape, tuple(index), tensor.view_shape)

    def _dim(self, dim: Index) -> DimIndex:
        """The index as plain data, one object for all that are equal."""
        key = (dim.constant, tuple(dim.terms.items()), dim.strides, tuple(dim.tables.items()))
        found = self._dims.get(key)
        if found is None:
            found = self._dims[key] = dim.dim_index()
        return found


def _attribute(value: Any) -> Attribute:
    if isinstance(value, tuple) and value and isinstance(value[0], Index):
        return tuple(mask_term(term) for term in value)
    if isinstance(value, Index):
        return mask_term(value) if value.shape else value.affine()
    return value  # type: ignore[no-any-return]
