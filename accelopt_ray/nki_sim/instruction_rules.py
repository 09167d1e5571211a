"""What each instruction needs: operands and their memory spaces, engines, attributes, shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accelopt_ray.nki_sim.program import Engine, Opcode, Space

_CHIP = frozenset({Space.SBUF, Space.PSUM})


_SBUF = frozenset({Space.SBUF})


_ANYWHERE = frozenset(Space)


_HBM = frozenset({Space.HBM})


_DMA = frozenset({Engine.DMA})


_PE = frozenset({Engine.TENSOR})


_POOL = frozenset({Engine.GPSIMD})


_DVE = frozenset({Engine.VECTOR})


_ANY = frozenset({Engine.ANY, Engine.VECTOR, Engine.SCALAR, Engine.GPSIMD})


_SCALAR_STEPS = {"data": _CHIP, "operand0": _CHIP, "operand1": _CHIP}


@dataclass(frozen=True)
class Rule:
    """What an instruction needs.

    Attributes:
        operands: Required operands with the spaces they may live in.
        optional: Operands that may be absent.
        numbers: Operands that may be numbers.
        output: Spaces of the outputs.
        engines: Engines that may execute it.
        attributes: Required attributes.
        elementwise: Operands whose shape is the output's.
        vectors: Operands of shape (P, 1) where they are no number.
        outputs: Largest number of outputs.
    """

    operands: Mapping[str, frozenset[Space]]
    output: frozenset[Space] = _CHIP
    engines: frozenset[Engine] = frozenset({Engine.VECTOR})
    optional: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    attributes: tuple[str, ...] = ()
    elementwise: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    outputs: int = 1


RULES: dict[Opcode, Rule] = {
    Opcode.LOAD: Rule({"src": _HBM}, _SBUF, _DMA, elementwise=("src",)),
    Opcode.STORE: Rule({"src": _CHIP}, _HBM, _DMA, elementwise=("src",)),
    Opcode.DMA_COPY: Rule({"src": _ANYWHERE}, frozenset({Space.HBM, Space.SBUF}), _DMA, elementwise=("src",)),
    Opcode.MATMUL: Rule({"stationary": _SBUF, "moving": _SBUF}, frozenset({Space.PSUM}), _PE),
    Opcode.TRANSPOSE: Rule({"data": _CHIP}, _CHIP, _PE | _DVE),
    Opcode.ACTIVATION: Rule(
        {"data": _CHIP, "scale": _CHIP, "bias": _CHIP},
        _CHIP,
        frozenset({Engine.SCALAR}),
        frozenset({"bias"}),
        frozenset({"scale"}),
        ("op",),
        ("data",),
        ("scale", "bias"),
        2,
    ),
    Opcode.TENSOR_TENSOR: Rule({"a": _CHIP, "b": _CHIP}, _CHIP, _ANY, attributes=("op",), elementwise=("a", "b")),
    Opcode.TENSOR_SCALAR: Rule(
        _SCALAR_STEPS,
        _CHIP,
        _ANY,
        frozenset({"operand1"}),
        frozenset({"operand0", "operand1"}),
        ("op0",),
        ("data",),
        ("operand0", "operand1"),
    ),
    Opcode.TENSOR_SCALAR_REDUCE: Rule(
        {"data": _CHIP, "operand0": _CHIP},
        _CHIP,
        _DVE,
        frozenset(),
        frozenset({"operand0"}),
        ("op0", "reduce_op"),
        ("data",),
        ("operand0",),
        2,
    ),
    Opcode.SCALAR_TENSOR_TENSOR: Rule(
        _SCALAR_STEPS,
        _CHIP,
        _DVE,
        frozenset(),
        frozenset({"operand0"}),
        ("op0", "op1"),
        ("data", "operand1"),
        ("operand0",),
    ),
    Opcode.TENSOR_REDUCE: Rule({"data": _CHIP}, _CHIP, _DVE, attributes=("op", "axes")),
    Opcode.SCAN: Rule(
        {"data0": _CHIP, "data1": _CHIP, "initial": _CHIP},
        _CHIP,
        _DVE,
        frozenset(),
        frozenset({"initial"}),
        ("op0", "op1"),
        ("data0", "data1"),
        ("initial",),
    ),
    Opcode.RECIPROCAL: Rule({"data": _CHIP}, _CHIP, _DVE, elementwise=("data",)),
    Opcode.COPY: Rule({"src": _CHIP}, _CHIP, _ANY, elementwise=("src",)),
    Opcode.MEMSET: Rule({}, _CHIP, _ANY, attributes=("value",)),
    Opcode.IOTA: Rule({}, _CHIP, _POOL, attributes=("start", "strides")),
    Opcode.SELECT: Rule(
        {"predicate": _CHIP, "on_true": _CHIP, "on_false": _CHIP},
        _CHIP,
        _DVE,
        frozenset(),
        frozenset({"on_true", "on_false"}),
        (),
        ("predicate", "on_true", "on_false"),
    ),
    Opcode.AFFINE_SELECT: Rule(
        {"on_true": _SBUF, "on_false": _SBUF},
        _CHIP,
        _POOL,
        frozenset(),
        frozenset({"on_false"}),
        ("predicate",),
        ("on_true",),
    ),
    Opcode.PARTITION_BROADCAST: Rule({"src": _CHIP}, _CHIP, _PE),
    Opcode.PARTITION_REDUCE: Rule({"data": _SBUF}, _CHIP, _POOL, attributes=("op",)),
    Opcode.LOOP_REDUCE: Rule({"data": _CHIP}, _CHIP, _DVE, attributes=("op", "loops"), elementwise=("data",)),
    Opcode.BN_STATS: Rule({"data": _CHIP}, _CHIP, _DVE),
    Opcode.BN_AGGR: Rule({"data": _CHIP}, _CHIP, _DVE),
    Opcode.MAX8: Rule({"data": _CHIP}, _CHIP, _DVE),
    Opcode.FIND_INDEX8: Rule({"data": _CHIP, "vals": _CHIP}, _CHIP, _DVE),
    Opcode.MATCH_REPLACE8: Rule(
        {"data": _CHIP, "vals": _CHIP}, _CHIP, _DVE, attributes=("imm",), elementwise=("data",), outputs=2
    ),
    Opcode.COPY_PREDICATED: Rule(
        {"src": _CHIP, "predicate": _CHIP}, _CHIP, _DVE, frozenset(), frozenset({"src"}), (), ("src", "predicate")
    ),
    Opcode.RANGE_SELECT: Rule(
        {"on_true": _CHIP, "bound0": _CHIP, "bound1": _CHIP},
        _CHIP,
        _DVE,
        frozenset(),
        frozenset(),
        ("comp_op0", "comp_op1", "range_start", "on_false_value"),
        ("on_true",),
        ("bound0", "bound1"),
        2,
    ),
    Opcode.LOCAL_GATHER: Rule({"src": _SBUF, "index": _SBUF}, _SBUF, _POOL, attributes=("num_elem_per_idx",)),
    Opcode.STREAM_SHUFFLE: Rule({"src": _CHIP}, _CHIP, _DVE, attributes=("shuffle_mask",), elementwise=("src",)),
    Opcode.DROPOUT: Rule(
        {"data": _CHIP, "probability": _CHIP},
        _CHIP,
        _DVE,
        frozenset(),
        frozenset({"probability"}),
        (),
        ("data",),
        ("probability",),
    ),
    Opcode.RANDOM: Rule({}, _CHIP, _DVE),
}
