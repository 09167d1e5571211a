"""Programs as bytes, to carry them from the process that ran the kernel to one that does not trust it.

Layout: a magic line, the length of a JSON header, the header, then the constants' elements in C order. The header holds
plain lists; what repeats (indices and accesses) stands in a table once. :func:`loads` checks every type on the way in,
so that whatever it returns is a well-formed :class:`~accelopt_ray.nki_sim.program.Program`; whether its numbers make
sense is for :mod:`accelopt_ray.nki_sim.validate` to say.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import numpy as np

from accelopt_ray.nki_sim import dtypes
from accelopt_ray.nki_sim.program import (
    Access,
    Affine,
    Attribute,
    Buffer,
    DimIndex,
    Engine,
    Instruction,
    Loop,
    LoopKind,
    MaskTerm,
    Node,
    Opcode,
    Operand,
    Program,
    Role,
    Space,
)

_MAGIC = b"accelopt-ray program 1\n"
_LENGTH_BYTES = 8
_MAX_DEPTH = 100

T = TypeVar("T")


class ProgramFormatError(ValueError):
    """The bytes are no program."""


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Building 100,000 objects without a cycle among them takes twice as long while the collector looks for cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def dumps(program: Program) -> bytes:
    """Serialises a program."""
    with _collection_paused():
        return _dumps(program)


def _dumps(program: Program) -> bytes:
    writer = _Writer()
    body = writer.nodes(program.body)
    constants = []
    blobs = []
    for identifier, values in program.constants.items():
        array = np.ascontiguousarray(values)
        blob = array.tobytes()
        constants.append([identifier, list(array.shape), len(blob)])
        blobs.append(blob)
    header = {
        "target": program.target,
        "buffers": [_buffer(buffer) for buffer in program.buffers.values()],
        "inputs": list(program.inputs),
        "outputs": list(program.outputs),
        "dims": writer.dims,
        "accesses": writer.accesses,
        "body": body,
        "constants": constants,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([_MAGIC, len(text).to_bytes(_LENGTH_BYTES, "little"), text, *blobs])


class _Writer:
    """Numbers indices and accesses by content; objects that occur again are found by identity."""

    def __init__(self) -> None:
        self.dims: list[list[Any]] = []
        self.accesses: list[list[Any]] = []
        self._numbers: dict[int, int] = {}
        self._dim_numbers: dict[object, int] = {}
        self._access_numbers: dict[object, int] = {}

    def _dim(self, dim: DimIndex) -> int:
        found = self._numbers.get(id(dim))
        if found is not None:
            return found
        indirect = None if dim.indirect is None else self._access(dim.indirect)
        key = (dim.start.constant, dim.start.terms, dim.strides, dim.tables, indirect)
        number = self._dim_numbers.get(key)
        if number is None:
            number = self._dim_numbers[key] = len(self.dims)
            tables = [[axis, list(table)] for axis, table in dim.tables]
            self.dims.append([*_affine(dim.start), _pairs(dim.strides), tables, indirect])
        self._numbers[id(dim)] = number
        return number

    def _access(self, access: Access) -> int:
        found = self._numbers.get(id(access))
        if found is not None:
            return found
        index = tuple([self._dim(dim) for dim in access.index])
        key = (access.buffer, access.shape, index, access.view_shape)
        number = self._access_numbers.get(key)
        if number is None:
            number = self._access_numbers[key] = len(self.accesses)
            self.accesses.append([access.buffer, access.shape, index, access.view_shape])
        self._numbers[id(access)] = number
        return number

    def nodes(self, nodes: Sequence[Node]) -> list[Any]:
        encoded: list[Any] = []
        for node in nodes:
            if isinstance(node, Loop):
                encoded.append([node.id, node.trips, str(node.kind), node.line, self.nodes(node.body)])
            else:
                encoded.append(self._instruction(node))
        return encoded

    def _instruction(self, node: Instruction) -> list[Any]:
        operands = {
            name: [self._access(value)] if isinstance(value, Access) else value for name, value in node.operands.items()
        }
        return [
            node.id,
            str(node.opcode),
            str(node.engine),
            [self._access(output) for output in node.outputs],
            operands,
            {name: _attribute(value) for name, value in node.attributes.items()},
            [_mask(term) for term in node.mask],
            node.accumulate,
            node.line,
        ]


def _buffer(buffer: Buffer) -> list[Any]:
    return [
        buffer.id,
        buffer.name,
        str(buffer.space),
        list(buffer.shape),
        buffer.dtype,
        str(buffer.role),
        buffer.block_dims,
        list(buffer.loops),
        buffer.fill,
        buffer.line,
    ]


def _pairs(pairs: Sequence[tuple[int, int]]) -> list[int]:
    return [number for pair in pairs for number in pair]


def _affine(affine: Affine) -> list[Any]:
    return [affine.constant, _pairs(affine.terms)]


def _mask(term: MaskTerm) -> list[Any]:
    return [*_affine(term.start), _pairs(term.strides)]


def _attribute(value: Attribute) -> Any:
    if isinstance(value, MaskTerm):
        return ["mask", _mask(value)]
    if isinstance(value, Affine):
        return ["affine", _affine(value)]
    if isinstance(value, tuple):
        if value and isinstance(value[0], MaskTerm):
            return ["masks", [_mask(term) for term in value if isinstance(term, MaskTerm)]]
        return ["ints", list(value)]
    return value


def loads(payload: bytes) -> Program:
    """Reads a program.

    Raises:
        ProgramFormatError: When the bytes are not what :func:`dumps` writes.
    """
    if not payload.startswith(_MAGIC):
        _fail("it does not start as one")
    start = len(_MAGIC) + _LENGTH_BYTES
    length = int.from_bytes(payload[len(_MAGIC) : start], "little")
    if len(payload) < start + length:
        _fail("it is cut short")
    try:
        with _collection_paused():
            header = json.loads(payload[start : start + length])
            return _Reader(header).program(memoryview(payload)[start + length :])
    except ProgramFormatError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise ProgramFormatError(f"not a program: {type(error).__name__}: {error}") from None


def _fail(reason: str) -> NoReturn:
    raise ProgramFormatError(f"not a program: {reason}")


def _int(value: Any) -> int:
    if type(value) is not int:
        _fail(f"expected an integer, found {type(value).__name__}")
    return value


def _str(value: Any) -> str:
    if type(value) is not str:
        _fail(f"expected a string, found {type(value).__name__}")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        _fail(f"expected a list, found {type(value).__name__}")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        _fail(f"expected an object, found {type(value).__name__}")
    return value


def _number(value: Any) -> float | int:
    if type(value) not in (int, float):
        _fail(f"expected a number, found {type(value).__name__}")
    return value  # type: ignore[no-any-return]


def _ints(values: Any) -> tuple[int, ...]:
    found = tuple(_list(values))
    for value in found:
        if type(value) is not int:
            _fail(f"expected integers, found {type(value).__name__}")
    return found


def _pairs_of(values: Any) -> tuple[tuple[int, int], ...]:
    flat = _ints(values)
    if len(flat) % 2:
        _fail("a list of pairs has an odd length")
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _entry(rows: Sequence[T], number: Any) -> T:
    position = _int(number)
    if not 0 <= position < len(rows):
        _fail("a table entry is missing")
    return rows[position]


class _Reader:
    """Rebuilds a program from its header; accesses are shared wherever they are equal."""

    def __init__(self, header: Any) -> None:
        self._header = _dict(header)
        self._dims: list[DimIndex] = []
        self._accesses: list[Access] = []
        self._opcodes = {str(opcode): opcode for opcode in Opcode}
        self._engines = {str(engine): engine for engine in Engine}
        self._spaces = {str(space): space for space in Space}
        self._roles = {str(role): role for role in Role}

    def program(self, blobs: memoryview) -> Program:
        header = self._header
        buffers = [self._buffer(row) for row in _list(header["buffers"])]
        by_id = {buffer.id: buffer for buffer in buffers}
        if len(by_id) != len(buffers):
            _fail("two buffers have one id")
        self._read_tables(_list(header["dims"]), _list(header["accesses"]))
        body = self._nodes(_list(header["body"]), 0)
        return Program(
            buffers=by_id,
            inputs=_ints(header["inputs"]),
            outputs=_ints(header["outputs"]),
            body=body,
            constants=self._constants(_list(header["constants"]), by_id, blobs),
            target=_str(header["target"]),
        )

    def _read_tables(self, dims: list[Any], accesses: list[Any]) -> None:
        """Reads both tables together: an access refers to dims, and an indirect dim to an earlier access."""
        pending: list[tuple[int, int]] = []
        for position, row in enumerate(dims):
            constant, terms, strides, tables, indirect = _list(row)
            read_tables = tuple((_int(axis), _ints(table)) for axis, table in map(_list, _list(tables)))
            start = Affine(_int(constant), _pairs_of(terms))
            self._dims.append(DimIndex(start, _pairs_of(strides), read_tables))
            if indirect is not None:
                pending.append((position, _int(indirect)))
        waiting = dict(pending)
        for number, row in enumerate(accesses):
            buffer, shape, index, view_shape = _list(row)
            parts = []
            for entry in _ints(index):
                dim = _entry(self._dims, entry)
                if entry in waiting:
                    if waiting[entry] >= number:
                        _fail("an access refers to a later one")
                    dim = DimIndex(dim.start, dim.strides, dim.tables, self._accesses[waiting[entry]])
                parts.append(dim)
            self._accesses.append(Access(_int(buffer), _ints(shape), tuple(parts), _ints(view_shape)))

    def _buffer(self, row: Any) -> Buffer:
        identifier, name, space, shape, dtype, role, block_dims, loops, fill, line = _list(row)
        return Buffer(
            id=_int(identifier),
            name=_str(name),
            space=self._spaces[_str(space)],
            shape=_ints(shape),
            dtype=_str(dtype),
            role=self._roles[_str(role)],
            block_dims=_int(block_dims),
            loops=_ints(loops),
            fill=None if fill is None else float(_number(fill)),
            line=_int(line),
        )

    def _nodes(self, rows: list[Any], depth: int) -> tuple[Node, ...]:
        if depth > _MAX_DEPTH:
            _fail("loops are nested too deeply")
        nodes: list[Node] = []
        for row in rows:
            if len(_list(row)) == 5:
                identifier, trips, kind, line, body = row
                nodes.append(
                    Loop(
                        _int(identifier),
                        _int(trips),
                        LoopKind(_str(kind)),
                        self._nodes(_list(body), depth + 1),
                        _int(line),
                    )
                )
            else:
                nodes.append(self._instruction(row))
        return tuple(nodes)

    def _instruction(self, row: list[Any]) -> Instruction:
        identifier, opcode, engine, outputs, operands, attributes, mask, accumulate, line = row
        if type(accumulate) is not bool:
            _fail("expected a truth value")
        return Instruction(
            id=_int(identifier),
            opcode=self._opcodes[_str(opcode)],
            engine=self._engines[_str(engine)],
            outputs=tuple(_entry(self._accesses, output) for output in _list(outputs)),
            operands={name: self._operand(value) for name, value in _dict(operands).items()},
            attributes={name: _read_attribute(value) for name, value in _dict(attributes).items()},
            mask=tuple(_read_mask(term) for term in _list(mask)),
            accumulate=accumulate,
            line=_int(line),
        )

    def _operand(self, value: Any) -> Operand:
        if type(value) is list:
            (number,) = value
            return _entry(self._accesses, number)
        return _number(value)

    def _constants(
        self, rows: list[Any], buffers: dict[int, Buffer], blobs: memoryview
    ) -> dict[int, np.ndarray[Any, Any]]:
        constants: dict[int, np.ndarray[Any, Any]] = {}
        offset = 0
        for row in rows:
            identifier, shape, size = _int(row[0]), _ints(row[1]), _int(row[2])
            if identifier not in buffers or buffers[identifier].dtype not in dtypes.NAMES:
                _fail("a constant has no buffer of a known type")
            element = dtypes.storage(buffers[identifier].dtype)
            if any(extent < 0 for extent in shape) or size < 0 or offset + size > len(blobs):
                _fail("a constant is cut short")
            if int(np.prod(shape, dtype=object)) * element.itemsize != size:
                _fail("a constant's size does not match its shape")
            values = np.frombuffer(blobs[offset : offset + size], dtype=element)
            constants[identifier] = values.reshape(shape)
            offset += size
        if offset != len(blobs):
            _fail("bytes are left over")
        return constants


def _read_mask(row: Any) -> MaskTerm:
    constant, terms, strides = _list(row)
    return MaskTerm(Affine(_int(constant), _pairs_of(terms)), _pairs_of(strides))


def _read_attribute(value: Any) -> Attribute:
    if value is None or type(value) in (str, bool, int, float):
        return value  # type: ignore[no-any-return]
    kind, content = _list(value)
    if kind == "ints":
        return _ints(content)
    if kind == "mask":
        return _read_mask(content)
    if kind == "masks":
        return tuple(_read_mask(term) for term in _list(content))
    if kind == "affine":
        constant, terms = _list(content)
        return Affine(_int(constant), _pairs_of(terms))
    return _fail("an attribute has an unknown kind")
