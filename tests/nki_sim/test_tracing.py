"""What the tracer makes of loops, assignments, accumulation, masks and indices."""

from __future__ import annotations

import pytest
from kernel_texts import IMPORTS, instructions, kernel_text, only, opcodes, specs, trace, trips

from accelopt_ray.devices.protocol import TensorSpec
from accelopt_ray.nki_sim.errors import KernelError
from accelopt_ray.nki_sim.listing import format_program
from accelopt_ray.nki_sim.program import (
    Access,
    Affine,
    DimIndex,
    Engine,
    Loop,
    LoopKind,
    MaskTerm,
    Opcode,
    Program,
    Role,
    Space,
)
from accelopt_ray.nki_sim.tracer import trace_kernel


def buffer_of(program: Program, access: object) -> str:
    assert isinstance(access, Access)
    return program.buffers[access.buffer].name


def test_loops_are_traced_once_with_affine_indices() -> None:
    program = trace(
        """
        for i in nl.affine_range(4):
            for j in nl.sequential_range(8):
                nl.store(out[i * 128:(i + 1) * 128, j * 64:(j + 1) * 64],
                         nl.load(x[i * 128:(i + 1) * 128, j * 64:(j + 1) * 64]))
        """,
        (512, 512),
    )
    (outer,) = program.body
    assert isinstance(outer, Loop) and (outer.trips, outer.kind) == (4, LoopKind.AFFINE)
    (inner,) = outer.body
    assert isinstance(inner, Loop) and (inner.trips, inner.kind) == (8, LoopKind.SEQUENTIAL)
    store = only(program, Opcode.STORE)
    assert store.outputs[0].index == (
        DimIndex(Affine(0, ((outer.id, 128),)), ((0, 1),)),
        DimIndex(Affine(0, ((inner.id, 64),)), ((1, 1),)),
    )
    assert store.outputs[0].shape == (128, 64)


def test_python_range_is_a_sequential_loop_with_start_and_step() -> None:
    program = trace("for k in range(64, 512, 64):\n    nl.store(out[:, k:k + 64], nl.load(x[:, k:k + 64]))")
    (loop,) = program.body
    assert isinstance(loop, Loop) and (loop.trips, loop.kind) == (7, LoopKind.SEQUENTIAL)
    assert only(program, Opcode.LOAD).operands["src"].index[1].start == Affine(64, ((loop.id, 64),))  # type: ignore[union-attr]


def test_static_range_comprehensions_and_lists_are_unrolled() -> None:
    program = trace("for k in nl.static_range(4):\n    nl.store(out[:, k * 128:(k + 1) * 128], nl.load(x[:, 0:128]))")
    assert opcodes(program) == [Opcode.LOAD, Opcode.STORE] * 4
    program = trace(
        """
        tiles = [nl.load(x[:, k * 128:(k + 1) * 128]) for k in nl.affine_range(4)]
        for position, tile in enumerate(tiles):
            nl.store(out[:, position * 128:(position + 1) * 128], tile)
        """
    )
    assert opcodes(program) == [Opcode.LOAD] * 4 + [Opcode.STORE] * 4


@pytest.mark.parametrize(
    "use",
    [
        "if i > 0:\n        pass",
        "k = 1 if i < 2 else 0",
        "k = [10, 20, 30, 40][i]",
        "k = i % 3",
        "k = int(i)",
        "k = {0: 1, 1: 2, 2: 3, 3: 4}[i]",
        "k = i / 2",
        "k = min(i, 2)",
        "k = i * i",
        "try:\n        k = [1, 2, 3, 4][i]\n    except:\n        k = 7",
        "for j in range(i):\n        pass",
        "k = f'{i}'\n    assert k.isdigit() or i == 0",
    ],
)
def test_a_loop_unrolls_when_its_index_is_needed(use: str) -> None:
    program = trace(
        f"for i in nl.affine_range(4):\n    {use}\n    for n in nl.affine_range(2):\n"
        "        c = i * 128 + n * 64\n        nl.store(out[:, c:c + 64], nl.load(x[:, c:c + 64]))"
    )
    expected = 4 if not use.startswith("k = f") else len(instructions(program, Opcode.STORE))
    stores = instructions(program, Opcode.STORE)
    assert len(stores) == expected
    assert all(list(trips(program, store))[-1] == 2 for store in stores)


def test_what_holds_for_all_iterations_does_not_unroll() -> None:
    program = trace(
        """
        for i in nl.affine_range(4):
            assert i < 4 and i >= 0 and i != 7
            a = (i * 512 + 128) // 128
            b = (i * 512 + 3) % 128
            nl.store(out[:, b - 3 + a * 32 - 32:b - 3 + a * 32], nl.load(x[:, 0:32]))
        """
    )
    assert len(instructions(program, Opcode.STORE)) == 1


def test_only_the_loop_that_decides_unrolls() -> None:
    program = trace(
        """
        for i in nl.affine_range(3):
            for j in nl.affine_range(4):
                if j == 3:
                    break
                nl.store(out[:, (i * 4 + j) * 32:(i * 4 + j + 1) * 32], nl.load(x[:, 0:32]))
        """
    )
    (outer,) = program.body
    assert isinstance(outer, Loop) and outer.trips == 3
    assert len(outer.body) == 6


def test_python_state_of_a_loop_without_instructions_is_that_of_all_iterations() -> None:
    program = trace(
        """
        widths = []
        total = 0
        for i in range(4):
            widths.append(64 * (i + 1))
            total += 64
        assert widths == [64, 128, 192, 256] and total == 256
        nl.store(out[:, 0:total], nl.load(x[:, 0:widths[-1]]))
        """
    )
    assert only(program, Opcode.LOAD).outputs[0].shape == (128, 256)


def test_loops_without_iterations_or_instructions_leave_nothing() -> None:
    program = trace(
        "for i in nl.affine_range(0):\n    nl.load(x)\nfor i in nl.affine_range(1):\n    nl.store(out, nl.load(x))"
    )
    (loop,) = program.body
    assert isinstance(loop, Loop) and loop.trips == 1


def test_a_fresh_result_names_its_destination() -> None:
    program = trace("t = nl.ndarray((128, 512), dtype=nl.float32)\nt[...] = nl.load(x)\nnl.store(out, t)")
    assert opcodes(program) == [Opcode.LOAD, Opcode.STORE]
    assert buffer_of(program, only(program, Opcode.LOAD).outputs[0]) == "t"
    program = trace("t = nl.ndarray((128, 512), dtype=nl.float32)\nr = nl.load(x)\nt[:, :] = r\nnl.store(out, t)")
    assert opcodes(program) == [Opcode.LOAD, Opcode.STORE]


@pytest.mark.parametrize(
    "body",
    [
        "a = nl.load(x)\nb = nl.exp(a)\nt[...] = a",  # used before
        "t[...] = 0.0\na = nl.load(x)\nb = nl.exp(t)\nt[...] = a",  # the destination was read in between
        "a = nl.load(x)\nfor i in nl.sequential_range(2):\n    t[...] = a",  # another loop body
        "a = nl.load(x, dtype=nl.bfloat16)\nt[...] = a",  # another type was asked for
        "a = nl.load(x[:, 0:1])\nt[...] = a",  # repeated along an axis
    ],
)
def test_anything_else_is_copied(body: str) -> None:
    program = trace(
        "t = nl.ndarray((128, 512), dtype=nl.float32)\nu = nl.ndarray((128, 512), dtype=nl.float32)\n"
        f"{body}\nnl.store(out, t)"
    )
    assert len(instructions(program, Opcode.COPY)) == 1


def test_a_result_assigned_twice_is_copied_twice() -> None:
    program = trace(
        "t = nl.ndarray((128, 512), dtype=nl.float32)\nu = nl.ndarray((128, 512), dtype=nl.float32)\n"
        "a = nl.load(x)\nt[...] = a\nu[...] = a\nnl.store(out, nl.add(t, u))"
    )
    assert opcodes(program)[:3] == [Opcode.LOAD, Opcode.COPY, Opcode.COPY]
    assert {buffer_of(program, node.outputs[0]) for node in instructions(program, Opcode.COPY)} == {"t", "u"}


def test_a_matmul_result_reaches_sbuf_by_a_copy() -> None:
    program = trace(
        "t = nl.ndarray((128, 512), dtype=nl.float32)\n"
        "t[...] = nisa.nc_matmul(nl.load(x[:, 0:128]), nl.load(x))\nnl.store(out, t)"
    )
    copy = only(program, Opcode.COPY)
    assert program.buffers[only(program, Opcode.MATMUL).outputs[0].buffer].space is Space.PSUM
    assert buffer_of(program, copy.outputs[0]) == "t"


def test_adding_a_matmul_in_psum_accumulates() -> None:
    for statement in ("acc += {}", "acc[...] += {}", "acc[0:128, 0:512] += {}"):
        program = trace(
            "acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)\nfor k in nl.affine_range(4):\n    "
            + statement.format("nisa.nc_matmul(nl.load(x[:, 0:128]), nl.load(x))")
            + "\nnl.store(out, nl.copy(acc))"
        )
        matmul = only(program, Opcode.MATMUL)
        assert matmul.accumulate
        buffer = program.buffers[matmul.outputs[0].buffer]
        assert (buffer.name, buffer.fill, buffer.loops) == ("acc", 0.0, ())
        assert opcodes(program).count(Opcode.TENSOR_TENSOR) == 0


def test_writing_the_sum_out_is_a_vector_instruction() -> None:
    program = trace(
        """
        acc = nl.zeros((128, 512), dtype=nl.float32, buffer=nl.psum)
        for k in nl.sequential_range(4):
            acc[...] = acc + nisa.nc_matmul(nl.load(x[:, 0:128]), nl.load(x))
        nl.store(out, nl.copy(acc))
        """
    )
    assert not only(program, Opcode.MATMUL).accumulate
    add = only(program, Opcode.TENSOR_TENSOR)
    assert buffer_of(program, add.outputs[0]) == buffer_of(program, add.operands["a"]) == "acc"


def test_in_place_operators_on_a_tile() -> None:
    program = trace(
        """
        t = nl.zeros((128, 512), dtype=nl.float32)
        for i in nl.affine_range(4):
            t += nl.load(x)
            t[:, 0:64] *= 2.0
        t -= 1.0
        t /= nl.load(x[:, 0:1])
        nl.store(out, t)
        """
    )
    assert opcodes(program).count(Opcode.COPY) == 0
    for node in instructions(program):
        if node.opcode in (Opcode.TENSOR_TENSOR, Opcode.TENSOR_SCALAR):
            assert buffer_of(program, node.outputs[0]) == "t"


def test_block_dimensions_select_a_tile() -> None:
    program = trace(
        """
        t = nl.ndarray((4, 2, nl.par_dim(128), 64), dtype=nl.float32, buffer=nl.sbuf)
        for i in nl.affine_range(4):
            for j in nl.affine_range(2):
                t[i, j] = nl.load(x[:, (i * 2 + j) * 64:(i * 2 + j + 1) * 64])
        nl.store(out[:, 0:64], t[3, 1, nl.arange(128)[:, None], nl.arange(64)[None, :]])
        """
    )
    load = only(program, Opcode.LOAD)
    assert program.buffers[load.outputs[0].buffer].block_dims == 2
    assert load.outputs[0].shape == (128, 64)
    assert [dim.start.terms for dim in load.outputs[0].index] == [((0, 1),), ((1, 1),), (), ()]
    assert [dim.start.constant for dim in only(program, Opcode.STORE).operands["src"].index] == [3, 1, 0, 0]  # type: ignore[union-attr]


def test_buffers_belong_to_the_loops_that_create_them() -> None:
    program = trace(
        "for i in nl.affine_range(4):\n    t = nl.load(x)\n    for j in nl.affine_range(2):\n        u = nl.exp(t)\n"
        "        nl.store(out[:, i * 128 + j * 64:i * 128 + j * 64 + 64], u[:, 0:64])"
    )
    loops = {buffer.name: buffer.loops for buffer in program.buffers.values()}
    assert loops["t"] == (0,) and loops["u"] == (0, 1) and loops["out"] == ()


def test_masks_become_terms_over_the_axes_of_the_result() -> None:
    program = trace(
        """
        i_p = nl.arange(128)[:, None]
        i_f = nl.arange(64)[None, :]
        for i in nl.affine_range(8):
            m = (i * 64 + i_f < 500) & (i_p <= 99) & (i_p >= 0)
            nl.store(out[i_p, i * 64 + i_f], nl.load(x[i_p, i * 64 + i_f], mask=m), mask=m)
        """,
        (100, 500),
    )
    terms = (MaskTerm(Affine(499, ((0, -64),)), ((1, -1),)), MaskTerm(Affine(99), ((0, -1),)))
    assert only(program, Opcode.LOAD).mask == terms
    assert only(program, Opcode.STORE).mask == terms


def test_masks_of_a_matmul_follow_the_operands_axes() -> None:
    program = trace(
        """
        k = nl.arange(128)[:, None]
        m = nl.arange(64)[None, :]
        n = nl.arange(512)[None, :]
        r = nisa.nc_matmul(nl.load(x[k, m]), nl.load(x[k, n]), mask=(k < 100) & (m < 50) & (n < 400))
        nl.store(out[0:64, :], nl.copy(r))
        """
    )
    matmul = only(program, Opcode.MATMUL)
    assert matmul.mask == (MaskTerm(Affine(49), ((0, -1),)), MaskTerm(Affine(399), ((1, -1),)))
    assert matmul.attributes["contraction_mask"] == (MaskTerm(Affine(99), ((0, -1),)),)


def test_a_mask_that_fits_both_operands_is_not_guessed() -> None:
    body = "n = nl.arange(128)[None, :]\nnisa.nc_matmul(nl.load(x[:, 0:128]), nl.load(x[:, 0:128]), mask=n < 50)"
    with pytest.raises(KernelError, match="fits the free axis of both"):
        trace(body)
    program = trace(
        """
        n = nl.arange(128)[None, :]
        a = nl.load(x[:, 0:128])
        b = nl.load(x)
        for i in nl.affine_range(4):
            r = nisa.nc_matmul(a, b[:, i * 128:(i + 1) * 128], mask=i * 128 + n < 500)
            nl.store(out[:, i * 128:(i + 1) * 128], nl.copy(r))
        """
    )
    assert only(program, Opcode.MATMUL).mask[0].strides == ((1, -1),)


def test_integers_beside_an_arange_keep_an_axis() -> None:
    program = trace(
        """
        t = nl.load(x)
        nl.store(out[nl.arange(128)[:, None], 3], t[nl.arange(128)[:, None], 5])
        nl.store(out[:, 4], t[:, 6])
        nl.store(out[7:8, :], t[32, :])
        """
    )
    shapes = [store.outputs[0].shape for store in instructions(program, Opcode.STORE)]
    assert shapes == [(128, 1), (128, 1), (1, 512)]


def test_two_axes_may_address_one_dimension() -> None:
    program = trace(
        """
        p = nl.arange(128)[:, None, None]
        a = nl.arange(4)[None, :, None]
        b = nl.arange(128)[None, None, :]
        t = nl.ndarray((128, 512), dtype=nl.float32)
        t[p, 128 * a + b] = nl.load(x[p, a, b])
        nl.store(out, t)
        """,
        (128, 4, 128),
        out="(128, 512)",
    )
    load = only(program, Opcode.LOAD)
    assert load.outputs[0].shape == (128, 4, 128)
    assert load.outputs[0].index[1].strides == ((1, 128), (2, 1))


def test_division_and_remainder_of_an_axis_are_tables() -> None:
    program = trace(
        "f = nl.arange(512)[None, :]\np = nl.arange(128)[:, None]\n"
        "for i in nl.sequential_range(2):\n"
        "    nl.store(out[p, (i * 512 + f) // 2 % 256], nl.load(x[p, f]), mask=i < 1)"
    )
    index = only(program, Opcode.STORE).outputs[0].index[1]
    assert index.tables == ((1, tuple(value // 2 % 256 for value in range(512))),)


def test_mgrid_ds_and_slices_are_the_same_access() -> None:
    texts = [
        "g = nl.mgrid[0:128, 0:64]\n    nl.store(out[g.p, i * 64 + g.x], nl.load(x[g.p, i * 64 + g.x]))",
        "p, f = nl.mgrid[0:128, 0:64]\n    nl.store(out[p, i * 64 + f], nl.load(x[p, i * 64 + f]))",
        "nl.store(out[:, nl.ds(i * 64, 64)], nl.load(x[0:128, nl.ds(i * 64, 64)]))",
        "nl.store(out[:, i * 64:i * 64 + 64], nl.load(x[:, i * 64:(i + 1) * 64]))",
        "nl.store(out[:, i * 64 + nl.arange(64)[None, :]][:, :], 0.0)",
    ]
    bodies = [trace("for i in nl.affine_range(8):\n    " + text).body for text in texts[:4]]
    strip = [[node for _, node in trace("for i in nl.affine_range(8):\n    " + text).walk()] for text in texts[:4]]
    assert len(bodies) == 4
    for other in strip[1:]:
        assert [n.outputs for n in other] == [n.outputs for n in strip[0]]
        assert [n.operands for n in other] == [n.operands for n in strip[0]]
    with pytest.raises(KernelError, match="Mixing basic"):
        trace("for i in nl.affine_range(8):\n    " + texts[4])


def test_slices_of_slices_and_steps_compose() -> None:
    program = trace("t = nl.load(x)\nnl.store(out[:, 0:16], t[:, 64:256][:, 8:72][:, 0:64:4])")
    index = only(program, Opcode.STORE).operands["src"].index[1]  # type: ignore[union-attr]
    assert (index.start.constant, index.strides) == (72, ((1, 4),))


def test_reshapes_are_views() -> None:
    program = trace(
        """
        t = nl.load(x.reshape((128, 8, 64)))
        u = t.reshape((128, 512))
        v = u[:, 64:128].reshape((128, 4, 16))
        nl.store(out.reshape((128, 8, 64))[:, 0:4, 0:16], v)
        w = nl.load(y.reshape((1, 512)))
        nl.store(out[0:1, :], w)
        """,
        (128, 512),
        (512,),
        parameters="x, y",
    )
    load, second = instructions(program, Opcode.LOAD)
    assert load.operands["src"].view_shape == (128, 8, 64)  # type: ignore[union-attr]
    assert second.operands["src"].view_shape == (1, 512)  # type: ignore[union-attr]
    source = instructions(program, Opcode.STORE)[0].operands["src"]
    assert isinstance(source, Access)
    assert source.view_shape == (128, 512) and source.shape == (128, 4, 16)
    assert source.index[1] == DimIndex(Affine(64), ((1, 16), (2, 1)))


def test_broadcasts_of_hbm_are_views_and_of_partitions_instructions() -> None:
    program = trace("nl.store(out, nl.load(x[0:1, :].broadcast_to((128, 512))))")
    source = only(program, Opcode.LOAD).operands["src"]
    assert isinstance(source, Access)
    assert source.shape == (128, 512) and source.index[0].strides == ()
    program = trace("nl.store(out, nl.load(x[0:1, :]).broadcast_to((128, 512)))")
    assert Opcode.PARTITION_BROADCAST in opcodes(program)
    program = trace("nl.store(out, nl.load(x[:, 0:1]).broadcast_to((128, 512)))")
    assert opcodes(program) == [Opcode.LOAD, Opcode.STORE]


def test_engines_are_what_the_source_asks_for() -> None:
    program = trace(
        """
        t = nl.load(x)
        a = nisa.tensor_copy(t, engine=nisa.scalar_engine)
        b = nisa.tensor_copy(t)
        c = nisa.tensor_tensor(a, b, op=np.add, engine=nki.isa.gpsimd_engine)
        d = nisa.tensor_scalar(c, np.add, 1.0, engine=nisa.vector_engine)
        e = nisa.memset((128, 512), 0, dtype=np.float32, engine=nki.isa.unknown_engine)
        f = nisa.nc_transpose(t[0:32, 0:32], engine=nisa.vector_engine)
        g = nisa.nc_transpose(t[:, 0:128], engine=nisa.tensor_engine)
        nl.store(out, nl.add(d, e))
        nl.store(out[0:32, 0:32], f)
        nl.store(out[:, 0:128], g)
        """
    )
    engines = [node.engine for node in instructions(program) if node.opcode not in (Opcode.LOAD, Opcode.STORE)]
    assert engines == [
        Engine.SCALAR,
        Engine.ANY,
        Engine.GPSIMD,
        Engine.VECTOR,
        Engine.ANY,
        Engine.VECTOR,
        Engine.TENSOR,
        Engine.ANY,
    ]
    with pytest.raises(KernelError, match="tensor engine is not supported in 'tensor_copy'"):
        trace("nl.store(out, nisa.tensor_copy(nl.load(x), engine=nisa.tensor_engine))")


def test_a_high_level_matmul_transposes_its_left_side() -> None:
    program = trace("nl.store(out, nl.matmul(nl.load(x[:, 0:128]), nl.load(x)))")
    assert opcodes(program) == [Opcode.LOAD, Opcode.LOAD, Opcode.TRANSPOSE, Opcode.COPY, Opcode.MATMUL, Opcode.STORE]
    assert only(program, Opcode.MATMUL).attributes["high_level"] is True
    program = trace("nl.store(out, nl.matmul(nl.load(x[:, 0:128]), nl.load(x), transpose_x=True))")
    assert Opcode.TRANSPOSE not in opcodes(program)


def test_dtypes_follow_the_promotion_rules() -> None:
    program = trace(
        """
        h = nl.load(x, dtype=nl.bfloat16)
        q = nl.load(x, dtype=nl.float16)
        a = nl.add(h, q)
        b = nl.multiply(h, 2.0)
        c = nl.multiply(h, 2)
        d = nl.less(h, q)
        e = nisa.tensor_tensor(nl.load(x, dtype=nl.int8), nl.load(x, dtype=nl.uint8), op=np.add)
        nl.store(out, a)
        """
    )
    named = {buffer.name: buffer.dtype for buffer in program.buffers.values()}
    assert [named[name] for name in "abcde"] == ["float32", "float32", "bfloat16", "uint8", "int16"]


def test_roles_names_and_lines() -> None:
    text = kernel_text(
        "scratch = nl.ndarray((128, 512), dtype=x.dtype, buffer=nl.hbm)\n"
        "e = nl.load(nl.shared_constant(np.ones((128, 512), np.float32)))\n"
        "nl.store(scratch, e)\nnl.store(out, nl.load(scratch) + eps)",
        parameters="x, eps",
    )
    program = trace_kernel(text, specs((128, 512), 0.5))
    roles = {buffer.name: buffer.role for buffer in program.buffers.values()}
    assert roles["x"] is Role.INPUT and roles["out"] is Role.OUTPUT and roles["scratch"] is Role.TEMPORARY
    assert Role.CONSTANT in roles.values()
    lines = text.splitlines()
    for node in instructions(program):
        assert "nl." in lines[node.line - 1]
    scratch = next(buffer for buffer in program.buffers.values() if buffer.name == "scratch")
    assert lines[scratch.line - 1].strip().startswith("scratch =")
    assert program.inputs == (0,)


def test_several_outputs_and_a_reshaped_one() -> None:
    program = trace(
        "second = nl.ndarray((512,), dtype=nl.float32, buffer=nl.shared_hbm)\nt = nl.load(x)\nnl.store(out, t)\n"
        "nl.store(second.reshape((1, 512)), t[0:1, :])\nreturn out.reshape((512, 128)), second"
    )
    assert [program.buffers[identifier].shape for identifier in program.outputs] == [(512, 128), (512,)]


def test_decorators_and_imports_of_every_form() -> None:
    body = (
        "    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)\n"
        "    nl.store(out, nl.load(x))\n    return out\n"
    )
    for decorator in (
        "",
        "@nki.jit\n",
        "@nki.jit()\n",
        "@nki.trace\n",
        "@nki.baremetal(save_neff_name='a')\n",
        "@nki.benchmark(warmup=1)\n",
        "@nki.profile(working_directory='/tmp')\n",
        "@nki.jit\n@nki.compiler.skip_middle_end_transformations\n",
        "@nki.jit(mode='torchxla')\n",
    ):
        program = trace_kernel(IMPORTS + f"{decorator}def kernel(x):\n" + body, specs((128, 512)))
        assert opcodes(program) == [Opcode.LOAD, Opcode.STORE]
    inside = (
        "import neuronxcc.nki as nki\n@nki.jit\ndef optimized_kernel(x):\n    import numpy as np\n"
        "    import neuronxcc.nki.language as nl\n    from neuronxcc.nki.language import par_dim\n"
        "    from neuronxcc.nki import trace\n    import neuronxcc.nki.typing as nt\n    ' a marker '\n"
    )
    assert opcodes(trace_kernel(inside + body, specs((128, 512)))) == [Opcode.LOAD, Opcode.STORE]


def test_kernel_files_may_define_dataclasses() -> None:
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        + IMPORTS
        + (
            "@dataclass(frozen=True)\nclass Tiles:\n    width: int\n"
            "@nki.jit\ndef kernel(x):\n    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)\n"
            "    w = Tiles(256).width\n    for i in nl.affine_range(2):\n"
            "        nl.store(out[:, i * w:(i + 1) * w], nl.load(x[:, i * w:(i + 1) * w]))\n    return out\n"
        )
    )
    assert opcodes(trace_kernel(text, specs((128, 512)))) == [Opcode.LOAD, Opcode.STORE]


def test_helpers_and_nested_kernels_are_inlined() -> None:
    text = IMPORTS + (
        "def scale(t, by):\n    return nl.multiply(t, by)\n@nki.jit\ndef inner(t):\n    return scale(t, 2.0)\n"
        "@nki.jit\ndef kernel(x):\n    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)\n"
        "    nl.store(out, inner(nl.load(x)))\n    return out\n"
    )
    assert opcodes(trace_kernel(text, specs((128, 512)))) == [Opcode.LOAD, Opcode.TENSOR_SCALAR, Opcode.STORE]


def test_the_shims_are_gone_after_tracing() -> None:
    import sys

    trace("nl.store(out, nl.load(x))")
    assert not [name for name in sys.modules if name.split(".")[0] == "neuronxcc"]
    with pytest.raises(KernelError):
        trace("nl.nothing()")
    assert not [name for name in sys.modules if name.split(".")[0] == "neuronxcc"]


def test_what_a_kernel_does_to_the_modules_ends_with_it() -> None:
    trace("nl.load = nisa.activation = None\nnl.store(out, 0.0)")
    assert opcodes(trace("nl.store(out, nl.load(x))")) == [Opcode.LOAD, Opcode.STORE]


def test_an_unknown_target_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="unknown target"):
        trace_kernel(kernel_text("nl.store(out, nl.load(x))"), [TensorSpec((128, 512))], target="gpu")


def test_the_grid_becomes_loops_around_the_kernel() -> None:
    text = kernel_text(
        "i = nl.program_id(0)\nj = nl.program_id(axis=1)\n"
        "nl.store(out[i * 128:(i + 1) * 128, j * 64:(j + 1) * 64], nl.load(x[i * 128:(i + 1) * 128, 0:64]))"
    )
    for launch in ("kernel[4, 8]", "kernel[nl.nc(4), 8]", "kernel[(4, nl.spmd_dim(2, 4))]"):
        program = trace_kernel(f"{text}\nkernel = {launch}\n", specs((512, 512)))
        assert list(trips(program, only(program, Opcode.STORE))) == [4, 8]
    wrapper = text.replace("def kernel", "def inner") + "\ndef kernel(x):\n    return inner[4, 8](x)\n"
    program = trace_kernel(wrapper, specs((512, 512)))
    assert list(trips(program, only(program, Opcode.STORE))) == [4, 8]


def test_the_listing_shows_loops_accesses_and_masks() -> None:
    program = trace(
        "p = nl.arange(128)[:, None]\nf = nl.arange(64)[None, :]\nfor i in nl.affine_range(8):\n"
        "    t = nl.load(x[p, i * 64 + f], mask=i * 64 + f < 500)\n    nl.store(out[p, i * 64 + f], nl.exp(t))"
    )
    text = format_program(program)
    assert "for i0 in affine(8):" in text
    assert "load.dma(src=x%0[p, 64*i0 + x]:128x64) where -64*i0 + 499 + -1*x >= 0" in text
    assert "activation.scalar(" in text and "op=exp" in text


def test_control_helpers_that_do_nothing_here() -> None:
    program = trace("t = nl.load(x)\nnl.device_print('t', t)\nnl.store(out, t)")
    assert opcodes(program) == [Opcode.LOAD, Opcode.STORE]
