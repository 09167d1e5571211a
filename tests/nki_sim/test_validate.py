"""Programs that a tampered tracer could hand over are refused by the check on plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_texts import instructions, trace

from accelopt_ray.nki_sim import bounds
from accelopt_ray.nki_sim.bounds import Linear
from accelopt_ray.nki_sim.errors import KernelError
from accelopt_ray.nki_sim.program import (
    Access,
    Affine,
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
from accelopt_ray.nki_sim.validate import MAX_CONSTANT_BYTES, validate

_BODY = """
w = nl.load(y)
for i in nl.affine_range(4):
    t = nl.load(x[:, i * 128:(i + 1) * 128])
    acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
    acc += nisa.nc_matmul(t, w)
    e = nisa.activation(op=nl.exp, data=nl.copy(acc), scale=2.0)
    m = nisa.tensor_reduce(np.max, e, axis=[1])
    s = nisa.tensor_scalar(e, np.subtract, m)
    nl.store(out[i * 128:(i + 1) * 128, :], nl.add(s, e))
"""


@pytest.fixture(scope="module")
def program() -> Program:
    return trace(_BODY, (128, 512), (128, 512), parameters="x, y", out="(512, 512)")


def changed(program: Program, opcode: Opcode, change: Callable[[Instruction], Instruction]) -> Program:
    def rebuild(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(
            replace(node, body=rebuild(node.body))
            if isinstance(node, Loop)
            else change(node)
            if node.opcode is opcode
            else node
            for node in nodes
        )

    return replace(program, body=rebuild(program.body))


def refuse(program: Program, match: str) -> None:
    with pytest.raises(KernelError, match=match):
        validate(program)


def test_what_the_tracer_writes_is_valid(program: Program) -> None:
    validate(program)


def shifted(access: Access, dimension: int, constant: int) -> Access:
    index = list(access.index)
    start = index[dimension].start
    index[dimension] = replace(index[dimension], start=Affine(start.constant + constant, start.terms))
    return replace(access, index=tuple(index))


@pytest.mark.parametrize("constant", [1, -1, 1 << 40])
def test_no_load_reaches_outside_its_tensor(program: Program, constant: int) -> None:
    refuse(
        changed(
            program,
            Opcode.LOAD,
            lambda node: replace(
                node,
                operands={"src": shifted(node.operands["src"], 1, constant)},  # type: ignore[arg-type]
            ),
        ),
        "Out-of-bound access",
    )


def test_no_store_reaches_outside_its_tensor(program: Program) -> None:
    refuse(
        changed(program, Opcode.STORE, lambda node: replace(node, outputs=(shifted(node.outputs[0], 0, 1),))),
        "Out-of-bound access for tensor `out` on dimension 0: index range \\[1, 512\\] exceed dimension size of 512",
    )


def test_no_table_reaches_outside_its_tensor(program: Program) -> None:
    def with_table(node: Instruction) -> Instruction:
        access = node.outputs[0]
        table = tuple([0] * 511 + [512])
        index = (access.index[0], DimIndex(tables=((1, table),)))
        return replace(node, outputs=(replace(access, index=index),))

    refuse(changed(program, Opcode.STORE, with_table), "Out-of-bound access")


_CHANGES: list[tuple[str, Opcode, Callable[[Instruction], Any], str]] = [
    ("missing operand", Opcode.ACTIVATION, lambda n: {"operands": {"scale": 1.0}}, "lacks operand 'data'"),
    ("extra operand", Opcode.ACTIVATION, lambda n: {"operands": {**n.operands, "more": 1.0}}, "unknown operand"),
    ("number for a tile", Opcode.ACTIVATION, lambda n: {"operands": {**n.operands, "data": 1.0}}, "must be a tile"),
    ("unknown op", Opcode.ACTIVATION, lambda n: {"attributes": {"op": "explode"}}, "op 'explode'"),
    ("missing op", Opcode.ACTIVATION, lambda n: {"attributes": {}}, "lacks attribute 'op'"),
    ("wrong engine", Opcode.ACTIVATION, lambda n: {"engine": Engine.TENSOR}, "tensor engine is not supported"),
    ("no output", Opcode.ACTIVATION, lambda n: {"outputs": ()}, "has 0 outputs"),
    (
        "reduction over partitions",
        Opcode.TENSOR_REDUCE,
        lambda n: {"attributes": {**n.attributes, "axes": (0,)}},
        "axes",
    ),
    ("reduction of no axis", Opcode.TENSOR_REDUCE, lambda n: {"attributes": {**n.attributes, "axes": (7,)}}, "axes"),
    ("unknown buffer", Opcode.STORE, lambda n: {"outputs": (replace(n.outputs[0], buffer=999),)}, "unknown buffer"),
    ("mask over no axis", Opcode.STORE, lambda n: {"mask": (MaskTerm(Affine(), ((5, 1),)),)}, "does not have"),
    ("mask over no loop", Opcode.STORE, lambda n: {"mask": (MaskTerm(Affine(0, ((77, 1),))),)}, "outside of its body"),
    ("other shape", Opcode.STORE, lambda n: {"outputs": (replace(n.outputs[0], shape=(128, 256)),)}, "mismatched"),
    (
        "view of another size",
        Opcode.STORE,
        lambda n: {"outputs": (replace(n.outputs[0], view_shape=(512, 513)),)},
        "is viewed as",
    ),
    (
        "too few indices",
        Opcode.STORE,
        lambda n: {"outputs": (replace(n.outputs[0], index=n.outputs[0].index[:1]),)},
        "is indexed in 1 of 2",
    ),
    ("empty tile", Opcode.STORE, lambda n: {"outputs": (replace(n.outputs[0], shape=(0, 512)),)}, "has shape"),
    (
        "operands swapped",
        Opcode.MATMUL,
        lambda n: {"operands": {"stationary": n.operands["moving"], "moving": n.operands["stationary"]}},
        "exceed architecture limitation",
    ),
    (
        "result on chip stored from HBM",
        Opcode.STORE,
        lambda n: {"operands": {"src": n.outputs[0]}},
        "address space 'psum|sbuf'",
    ),
]


@pytest.mark.parametrize(("opcode", "change", "match"), [c[1:] for c in _CHANGES], ids=[c[0] for c in _CHANGES])
def test_a_malformed_instruction_is_refused(
    program: Program, opcode: Opcode, change: Callable[[Instruction], Any], match: str
) -> None:
    refuse(changed(program, opcode, lambda node: replace(node, **change(node))), match)


def test_writing_an_argument_is_refused(program: Program) -> None:
    identifier = program.inputs[0]
    store = instructions(program, Opcode.STORE)[0]
    access = replace(
        store.outputs[0],
        buffer=identifier,
        view_shape=(128, 512),
        index=(DimIndex(strides=((0, 1),)), DimIndex(strides=((1, 1),))),
    )
    refuse(changed(program, Opcode.STORE, lambda node: replace(node, outputs=(access,))), "immutable parameter")


def test_partitions_must_be_contiguous_and_start_where_engines_reach(program: Program) -> None:
    def with_partition(dim: DimIndex, size: int) -> Callable[[Instruction], Instruction]:
        def change(node: Instruction) -> Instruction:
            tile = node.outputs[0]
            moved = replace(tile, shape=(size, tile.shape[1]), index=(dim, *tile.index[1:]))
            operand = node.operands["data"]
            assert isinstance(operand, Access)
            return replace(
                node,
                outputs=(moved,),
                operands={**node.operands, "data": replace(operand, shape=(size, operand.shape[1]))},
            )

        return change

    refuse(changed(program, Opcode.ACTIVATION, with_partition(DimIndex(strides=((0, 2),)), 64)), "contiguous")
    refuse(
        changed(program, Opcode.ACTIVATION, with_partition(DimIndex(Affine(32), ((0, 1),)), 64)),
        "Invalid access of 64 partitions starting at partition 32",
    )
    refuse(changed(program, Opcode.ACTIVATION, with_partition(DimIndex(strides=((1, 1),)), 1)), "Failed to infer tile")


def test_loops_are_finite_and_unique(program: Program) -> None:
    def with_loop(**fields: int) -> Program:
        return replace(
            program, body=tuple(replace(node, **fields) if isinstance(node, Loop) else node for node in program.body)
        )

    refuse(with_loop(trips=0), "0 iterations")
    refuse(with_loop(trips=-5), "-5 iterations")
    refuse(with_loop(trips=1 << 60), "more than")
    loop = next(node for node in program.body if isinstance(node, Loop))
    refuse(replace(program, body=(*program.body, loop)), "appears twice")


def test_buffers_are_checked(program: Program) -> None:
    def with_buffer(space: Space, **fields: object) -> Program:
        buffers = dict(program.buffers)
        identifier = next(b.id for b in buffers.values() if b.space is space and b.role is not Role.INPUT)
        buffers[identifier] = replace(buffers[identifier], **fields)  # type: ignore[arg-type]
        return replace(program, buffers=buffers)

    refuse(with_buffer(Space.SBUF, shape=(129, 512)), "number of partitions 129")
    refuse(with_buffer(Space.SBUF, dtype="object"), "unknown dtype")
    refuse(with_buffer(Space.SBUF, shape=(128, -4)), "has shape")
    refuse(with_buffer(Space.SBUF, block_dims=5), "block dimensions")
    refuse(with_buffer(Space.SBUF, id=999), "calls itself")
    refuse(with_buffer(Space.SBUF, loops=(55,)), "outside of its parent scope")
    refuse(with_buffer(Space.HBM, shape=(1 << 20, 1 << 20)), "HBM tensors take")
    refuse(replace(program, outputs=()), "at least one")
    refuse(replace(program, outputs=(999,)), "no HBM tensor")
    refuse(replace(program, target="cpu"), "unknown target")


def test_constants_are_bounded_and_typed() -> None:
    program = trace("nl.store(out, nl.load(nl.shared_constant(np.zeros((128, 512), np.float32))))")
    ((identifier, values),) = program.constants.items()
    refuse(replace(program, constants={identifier: values.astype(np.float64)}), "not of its dtype")
    refuse(replace(program, constants={identifier: values[:64]}), "of its shape")
    refuse(replace(program, constants={}), "has no values")
    rows = MAX_CONSTANT_BYTES // 512 // 4 + 1
    big = np.zeros((rows, 512), np.float32)
    buffers = {**program.buffers, identifier: replace(program.buffers[identifier], shape=big.shape)}
    refuse(replace(program, buffers=buffers, constants={identifier: big}), "constants take")


def test_an_output_without_a_store_is_refused(program: Program) -> None:
    bare = replace(program, body=tuple(node for node in program.body if not isinstance(node, Loop)))
    refuse(bare, "never written to")


@settings(max_examples=200)
@given(st.data())
def test_the_bounds_proof_never_accepts_a_reachable_position(data: st.DataObject) -> None:
    """Whatever the proof accepts holds for every point; with one matching mask it accepts all that holds."""
    small = st.integers(-6, 6)
    extents = {(0, 0): data.draw(st.integers(1, 5)), (1, 0): data.draw(st.integers(1, 5))}
    expression = Linear(data.draw(small), {key: data.draw(small) for key in extents})
    masks = [
        Linear(data.draw(st.integers(-12, 12)), {key: data.draw(small) for key in extents})
        for _ in range(data.draw(st.integers(0, 2)))
    ]
    limit = data.draw(st.integers(-10, 10))
    reached = [
        expression.constant + expression.coefficients[0, 0] * i + expression.coefficients[1, 0] * j
        for i in range(extents[0, 0])
        for j in range(extents[1, 0])
        if all(m.constant + m.coefficients[0, 0] * i + m.coefficients[1, 0] * j >= 0 for m in masks)
    ]
    if bounds.stays_below(expression, limit, masks, extents):
        assert all(value <= limit for value in reached)
    if bounds.stays_above(expression, limit, masks, extents):
        assert all(value >= limit for value in reached)


def test_masks_that_kernels_write_keep_an_access_inside() -> None:
    body = """
    i_p = nl.arange(128)[:, None]
    i_f = nl.arange(512)[None, :]
    for i in nl.affine_range(3):
        for j in nl.affine_range(2):
            inside = (i * 128 + i_p < 300) & (j * 512 + i_f < 700)
            t = nl.load(x[i * 128 + i_p, j * 512 + i_f], mask=inside)
            e = nl.exp(t, mask=inside)
            nl.store(out[i * 128 + i_p, j * 512 + i_f], e, mask=inside)
    """
    validate(trace(body, (300, 700)))
    with pytest.raises(KernelError, match="index range \\[0, 1023\\] exceed dimension size of 699"):
        trace(body, (300, 699))
