"""The loop-nest program: what tracing a kernel yields, and all that numerics and the cost model read.

A kernel is traced once with symbolic loop indices, as the generation-A compiler does. The result is a tree of
:class:`Loop` and :class:`Instruction` nodes over :class:`Buffer` objects. Every operand is an :class:`Access`: an
affine map from the axes of a tile to the dimensions of a buffer. Programs are plain data: they hold no callables and no
reference to the kernel's Python objects, so a program that an untrusted process wrote can be checked and then executed
and priced elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

from accelopt_ray.outcome import StrEnum

if TYPE_CHECKING:
    import numpy as np


class Space(StrEnum):
    """Where a buffer lives."""

    HBM = "hbm"
    SBUF = "sbuf"
    PSUM = "psum"


class Engine(StrEnum):
    """The unit that executes an instruction. ``ANY`` leaves the choice to the compiler's model."""

    TENSOR = "tensor"
    VECTOR = "vector"
    SCALAR = "scalar"
    GPSIMD = "gpsimd"
    DMA = "dma"
    ANY = "any"


class LoopKind(StrEnum):
    """Which iterator wrote the loop."""

    AFFINE = "affine"
    SEQUENTIAL = "sequential"


class Role(StrEnum):
    """What a buffer is to the kernel."""

    INPUT = "input"
    OUTPUT = "output"
    CONSTANT = "constant"
    TEMPORARY = "temporary"


class Opcode(StrEnum):
    """Instructions after lowering the ``nl`` helpers; operand and attribute names are fixed here.

    Operands marked ``?`` may be absent, those marked ``~`` may be an :class:`Access` or a Python number. ``out`` is
    ``outputs[0]``. Tile axis 0 is the partition axis on chip.
    """

    # src (HBM) -> out (SBUF); attribute transpose?: the DMA exchanges the two axes (src is given as out sees it)
    LOAD = "load"
    STORE = "store"  # src (SBUF or PSUM) -> out (HBM)
    DMA_COPY = "dma_copy"  # src -> out, any spaces; attribute rmw_op?
    # stationary (K, M), moving (K, N) -> out (M, N) in PSUM. Attributes is_transpose, is_stationary_onezero,
    # is_moving_onezero: bool; high_level: bool (lowered from nl.matmul); contraction_mask?: MaskTerms over (K, 1) that
    # select the rows of both operands that take part. ``accumulate`` adds into out.
    MATMUL = "matmul"
    TRANSPOSE = "transpose"  # data (P, F) -> out (F, P); engine TENSOR (into PSUM) or VECTOR (32 x 32 blocks)
    # out = op(data * scale + bias); outputs[1]? receives reduce_op over the free axes. Operands data, scale~, bias?.
    # Attributes op, reduce_op?, reduce_cmd? (how outputs[1] relates to earlier instructions).
    ACTIVATION = "activation"
    TENSOR_TENSOR = "tensor_tensor"  # a, b -> out; attribute op
    # data, operand0~, operand1~? ; attributes op0, reverse0, op1?, reverse1?
    TENSOR_SCALAR = "tensor_scalar"
    # as TENSOR_SCALAR with one op, outputs[1] = reduce_op over the free axes; attributes op0, reverse0, reduce_op
    TENSOR_SCALAR_REDUCE = "tensor_scalar_reduce"
    # (data op0 operand0~) op1 operand1 ; attributes op0, op1, reverse0, reverse1
    SCALAR_TENSOR_TENSOR = "scalar_tensor_tensor"
    # data -> out; attributes op, axes (tile axes of data), negate, keepdims; input_mask?: MaskTerms over the axes of
    # data that select the elements that take part
    TENSOR_REDUCE = "tensor_reduce"
    # data0, data1, initial~ ; out[t] = (out[t-1] op0 data0[t]) op1 data1[t]; attributes op0, op1, reverse0, reverse1
    SCAN = "scan"
    RECIPROCAL = "reciprocal"  # data
    COPY = "copy"  # src -> out on chip, with a cast to out's dtype
    MEMSET = "memset"  # out = attribute value
    # out[p, f...] = attribute start (an Affine) + strides (one per tile axis)
    IOTA = "iota"
    SELECT = "select"  # predicate, on_true~, on_false~ -> out
    # out = operand on_true where the affine predicate (attribute predicate: a MaskTerm) holds else operand on_false
    AFFINE_SELECT = "affine_select"
    PARTITION_BROADCAST = "partition_broadcast"  # src with partition extent 1 -> out with P partitions
    PARTITION_REDUCE = "partition_reduce"  # data (P, F...) -> out (1, F...); attributes op, input_mask?
    # out = op over the loops listed in attribute loops (loop ids) of data; the destination starts at op's identity
    LOOP_REDUCE = "loop_reduce"
    BN_STATS = "bn_stats"
    BN_AGGR = "bn_aggr"
    MAX8 = "max8"  # data -> out (P, 8)
    FIND_INDEX8 = "find_index8"  # data, vals (P, 8) -> out (P, 8)
    MATCH_REPLACE8 = "match_replace8"  # data, vals (P, 8) -> out, outputs[1]? the positions; attribute imm
    COPY_PREDICATED = "copy_predicated"  # src~, predicate -> out (kept where it is 0); attribute reverse_pred
    # on_true, bound0, bound1 (P, 1) -> out, outputs[1]? the reduction; attributes comp_op0, comp_op1, range_start,
    # on_false_value, reduce_op?
    RANGE_SELECT = "range_select"
    LOCAL_GATHER = "local_gather"  # src, index -> out; attributes num_elem_per_idx, num_valid_indices
    STREAM_SHUFFLE = "stream_shuffle"  # src -> out; attribute shuffle_mask: 32 entries, 255 keeps the partition
    DROPOUT = "dropout"  # data, probability~ -> out
    RANDOM = "random"  # uniform in [0, 1)


@dataclass(frozen=True)
class Affine:
    """``constant`` plus the sum of ``coefficient * loop index`` over ``terms``.

    Attributes:
        constant: The value when every loop index is 0.
        terms: Pairs of loop id and non-zero coefficient, sorted by loop id.
    """

    constant: int = 0
    terms: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class DimIndex:
    """Which positions of one buffer dimension a tile touches.

    The position for a tile coordinate is ``start`` + sum of ``stride * coordinate[axis]`` over ``strides`` + sum of
    ``table[coordinate[axis]]`` over ``tables``. Tables carry what is not affine within one axis, such as
    ``arange(n) // c``.
    """

    start: Affine = Affine()
    strides: tuple[tuple[int, int], ...] = ()
    tables: tuple[tuple[int, tuple[int, ...]], ...] = ()
    indirect: Access | None = None


@dataclass(frozen=True)
class Access:
    """A tile of a buffer.

    Attributes:
        buffer: Id of the buffer.
        shape: Extent of each tile axis; a tile axis that no index names is a broadcast (stride 0).
        index: One entry per dimension of ``view_shape``.
        view_shape: The shape the buffer is read in: its own, or another contiguous view of the same elements.
    """

    buffer: int
    shape: tuple[int, ...]
    index: tuple[DimIndex, ...]
    view_shape: tuple[int, ...]


@dataclass(frozen=True)
class MaskTerm:
    """One affine condition: ``start + sum(stride * coordinate[axis]) >= 0`` over the axes of the output tile."""

    start: Affine
    strides: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Buffer:
    """A tensor in one memory space.

    Attributes:
        id: Unique within the program.
        name: The kernel's name for it, for messages and explanations.
        space: Memory space.
        shape: Full shape: block dimensions, then partition, then free dimensions (on chip); logical shape (HBM).
        block_dims: How many leading dimensions are block dimensions (0 in HBM).
        dtype: NumPy-style name: ``float32``, ``bfloat16``, ``float8_e4m3``, ``tfloat32``, ``int32`` ….
        role: Input, output, constant or temporary.
        loops: Ids of the loops that were open where the buffer was created: each iteration has its own.
        fill: Value the buffer starts with (``nl.zeros``, ``nl.full``), or None when it starts uninitialised.
        line: Source line of its creation.
    """

    id: int
    name: str
    space: Space
    shape: tuple[int, ...]
    dtype: str
    role: Role
    block_dims: int = 0
    loops: tuple[int, ...] = ()
    fill: float | None = None
    line: int = 0


Operand = Union[Access, float, int]
Attribute = Union[str, bool, int, float, None, tuple[int, ...], MaskTerm, tuple[MaskTerm, ...], Affine]


@dataclass(frozen=True)
class Instruction:
    """One hardware instruction as written (before the compiler's middle end).

    Attributes:
        id: Unique within the program, in program order.
        opcode: What it does; see :class:`Opcode` for operands and attributes.
        engine: The engine the source asks for.
        outputs: Destination tiles; the first is the main result.
        operands: Named inputs.
        attributes: Static parameters by name.
        mask: Conjunction of conditions on the output coordinates; elements that fail are not written.
        accumulate: Whether the result is added into ``outputs[0]``.
        line: Source line.
    """

    id: int
    opcode: Opcode
    engine: Engine
    outputs: tuple[Access, ...]
    operands: Mapping[str, Operand]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    mask: tuple[MaskTerm, ...] = ()
    accumulate: bool = False
    line: int = 0


@dataclass(frozen=True)
class Loop:
    """A counted loop; the index runs over ``range(trips)``."""

    id: int
    trips: int
    kind: LoopKind
    body: tuple[Node, ...]
    line: int = 0


Node = Union[Loop, Instruction]


@dataclass(frozen=True)
class Program:
    """A traced kernel.

    Attributes:
        buffers: All buffers by id.
        inputs: Ids of the kernel's tensor arguments, in order.
        outputs: Ids of what the kernel returns, in order.
        body: Top-level nodes in program order.
        constants: Values of the ``CONSTANT`` buffers by id.
        target: Hardware generation the rules were checked for: ``trn1``, ``trn2`` or ``trn3``.
    """

    buffers: Mapping[int, Buffer]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    body: tuple[Node, ...]
    constants: Mapping[int, np.ndarray] = field(default_factory=dict)
    target: str = "trn1"

    def walk(self) -> Iterator[tuple[tuple[Loop, ...], Instruction]]:
        """Yields each instruction once, in program order, with the loops around it (outermost first)."""
        yield from _walk(self.body, ())


def _walk(nodes: tuple[Node, ...], loops: tuple[Loop, ...]) -> Iterator[tuple[tuple[Loop, ...], Instruction]]:
    for node in nodes:
        if isinstance(node, Loop):
            yield from _walk(node.body, (*loops, node))
        else:
            yield loops, node
