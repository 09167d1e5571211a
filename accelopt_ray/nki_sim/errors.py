"""What can be wrong with a kernel, in the wording that a developer meets on the device.

Each function builds one documented error of the generation-A compiler; the name is the error's code without its
``err_`` prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelopt_ray.outcome import EvaluationOutcome


class KernelError(Exception):
    """A fault of the kernel, never of the simulator.

    Attributes:
        outcome: The typed outcome for the evaluation's row.
        message: What the developer would read.
        line: Line of the kernel's source, 0 when no single line is at fault.
        code: The documented error code, empty for errors without one.
    """

    def __init__(self, outcome: EvaluationOutcome, message: str, line: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.line = line
        self.code = code

    def __str__(self) -> str:
        return f"{self.message} (line {self.line})" if self.line else self.message


def shape_text(shape: Sequence[int]) -> str:
    """A shape as the compiler prints it: ``[128, 512]``."""
    return "[" + ", ".join(str(int(size)) for size in shape) + "]"


def compile_error(message: str, code: str = "", line: int = 0) -> KernelError:
    """An error that the compiler reports."""
    return KernelError(EvaluationOutcome.COMPILE_ERROR, message, line, code)


def unsupported(what: str, line: int = 0, meant: str = "") -> KernelError:
    """Something the simulator does not know; ``what`` names it, ``meant`` what it looks like a misspelling of."""
    hint = f"; did you mean '{meant}'?" if meant else ""
    return KernelError(EvaluationOutcome.UNSUPPORTED, f"{what} is not supported by the simulator{hint}", line)


def partitions_exceed_limit(partitions: int, limit: int = 128) -> KernelError:
    return compile_error(
        f"number of partitions {partitions} exceed architecture limitation of {limit}.",
        "num_partition_exceed_arch_limit",
    )


def partition_mismatch(operands: Sequence[tuple[str, Sequence[int]]], api: str) -> KernelError:
    listed = ", ".join(f"{name}{shape_text(shape)}" for name, shape in operands)
    return compile_error(
        f"number of partitions (dimension 0 size of a tile) mismatch in parameters ({listed}) of '{api}'",
        "num_partition_mismatch",
    )


def dimension_exceeds_limit(dimension: int, name: str, shape: Sequence[int], api: str, limit: int) -> KernelError:
    return compile_error(
        f"size of dimension {dimension} in '{name}{shape_text(shape)}' of '{api}' exceed architecture limitation of "
        f"{limit}.",
        "size_of_dimension_exceed_arch_limit",
    )


def too_many_dimensions(name: str, shape: Sequence[int], api: str, limit: int) -> KernelError:
    return compile_error(
        f"parameter '{name}{shape_text(shape)}' of '{api}' exceed max supported number of dimensions of {limit}.",
        "exceed_max_supported_dimension",
    )


def out_of_bound(tensor: str, dimension: int, low: int, high: int, size: int, line: int = 0) -> KernelError:
    return compile_error(
        f"Out-of-bound access for tensor `{tensor}` on dimension {dimension}: index range [{low}, {high}] exceed "
        f"dimension size of {size}",
        "tensor_access_out_of_bound",
        line,
    )


def unsupported_memory(operand: str, api: str, expected: str, got: str) -> KernelError:
    return compile_error(
        f"Expected operand '{operand}' of '{api}' to be in address space '{expected}', but got a tile in '{got}' "
        "instead.",
        "unsupported_memory",
    )


def unexpected_output_dependencies(loop: str, destination: str) -> KernelError:
    return compile_error(
        f"Unexpected output dependencies, different iterations of {loop} loop write to `{destination}`",
        "unexpected_output_dependencies",
    )


def local_variable_out_of_scope(name: str) -> KernelError:
    return compile_error(
        f"Local variable '{name}' is referenced outside of its parent scope", "local_variable_used_out_of_scope"
    )


def mixing_basic_and_advanced() -> KernelError:
    return compile_error(
        "Mixing basic tensor indexing and advanced tensor indexing is not supported.",
        "unsupported_mixing_basic_advanced_tensor_indexing",
    )


def one_dimensional_arange(tensor: str) -> KernelError:
    return compile_error(f"indexing tensor `{tensor}` with 1d arange is not supported.", "1d_arange_not_supported")


def destination_too_small(dst_shape: Sequence[int], src_shape: Sequence[int], expression: str = "a = b") -> KernelError:
    return compile_error(
        f"Illegal assignment destination shape in '{expression}': shape {shape_text(dst_shape)} of parameter 'a' is "
        f"smaller than other parameter shapes b{shape_text(src_shape)}.",
        "store_dst_shape_smaller_than_other_shape",
    )


def immutable_parameter(name: str) -> KernelError:
    return compile_error(f"Cannot update immutable parameter `{name}`", "cannot_update_immutable_parameter")


def mutable_not_returned(names: Sequence[str]) -> KernelError:
    listed = ", ".join(f"`{name}`" for name in names)
    return compile_error(f"mutable kernel parameter {listed} not returned", "mutable_parameter_not_returned")


def output_not_written(name: str) -> KernelError:
    return compile_error(f"output tensor `{name}` is never written to", "tensor_output_not_written_to")


def failed_to_infer_tile(name: str) -> KernelError:
    return compile_error(
        f"Failed to infer tile from tensor '{name}': the first dimension of the tile is not the partition dimension of "
        "the tensor.",
        "failed_to_infer_tile_from_local_tensor",
    )


def shared_hbm_not_at_top_level() -> KernelError:
    return compile_error(
        "shared_hbm buffer can only be created top level kernel scope", "shared_hbm_must_in_kernel_level"
    )


def hbm_with_initial_value() -> KernelError:
    return compile_error(
        "Creating HBM tensor with init value is not supported.", "hbm_tensor_with_init_value_not_supported"
    )


def scratchpad_with_initial_value() -> KernelError:
    return compile_error(
        "Creating SBUF/PSUM tensor with init value is not supported in allocated kernels.",
        "tensor_creation_on_scratchpad_with_init_value_not_supported",
    )


def bias_required_in_allocated_kernel() -> KernelError:
    return compile_error(
        "Bias tensor for activation op must be specified in allocated kernel!",
        "bias_tensor_must_be_specified_in_allocation",
    )


def transpose_in_allocated_kernel() -> KernelError:
    return compile_error(
        "Unsupported transpose case in allocated NKI kernels: nisa.nc_transpose() with TensorEngine, or nl.matmul() "
        "without setting transpose_x=True.",
        "transpose_on_tensor_engine_not_allowed_in_allocated_kernel",
    )


def arange_in_control_flow() -> KernelError:
    return compile_error(
        "Control-flow depending on `nl.arange` or `nl.mgrid` is not supported.",
        "control_flow_condition_depending_on_arange",
    )


def dynamic_control_flow() -> KernelError:
    return compile_error(
        "dynamic control-flow depending on tensor value is not supported.", "dynamic_control_flow_not_supported"
    )


def while_loop_entry() -> KernelError:
    return compile_error(
        "Traditional while loops are not supported in NKI. Use the do-while pattern instead: start with "
        "'cond = scalar(True)'.",
        "while_loop_requires_unconditional_entry",
    )


def ambiguous_truth_value() -> KernelError:
    return compile_error(
        "The truth value of a tensor with more than one element is ambiguous.", "ambiguous_tensor_truth_value"
    )


def unsupported_mask_expression() -> KernelError:
    return compile_error(
        "NKI mask expressions must be affine expressions of static loop indices. Dynamic values, tensor elements, or "
        "non-affine operations are not supported in mask predicates.",
        "unsupported_expression_in_mask",
    )


def mask_not_equal() -> KernelError:
    return compile_error("'not equal' mask is not supported", "mask_not_equal_not_supported")


def mask_logical_or() -> KernelError:
    return compile_error("'logical or' is not supported for the `mask`", "logic_or_not_supported")


def cannot_assign_to_index() -> KernelError:
    return compile_error("'index' tensor does not support item assignment", "cannot_assign_to_index")


def outside_of_kernel() -> KernelError:
    return compile_error("calling NKI API outside of NKI kernels is not supported.", "nki_api_outside_of_nki_kernel")


def nested_kernel_with_grid(name: str, grid: Sequence[int]) -> KernelError:
    listed = ",".join(str(size) for size in grid)
    return compile_error(
        f"Calling kernel with spmd grid ({name}[{listed}]) inside another kernel is not supported.",
        "nested_kernel_with_spmd_grid",
    )


def program_id_axis_out_of_bounds(axis: int, rank: int) -> KernelError:
    return compile_error(
        f"axis in `program_id` is out-of-bound of the spmd launch grid (axis={axis}, rank {rank})",
        "program_id_axis_out_of_bounds",
    )


def activation_bias_type(api: str, dtype: str) -> KernelError:
    return compile_error(
        f"'bias' param of '{api}' must be a vector of type float32, float16, or bfloat16, got '{dtype}'",
        "activation_bias_invalid_type",
    )


def activation_scale_type(api: str, dtype: str) -> KernelError:
    return compile_error(
        f"'scale' param of '{api}' must be a scalar or vector of type float32, got '{dtype}'",
        "activation_scale_invalid_type",
    )


def activation_scale_shape(shape: Sequence[int]) -> KernelError:
    return compile_error(
        "'scale' param of 'activation' can only be a scalar or a vector in partition dimension, "
        f"scale.shape={shape_text(shape)}",
        "activation_scale_scalar_or_vector",
    )


def annotation_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> KernelError:
    return compile_error(
        f"shape of `{name}{shape_text(shape)}` does not match the expected shape of {shape_text(expected)}",
        "annotation_shape_mismatch",
    )


def indirect_index_on_free_dimension() -> KernelError:
    return compile_error(
        "Indirect indexing on free dimension not supported, must be partition dimension or block dimension.",
        "indirect_indices_free_dim",
    )


def indirect_index_not_allowed(operands: str) -> KernelError:
    return compile_error(
        f"cannot use indirect indexing access with the current NKI API for {operands}",
        "indirect_indices_are_not_supported_with_nki_api",
    )


def copy_of_indirect_access(name: str) -> KernelError:
    return compile_error(
        f"cannot copy a tensor with indirect memory reference access to `{name}`",
        "copy_dynamic_indirect_indices_not_natively_supported",
    )


def shapes_not_broadcastable(operands: Sequence[tuple[str, Sequence[int]]], api: str) -> KernelError:
    listed = ", ".join(f"{name}{shape_text(shape)}" for name, shape in operands)
    return compile_error(f"Parameter shapes ({listed}) of '{api}' could not be broadcast together with shapes")


def shapes_mismatch(operands: Sequence[tuple[str, Sequence[int]]], api: str) -> KernelError:
    listed = ", ".join(f"{name}{shape_text(shape)}" for name, shape in operands)
    return compile_error(f"Parameter shapes ({listed}) of '{api}' has mismatched shapes")


def matmul_shapes(operands: Sequence[tuple[str, Sequence[int]]], api: str) -> KernelError:
    listed = ", ".join(f"{name}{shape_text(shape)}" for name, shape in operands)
    return compile_error(f"Parameter shapes ({listed}) of '{api}' are incompatible: contraction dimensions differ")


def op_not_supported(op: str, instruction: str) -> KernelError:
    return compile_error(f"{op} is not supported in '{instruction}'")


def dtype_not_supported(dtype: object, api: str, expected: Sequence[str]) -> KernelError:
    return compile_error(
        f"Unsupported dtype '{dtype}' of '{api}', expected one of the following dtypes: {', '.join(expected)}"
    )


def operand_dtype(name: str, api: str, dtype: str, expected: Sequence[str]) -> KernelError:
    return compile_error(
        f"'{name}' of '{api}' has dtype '{dtype}', expected one of the following dtypes: {', '.join(expected)}"
    )


def unexpected_operand(name: str, api: str, got: object) -> KernelError:
    return compile_error(f"Expected operand '{name}' of '{api}' to be a tile, but got '{type(got).__name__}' instead.")


def operand_missing(name: str) -> KernelError:
    return compile_error(f"'{name}' cannot be None.")


def minimum_target(instruction: str, minimum: str) -> KernelError:
    return compile_error(f"'{instruction}' is available on {minimum} and newer targets only")
