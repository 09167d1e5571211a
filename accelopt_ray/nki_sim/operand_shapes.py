"""The shapes that each instruction asks of its operands, and of what it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from accelopt_ray.nki_sim import errors
from accelopt_ray.nki_sim.instruction_rules import Rule
from accelopt_ray.nki_sim.program import Access, Affine, Instruction, MaskTerm, Opcode, Program, Space

_ONE_PSUM = {
    Opcode.TENSOR_TENSOR: ("a", "b"),
    Opcode.SCAN: ("data0", "data1"),
    Opcode.SCALAR_TENSOR_TENSOR: ("data", "operand1"),
    Opcode.COPY_PREDICATED: ("src", "predicate"),
}


class OperandShapes:
    """Checks the shapes of a program's instructions, one by one."""

    def __init__(
        self,
        program: Program,
        broken: Callable[[str], errors.KernelError],
        check_mask: Callable[[Sequence[object], tuple[int, ...]], None],
    ) -> None:
        """Takes a program.

        Args:
            program: Whose instructions are checked.
            broken: Makes the error for what the tracer never writes.
            check_mask: Checks the conditions of a mask over a tile of a shape.
        """
        self._program = program
        self._broken = broken
        self._check_mask = check_mask

    def check(self, node: Instruction, rule: Rule) -> None:
        """Checks one instruction whose operands are known to be there.

        Raises:
            KernelError: In the compiler's wording where the compiler has one.
        """
        out = node.outputs[0].shape
        for name in rule.elementwise:
            value = node.operands.get(name)
            if isinstance(value, Access) and value.shape != out:
                raise errors.shapes_mismatch([("out", out), (name, value.shape)], str(node.opcode))
        for name in rule.vectors:
            value = node.operands.get(name)
            if isinstance(value, Access) and value.shape != (out[0], 1):
                raise errors.shapes_mismatch([("out", out), (name, value.shape)], str(node.opcode))
        for extra in node.outputs[1:]:
            expected = (out[0], 8) if node.opcode is Opcode.MATCH_REPLACE8 else (out[0], 1)
            if extra.shape != expected:
                raise errors.shapes_mismatch([("out", out), ("outputs[1]", extra.shape)], str(node.opcode))
        pair = _ONE_PSUM.get(node.opcode)
        if pair is not None:
            spaces = [self._space(node.operands.get(name)) for name in pair]
            if spaces == [Space.PSUM, Space.PSUM]:
                raise errors.compile_error(
                    f"'{pair[0]}' and '{pair[1]}' of '{node.opcode}' cannot both be in address space 'psum'"
                )
        check = getattr(self, f"_shape_of_{node.opcode.value}", None)
        if check is not None:
            check(node, out)

    def _space(self, value: object) -> Space | None:
        return self._program.buffers[value.buffer].space if isinstance(value, Access) else None

    def _operand(self, node: Instruction, name: str) -> Access:
        value = node.operands[name]
        assert isinstance(value, Access)
        return value

    def _shape_of_matmul(self, node: Instruction, out: tuple[int, ...]) -> None:
        stationary, moving = self._operand(node, "stationary").shape, self._operand(node, "moving").shape
        if len(stationary) != 2 or len(moving) != 2 or len(out) != 2:
            raise self._broken("'matmul' takes two-dimensional tiles")
        if stationary[0] != moving[0]:
            raise errors.partition_mismatch([("stationary", stationary), ("moving", moving)], "nc_matmul")
        if stationary[1] > 128:
            raise errors.dimension_exceeds_limit(1, "stationary", stationary, "nc_matmul", 128)
        if moving[1] > 512:
            raise errors.dimension_exceeds_limit(1, "moving", moving, "nc_matmul", 512)
        if out != (stationary[1], moving[1]):
            raise errors.matmul_shapes([("stationary", stationary), ("moving", moving), ("out", out)], "nc_matmul")
        contraction = node.attributes.get("contraction_mask", ())
        if not isinstance(contraction, tuple):
            raise self._broken("'contraction_mask' must be conditions")
        self._check_mask(contraction, (stationary[0], 1))

    def _shape_of_transpose(self, node: Instruction, out: tuple[int, ...]) -> None:
        data = self._operand(node, "data").shape
        if len(data) != 2 or out != data[::-1] or max(data) > 128:
            raise errors.dimension_exceeds_limit(1, "data", data, "nc_transpose", 128)

    def _shape_of_tensor_reduce(self, node: Instruction, out: tuple[int, ...]) -> None:
        data = self._operand(node, "data").shape
        axes = node.attributes["axes"]
        if not isinstance(axes, tuple) or not axes or len(set(axes)) != len(axes):
            raise self._broken("'tensor_reduce' has no axes")
        if any(type(axis) is not int or not 0 < axis < len(data) for axis in axes):
            raise self._broken(f"'tensor_reduce' has axes {axes} of {len(data)}")
        kept = tuple(size for axis, size in enumerate(data) if axis not in axes)
        ones = tuple(1 if axis in axes else size for axis, size in enumerate(data))
        if out not in (kept, (*kept, 1) if len(kept) == 1 else kept, ones):
            raise errors.shapes_mismatch([("data", data), ("out", out)], "tensor_reduce")
        self._check_input_mask(node, data)

    def _shape_of_partition_reduce(self, node: Instruction, out: tuple[int, ...]) -> None:
        data = self._operand(node, "data").shape
        if out != (1, *data[1:]):
            raise errors.shapes_mismatch([("data", data), ("out", out)], "tensor_partition_reduce")
        self._check_input_mask(node, data)

    def _shape_of_partition_broadcast(self, node: Instruction, out: tuple[int, ...]) -> None:
        src = self._operand(node, "src").shape
        if src[0] != 1 or src[1:] != out[1:]:
            raise errors.shapes_mismatch([("src", src), ("out", out)], "broadcast_to")

    def _shape_of_iota(self, node: Instruction, out: tuple[int, ...]) -> None:
        strides = node.attributes["strides"]
        if (
            not isinstance(node.attributes["start"], Affine)
            or not isinstance(strides, tuple)
            or len(strides) != len(out)
        ):
            raise self._broken("'iota' needs an affine start and one stride per axis")

    def _shape_of_affine_select(self, node: Instruction, out: tuple[int, ...]) -> None:
        predicate = node.attributes["predicate"]
        if not isinstance(predicate, MaskTerm):
            raise self._broken("'affine_select' needs a condition")
        self._check_mask((predicate,), out)

    def _shape_of_memset(self, node: Instruction, out: tuple[int, ...]) -> None:
        if type(node.attributes["value"]) not in (int, float):
            raise self._broken("'memset' needs a number")

    def _shape_of_bn_stats(self, node: Instruction, out: tuple[int, ...]) -> None:
        data = self._operand(node, "data").shape
        if prod(data[1:]) > 512 or out != (data[0], 6):
            raise errors.dimension_exceeds_limit(1, "data", data, "bn_stats", 512)

    def _shape_of_bn_aggr(self, node: Instruction, out: tuple[int, ...]) -> None:
        data = self._operand(node, "data").shape
        if prod(data[1:]) % 3 or out != (data[0], 2):
            raise errors.shapes_mismatch([("data", data), ("out", out)], "bn_aggr")

    def _shape_of_max8(self, node: Instruction, out: tuple[int, ...]) -> None:
        self._check_eight(self._operand(node, "data").shape, out, "max8")

    def _shape_of_find_index8(self, node: Instruction, out: tuple[int, ...]) -> None:
        data, vals = self._operand(node, "data").shape, self._operand(node, "vals").shape
        self._check_eight(data, out, "nc_find_index8")
        self._check_eight(data, vals, "nc_find_index8")

    def _shape_of_match_replace8(self, node: Instruction, out: tuple[int, ...]) -> None:
        self._check_eight(out, self._operand(node, "vals").shape, "nc_match_replace8")

    def _check_eight(self, data: tuple[int, ...], eight: tuple[int, ...], api: str) -> None:
        if not 8 <= prod(data[1:]) <= 16_384 or eight[0] != data[0] or prod(eight[1:]) != 8:
            raise errors.shapes_mismatch([("data", data), ("vals", eight)], api)

    def _shape_of_local_gather(self, node: Instruction, out: tuple[int, ...]) -> None:
        src, index = self._operand(node, "src").shape, self._operand(node, "index").shape
        per_index = node.attributes["num_elem_per_idx"]
        valid = node.attributes.get("num_valid_indices", prod(index[1:]) * 16)
        if type(per_index) is not int or type(valid) is not int or per_index < 1 or valid < 1:
            raise self._broken("'local_gather' needs positive counts")
        if src[0] % 16 or src[0] != index[0] or out[0] != src[0] or prod(out[1:]) != valid * per_index:
            raise errors.shapes_mismatch([("src", src), ("index", index), ("out", out)], "local_gather")
        if valid > prod(index[1:]) * 16:
            raise self._broken("'local_gather' uses more indices than there are")

    def _shape_of_stream_shuffle(self, node: Instruction, out: tuple[int, ...]) -> None:
        order = node.attributes["shuffle_mask"]
        if not isinstance(order, tuple) or len(order) != 32 or any(e not in range(32) and e != 255 for e in order):
            raise self._broken("'stream_shuffle' needs 32 entries below 32, or 255")

    def _check_input_mask(self, node: Instruction, shape: tuple[int, ...]) -> None:
        terms = node.attributes.get("input_mask", ())
        if not isinstance(terms, tuple):
            raise self._broken("'input_mask' must be conditions")
        self._check_mask(terms, shape)
