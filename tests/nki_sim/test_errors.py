"""What a kernel's author reads: one test for each documented error that the tracer raises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernel_texts import IMPORTS, kernel_text, specs, trace

from accelopt_ray.nki_sim.errors import KernelError
from accelopt_ray.nki_sim.tracer import trace_kernel
from accelopt_ray.outcome import EvaluationOutcome


def failure(body: str, *inputs: object, **options: str) -> KernelError:
    with pytest.raises(KernelError) as caught:
        trace(body, *inputs, **options)
    return caught.value


def failure_of_file(text: str, *inputs: object, entry: str = "kernel") -> KernelError:
    with pytest.raises(KernelError) as caught:
        trace_kernel(IMPORTS + text, specs(*inputs), entry)
    return caught.value


#: Documented code, statements that raise it, and what the message must say.
_CASES = [
    (
        "num_partition_exceed_arch_limit",
        "t = nl.zeros((256, 1024), dtype=np.float32, buffer=nl.sbuf)",
        "number of partitions 256 exceed architecture limitation of 128.",
    ),
    (
        "num_partition_exceed_arch_limit",
        "nl.load(y)",
        "number of partitions 4096 exceed architecture limitation of 128.",
    ),
    (
        "num_partition_mismatch",
        "a = nl.load(x)\nb = nl.load(x[0:1, :])\nnisa.tensor_tensor(a, b, op=nl.add)",
        "number of partitions (dimension 0 size of a tile) mismatch in parameters (data1[128, 512], data2[1, 512]) of "
        "'tensor_tensor'",
    ),
    (
        "num_partition_mismatch",
        "nl.load(x) + nl.load(x[0:1, :])",
        "number of partitions (dimension 0 size of a tile) mismatch in parameters (x[128, 512], y[1, 512]) of 'add'",
    ),
    (
        "size_of_dimension_exceed_arch_limit",
        "nl.transpose(nl.load(x))",
        "size of dimension 1 in 'x[128, 512]' of 'transpose' exceed architecture limitation of 128.",
    ),
    (
        "size_of_dimension_exceed_arch_limit",
        "nisa.nc_matmul(nl.load(x), nl.load(x))",
        "size of dimension 1 in 'stationary[128, 512]' of 'nc_matmul' exceed architecture limitation of 128.",
    ),
    (
        "size_of_dimension_exceed_arch_limit",
        "nisa.nc_matmul(nl.load(x[:, 0:128]), nl.load(y[0:128, 0:1024]))",
        "size of dimension 1 in 'moving[128, 1024]' of 'nc_matmul' exceed architecture limitation of 512.",
    ),
    (
        "exceed_max_supported_dimension",
        "t = nl.zeros((64, 32, 2), dtype=np.float32)\nnl.transpose(t)",
        "parameter 'x[64, 32, 2]' of 'transpose' exceed max supported number of dimensions of 2.",
    ),
    (
        "tensor_access_out_of_bound",
        "for i in nl.affine_range(8):\n    t = nl.mgrid[0:128, 0:512]\n"
        "    nl.store(w[t.p, i * 512 + t.x], nl.load(x))\nreturn w",
        "Out-of-bound access for tensor `w` on dimension 1: index range [0, 4095] exceed dimension size of 4000",
    ),
    (
        "unsupported_memory",
        "t = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.sbuf)\nnl.load(t)",
        "Expected operand 'src' of 'load' to be in address space 'hbm', but got a tile in 'sbuf' instead.",
    ),
    (
        "unsupported_memory",
        "nl.exp(x)",
        "Expected operand 'x' of 'exp' to be in address space 'psum|sbuf', but got a tile in 'hbm' instead.",
    ),
    (
        "unsupported_memory",
        "m = nisa.nc_matmul(nl.load(x[:, 0:128]), nl.load(x))\nnisa.nc_matmul(nl.load(x[:, 0:128]), m)",
        "Expected operand 'moving' of 'nc_matmul' to be in address space 'sbuf', but got a tile in 'psum' instead.",
    ),
    (
        "unexpected_output_dependencies",
        "a = nl.ndarray((4, nl.par_dim(128), 512), dtype=nl.float32, buffer=nl.sbuf)\n"
        "for i in nl.affine_range(4):\n    a[0] = 0",
        "Unexpected output dependencies, different iterations of i loop write to `a[0",
    ),
    (
        "unexpected_output_dependencies",
        "for i in nl.affine_range(4):\n    nl.store(out, nl.load(x))",
        "Unexpected output dependencies, different iterations of i loop write to `out[",
    ),
    (
        "local_variable_used_out_of_scope",
        "for i in range(4):\n    tmp = nl.load(x)\nnl.store(out, tmp)",
        "Local variable 'tmp' is referenced outside of its parent scope",
    ),
    (
        "local_variable_used_out_of_scope",
        "for i in range(4):\n    if i < 2:\n        tmp = nl.load(x)\n    else:\n        tmp = nl.load(out)\n"
        "    nl.store(out, tmp)",
        "Local variable 'tmp' is referenced outside of its parent scope",
    ),
    (
        "local_variable_used_out_of_scope",
        "data = nl.zeros((128, 512), dtype=np.float32)\n"
        "for i in nl.sequential_range(4):\n    data = data + nl.load(x)\nnl.store(out, value=data)",
        "Local variable 'data' is referenced outside of its parent scope",
    ),
    (
        "unsupported_mixing_basic_advanced_tensor_indexing",
        "t = nl.load(x)\nnl.exp(t[nl.arange(4)[:, None], :])",
        "Mixing basic tensor indexing and advanced tensor indexing is not supported.",
    ),
    (
        "1d_arange_not_supported",
        "tmp = nl.zeros((128, 1), dtype=nl.float32, buffer=nl.sbuf)\ni = nl.arange(64)\nnl.exp(tmp[i, 0])",
        "indexing tensor `tmp` with 1d arange is not supported",
    ),
    (
        "store_dst_shape_smaller_than_other_shape",
        "a = nl.zeros((128, 1), dtype=nl.float32)\na[...] = nl.load(x)",
        "Illegal assignment destination shape in 'a = b': shape [128, 1] of parameter 'a' is smaller than other "
        "parameter shapes b[128, 512].",
    ),
    ("store_dst_shape_smaller_than_other_shape", "nl.store(out[:, 0:1], nl.load(x))", "Illegal assignment destination"),
    ("cannot_update_immutable_parameter", "nl.store(x, nl.load(x) + 1.0)", "Cannot update immutable parameter `x`"),
    ("cannot_update_immutable_parameter", "nisa.dma_copy(dst=x, src=out)", "Cannot update immutable parameter `x`"),
    (
        "failed_to_infer_tile_from_local_tensor",
        "a = nl.zeros((4, nl.par_dim(8), 8), dtype=nl.float32, buffer=nl.sbuf)\nnl.add(a, 32)",
        "Failed to infer tile from tensor 'a'",
    ),
    (
        "shared_hbm_must_in_kernel_level",
        "for i in range(8):\n    b = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)",
        "shared_hbm buffer can only be created top level kernel scope",
    ),
    (
        "shared_hbm_must_in_kernel_level",
        "def make():\n    return nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)\nmake()",
        "shared_hbm buffer can only be created top level kernel scope",
    ),
    (
        "hbm_tensor_with_init_value_not_supported",
        "nl.zeros((128, 512), dtype=nl.float32, buffer=nl.hbm)",
        "Creating HBM tensor with init value is not supported.",
    ),
    (
        "tensor_creation_on_scratchpad_with_init_value_not_supported",
        "import neuronxcc.nki.compiler as ncc\n"
        "nl.full((3, nl.par_dim(128), 512), fill_value=1.0, dtype=np.float32, buffer=ncc.sbuf.mod_alloc(base_addr=0))",
        "Creating SBUF/PSUM tensor with init value is not supported in allocated kernels.",
    ),
    (
        "bias_tensor_must_be_specified_in_allocation",
        "import neuronxcc.nki.compiler as ncc\n"
        "e = nl.ndarray((128, 512), dtype=np.float32, buffer=ncc.sbuf.alloc(lambda *a: (0, 0)))\n"
        "e[...] = nisa.activation(np.exp, data=nl.load(x))",
        "Bias tensor for activation op must be specified in allocated kernel!",
    ),
    (
        "transpose_on_tensor_engine_not_allowed_in_allocated_kernel",
        "import neuronxcc.nki.compiler as ncc\n"
        "e = nl.ndarray((128, 128), dtype=np.float32, buffer=ncc.psum.mod_alloc(byte_addr=0))\n"
        "e[...] = nisa.nc_transpose(nl.load(x[:, 0:128]))",
        "Unsupported transpose case in allocated NKI kernels",
    ),
    (
        "control_flow_condition_depending_on_arange",
        "for i in nl.affine_range(8):\n    j = i * 512 + nl.arange(512)[None, :]\n    if j > 2048:\n        pass",
        "Control-flow depending on `nl.arange` or `nl.mgrid` is not supported.",
    ),
    (
        "dynamic_control_flow_not_supported",
        "c = nl.load(x[0:1, 0:1])\nif c:\n    nl.store(out, 1)",
        "dynamic control-flow depending on tensor value is not supported.",
    ),
    ("ambiguous_tensor_truth_value", "if nl.load(x) > 0.0:\n    pass", "truth value of a tensor"),
    (
        "unsupported_expression_in_mask",
        "t = nl.load(x)\nnl.store(out, t, mask=t > 0.0)",
        "NKI mask expressions must be affine expressions of static loop indices.",
    ),
    (
        "unsupported_expression_in_mask",
        "f = nl.arange(512)[None, :]\nnl.store(out, nl.load(x), mask=f % 2 < 1)",
        "NKI mask expressions must be affine expressions of static loop indices.",
    ),
    (
        "mask_not_equal_not_supported",
        "nl.store(out, nl.load(x), mask=nl.arange(512)[None, :] != 3)",
        "'not equal' mask is not supported",
    ),
    (
        "logic_or_not_supported",
        "f = nl.arange(512)[None, :]\nnl.store(out, nl.load(x), mask=(f < 3) | (f > 9))",
        "'logical or' is not supported for the `mask`",
    ),
    (
        "cannot_assign_to_index",
        "i = nl.arange(8)[None, :]\ni[0, 5] = 1024",
        "'index' tensor does not support item assignment",
    ),
    (
        "program_id_axis_out_of_bounds",
        "nl.program_id(1)",
        "axis in `program_id` is out-of-bound of the spmd launch grid",
    ),
    (
        "activation_bias_invalid_type",
        "b = nisa.memset((128, 1), 1, dtype=np.int8)\nnisa.activation(op=nl.exp, data=nl.load(x), bias=b)",
        "'bias' param of 'activation' must be a vector of type float32, float16, or bfloat16, got 'int8'",
    ),
    (
        "activation_bias_invalid_type",
        "nisa.activation(op=nl.exp, data=nl.load(x), bias=0.5)",
        "'bias' param of 'activation' must be a vector of type float32, float16, or bfloat16, got 'float'",
    ),
    (
        "activation_scale_invalid_type",
        "s = nisa.memset((128, 1), 1.2, dtype=np.float16)\nnisa.activation(op=nl.exp, data=nl.load(x), scale=s)",
        "'scale' param of 'activation' must be a scalar or vector of type float32, got 'float16'",
    ),
    (
        "activation_scale_scalar_or_vector",
        "s = nisa.memset((1, 128), 1.2, dtype=np.float32)\nnisa.activation(op=nl.exp, data=nl.load(x), scale=s)",
        "'scale' param of 'activation' can only be a scalar or a vector in partition dimension, scale.shape=[1, 128]",
    ),
    (
        "annotation_shape_mismatch",
        "data: nt.tensor[128, 512] = nl.zeros((par_dim(128), 128), dtype=np.float32)",
        "shape of `data[128, 128]` does not match the expected shape of [128, 512]",
    ),
    (
        "indirect_indices_free_dim",
        "i = nl.load(x[0:128, 0:8], dtype=nl.int32)\nnl.load(x[nl.arange(128)[:, None], i])",
        "Indirect indexing on free dimension not supported, must be partition dimension or block dimension.",
    ),
    (
        "indirect_indices_are_not_supported_with_nki_api",
        "i = nl.load(x[0:128, 0:1], dtype=nl.int32)\n"
        "nl.load_transpose2d(x[i[nl.arange(128)[:, None], 0], nl.arange(64)[None, :]])",
        "cannot use indirect indexing access with the current NKI API for src",
    ),
    (
        "copy_dynamic_indirect_indices_not_natively_supported",
        "t = nl.load(x)\ni = nl.load(x[:, 0:1], dtype=nl.int32)\nu = nl.ndarray((128, 512), dtype=nl.float32)\n"
        "u[...] = t[i[nl.arange(128)[:, None], 0], nl.arange(512)[None, :]]",
        "cannot copy a tensor with indirect memory reference access to `u`",
    ),
    (
        "while_loop_requires_unconditional_entry",
        "c = nl.load(x[0:1, 0:1])\nwhile c:\n    nl.store(out, 1)",
        "Traditional while loops are not supported in NKI.",
    ),
    ("tensor_output_not_written_to", "pass", "output tensor `out` is never written to"),
    (
        "tensor_output_not_written_to",
        "for i in nl.affine_range(128 // 129):\n    nl.store(out, nl.load(x))",
        "output tensor `out` is never written to",
    ),
    ("tensor_output_not_written_to", "return None", "the kernel returns nothing"),
]


@pytest.mark.parametrize(("code", "body", "message"), _CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(_CASES)])
def test_a_documented_error_in_its_wording(code: str, body: str, message: str) -> None:
    error = (
        failure(body, (128, 512), (4096, 1024), parameters="x, y")
        if " w" not in body and "w[" not in body
        else (failure("w = nl.ndarray((128, 4000), dtype=np.float32, buffer=nl.hbm)\n" + body))
    )
    assert error.outcome is EvaluationOutcome.COMPILE_ERROR
    assert message in error.message
    assert error.code == code


def test_a_mutable_parameter_must_be_returned() -> None:
    error = failure_of_file(
        "@nki.jit\ndef kernel(x: nt.mutable_tensor):\n"
        "    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)\n"
        "    t = nl.load(x)\n    nl.store(x, t)\n    nl.store(out, t)\n    return out\n",
        (128, 512),
    )
    assert error.code == "mutable_parameter_not_returned"
    assert "`x` not returned" in error.message


def test_a_grid_inside_another_kernel() -> None:
    error = failure_of_file(
        "@nki.jit\ndef inner(x):\n    return x\n@nki.jit\ndef kernel(x):\n    return inner[4, 4](x)\n", (128, 512)
    )
    assert error.code == "nested_kernel_with_spmd_grid"
    assert "Calling kernel with spmd grid (inner[4,4]) inside another kernel is not supported." in error.message


def test_an_api_outside_of_a_kernel() -> None:
    error = failure_of_file("t = nl.zeros((128, 1), dtype=nl.float32)\ndef kernel(x):\n    return x\n", (128, 512))
    assert error.code == "nki_api_outside_of_nki_kernel"
    assert error.line == len(IMPORTS.splitlines()) + 1


def test_the_line_is_the_kernels_own() -> None:
    text = kernel_text("a = nl.load(x)\nb = nl.exp(a)\nc = nl.load(b)\nnl.store(out, c)")
    with pytest.raises(KernelError) as caught:
        trace_kernel(text, specs((128, 512)))
    assert caught.value.line == text.splitlines().index("    c = nl.load(b)") + 1
    assert str(caught.value).endswith(f"(line {caught.value.line})")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (
            "for i in nl.static_range(2):\n    nl.loop_reduce(nl.load(x), np.add, [i])",
            "nl.loop_reduce over an unrolled loop",
        ),
        ("nl.no_such_function(x)", "neuronxcc.nki.language.no_such_function"),
        ("nisa.sendrecv(x)", "neuronxcc.nki.isa.sendrecv"),
        ("nki.simulate_kernel(x)", "neuronxcc.nki.simulate_kernel"),
        ("nl.load(x).no_such_method()", "tensor.no_such_method"),
        ("from neuronxcc.nki.language import no_such_name", "neuronxcc.nki.language.no_such_name"),
        ("import neuronxcc.starfish", "neuronxcc.starfish"),
        ("nl.tile_size.no_such_size", "nl.tile_size.no_such_size"),
    ],
)
def test_an_unknown_api_is_unsupported_and_named(call: str, name: str) -> None:
    error = failure(call)
    assert error.outcome is EvaluationOutcome.UNSUPPORTED
    assert name in error.message
    assert "did you mean" not in error.message
    assert error.line > 0


@pytest.mark.parametrize(("call", "meant"), [("nl.stor(x, x)", "store"), ("nisa.tensor_scaler(x)", "tensor_scalar")])
def test_a_misspelt_api_is_named_with_what_was_meant(call: str, meant: str) -> None:
    assert failure(call).message.endswith(f"is not supported by the simulator; did you mean '{meant}'?")


@pytest.mark.parametrize(
    ("call", "api"),
    [
        ("nl.sum(t, axis=1, mask=p + f < 300)", "sum"),
        ("nisa.tensor_reduce(np.max, t, axis=[1], mask=f < p)", "tensor_reduce"),
        ("nisa.tensor_partition_reduce(np.add, t, mask=f < p)", "tensor_partition_reduce"),
        ("nisa.nc_matmul(t[:, 0:128], t, mask=p + f < 300)", "nc_matmul"),
    ],
)
def test_a_condition_over_several_axes_of_a_reduction_is_unsupported(call: str, api: str) -> None:
    error = failure(
        f"p, f = nl.arange(128)[:, None], nl.arange(512)[None, :]\nt = nl.load(x)\nnl.store(out[0:1, 0:1], {call})"
    )
    assert error.outcome is EvaluationOutcome.UNSUPPORTED
    assert f"a mask of '{api}'" in str(error) and "(line 15)" in str(error)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("nisa.nc_matmul(nl.load(x), nl.load(x), wrong=1)", "nc_matmul() got an unexpected keyword argument 'wrong'"),
        ("nl.exp()", "exp() missing 1 required positional argument: 'x'"),
        ("nisa.tensor_tensor(nl.load(x))", "tensor_tensor() missing 2 required positional arguments"),
        (
            "nisa.activation(nl.exp, nl.load(x), None, 1.0)",
            "activation() takes 2 positional arguments but 4 were given",
        ),
        ("nl.load(x)['a']", "unsupported index"),
        ("undefined_name", "NameError: name 'undefined_name' is not defined"),
        ("assert x.shape == (1, 1), 'wrong shape'", "AssertionError: wrong shape"),
        ("nl.load(x)[0, 0, 0]", "too many indices"),
        ("nl.add(nl.load(x), 'a')", "Expected operand 'y' of 'add' to be a tile"),
        ("nl.matmul(nl.load(x[:, 0:64]), nl.load(x))", "contraction dimensions differ"),
        ("nisa.activation(op=nl.add, data=nl.load(x))", "add is not supported in 'activation'"),
        ("nisa.tensor_reduce(np.add, nl.load(x), axis=[0])", "the partition dimension (axis 0) cannot be reduced"),
        ("nl.sum(nl.load(x), axis='1')", "'str' object cannot be interpreted as an integer"),
        ("nl.sum(nl.load(x), axis=0)", "the partition dimension (axis 0) cannot be reduced"),
        ("nl.zeros((128, 512), dtype='float64')", "Unsupported dtype 'float64'"),
        ("nl.load(x[:, 0:0])", "empty"),
        ("nl.zeros((128,), dtype=nl.float32)", "Insufficient rank"),
        ("nl.zeros((128, 60000), dtype=nl.float32)", "stack overflow: required sbuf size 240000"),
        ("nl.zeros((128, 5000), dtype=nl.float32, buffer=nl.psum)", "stack overflow: required psum banks 10"),
        ("nl.load(x)[:, 0:513] + 1.0", "Out-of-bound access for tensor"),
        ("t = nl.load(x)\nt[5:37, :] = nl.exp(t[5:37, :])", "Invalid access of 32 partitions starting at partition 5"),
        ("nl.store(out, nl.load(x)[::2])", "stride of 2 on the partition dimension"),
        ("for a in nl.load(x):\n    pass", "iterating over a tensor is not supported"),
        ("np.asarray(nl.load(x))", "the value of a tensor is not known while the kernel is compiled"),
        ("np.exp(nl.load(x))", "TypeError"),
        ("nl.bitwise_and(nl.load(x), 1)", "bitvec op operand of 'bitwise_and' dtype 'float32' must be integer"),
        (
            "nisa.tensor_scalar(nl.load(x, dtype=nl.int32), nl.add, 1, op1=nl.bitwise_and, operand1=3)",
            "must both be bitvec operations or both be arithmetic",
        ),
        (
            "nisa.tensor_reduce(np.add, nl.load(x.reshape((128, 8, 64))), axis=[1])",
            "must be the last contiguous free dimensions",
        ),
        ("nisa.bn_stats(nl.zeros((128, 513), dtype=nl.float32))", "exceed architecture limitation of 512."),
        ("nisa.max8(src=nl.load(x[:, 0:7]))", "has 7 elements per partition, but must be between 8 and 16384"),
        (
            "p = nisa.nc_matmul(nl.load(x[:, 0:128]), nl.load(x))\nnisa.tensor_tensor(p, p, op=nl.add)",
            "'data1' and 'data2' of 'tensor_tensor' cannot both be in address space 'psum'",
        ),
        (
            "nl.load(x, dtype=nl.int32)\nnisa.nc_matmul(nl.load(x, dtype=nl.int32)[:, 0:64], nl.load(x))",
            "has dtype 'int32'",
        ),
        (
            "nisa.activation(op=nl.exp, data=nl.load(x), reduce_cmd='often')",
            "reduce_cmd of 'activation' must be one of",
        ),
        ("nl.loop_reduce(nl.load(x), op=np.add, loop_indices=['i'])", "must be indices of enclosing loops"),
        ("float(nl.load(x))", "the value of a tensor is not known while the kernel is compiled"),
        (
            "nisa.range_select(on_true_tile=nl.load(x), comp_op0=np.less, comp_op1=np.less, bound0=0, bound1=0)",
            "'range_select' is available on NeuronCore-v3 and newer targets only",
        ),
        ("for i in nl.affine_range(2):\n    nl.load(x[0:128, 0:(i + 1) * 8])", "slices of variable size"),
    ],
)
def test_a_fault_of_the_kernel_is_a_compile_error(call: str, message: str) -> None:
    error = failure(call + "\nnl.store(out, nl.load(x))")
    assert error.outcome is EvaluationOutcome.COMPILE_ERROR
    assert message in error.message
    assert error.line > 0


def test_a_file_that_is_no_kernel() -> None:
    assert "SyntaxError" in failure_of_file("def kernel(x:\n").message
    assert "defines no function 'kernel'" in failure_of_file("def other(x):\n    return x\n").message
    assert "defines no function 'main'" in failure_of_file("def kernel(x):\n    return x\n", entry="main").message
    error = failure_of_file("def kernel(x):\n    raise SystemExit(3)\n", (1,))
    assert error.outcome is EvaluationOutcome.COMPILE_ERROR


def test_the_wrong_number_of_arguments() -> None:
    error = failure("nl.store(out, nl.load(x))", (128, 512), (128, 512))
    assert "kernel() takes 1 positional argument but 2 were given" in error.message


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("nl.load(x)", "Expected operand 'return value' of 'kernel'"),
        ("x", "immutable"),
        ("3", "a value of type 'int'"),
        ("(out, out)", "the same tensor twice"),
        ("out[0:64]", "a part of tensor `out`"),
    ],
)
def test_what_a_kernel_may_not_return(returned: str, message: str) -> None:
    assert message in failure(f"nl.store(out, nl.load(x))\nreturn {returned}").message


def test_too_many_unrolled_instructions() -> None:
    error = failure("for i in nl.static_range(300000):\n    nisa.memset((1, 1), 0, dtype=np.float32)")
    assert "unrolls into more than" in error.message


def test_the_documentation_lists_every_documented_error_and_what_is_raised() -> None:
    page = (Path(__file__).parents[2] / "docs" / "nki_front_end.md").read_text()
    rows = dict(re.findall(r"^\| `err_([a-z0-9_]+)` \| (yes|no)", page, re.MULTILINE))
    assert len(rows) == 36
    raised = {code for code, answer in rows.items() if answer == "yes"}
    tested = {case[0] for case in _CASES} | {
        "mutable_parameter_not_returned",
        "nested_kernel_with_spmd_grid",
        "nki_api_outside_of_nki_kernel",
    }
    assert raised == tested & set(rows)
