"""Instruction fusion: two passes that one instruction does (docs/rewriter.md, B), and copies nobody needs (A8)."""

from __future__ import annotations

import ast
import copy

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.calls import COMMUTATIVE
from accelopt_ray.rewrite.patterns import feeder, in_psum, is_zero, keyword_dtype, on_chip, one_operation
from accelopt_ray.rewrite.regions import Op, Opaque, Ref, Space
from accelopt_ray.rewrite.rule import Edit, Peephole, Resource, is_column, render
from accelopt_ray.rewrite.syntax import walk

#: Operations that tensor_scalar and scalar_tensor_tensor take on the vector engine.
_FUSIBLE = frozenset({"add", "subtract", "multiply", "maximum", "minimum"})


def _scalar_operand(op: Op, name: str) -> str | None:
    """Text of a legal tensor_scalar operand: a number, a runtime scalar or a (P, 1) tile."""
    value = op.args.get(name)
    if value is None or (isinstance(value, Ref) and not is_column(value)):
        return None
    return value.text


class TwoScalarOperations(Peephole):
    """Two consecutive tensor_scalar instructions become one with two operations."""

    id = "two-op-tensor-scalar"
    title = "Merge two consecutive scalar operations into one tensor_scalar"
    problem = "two elementwise passes with constant or per-row operands follow each other."
    evidence = "vector and scalar engine time is high; each pass reads and writes the whole tile."
    change = "use op0/operand0 and op1/operand1 of a single tensor_scalar and delete the first pass."
    expectation = "one pass and one temporary less; two operations cost the same as one."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.08
    keywords = ("two operations", "tensor_scalar with op1", "merge scalar")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if not one_operation(op) or op.attrs["op0"] not in _FUSIBLE:
            return None
        first = feeder(kernel, op, "data", "tensor_scalar")
        if first is None or not one_operation(first) or first.attrs["op0"] not in _FUSIBLE:
            return None
        data = first.ref("data")
        inner, outer = _scalar_operand(first, "operand0"), _scalar_operand(op, "operand0")
        if data is None or inner is None or outer is None or not on_chip(data):
            return None
        nisa, nl = kernel.alias("nisa"), kernel.alias("nl")
        a, b = first.number("operand0"), op.number("operand0")
        if a is not None and b is not None and first.attrs["op0"] == op.attrs["op0"] == "multiply":
            value = render(
                f"{nisa}.tensor_scalar", data=data.text, op0=f"{nl}.multiply", operand0=repr(a * b), mask=op.mask,
                dtype=keyword_dtype(op),
            )  # fmt: skip
            return Edit(value, [first])
        value = render(
            f"{nisa}.tensor_scalar",
            data=data.text,
            op0=f"{nl}.{first.attrs['op0']}",
            operand0=inner,
            reverse0="True" if first.flag("reverse0") else None,
            op1=f"{nl}.{op.attrs['op0']}",
            operand1=outer,
            reverse1="True" if op.flag("reverse0") else None,
            mask=op.mask,
            dtype=keyword_dtype(op),
        )
        return Edit(value, [first])


class ScalarTensorTensor(Peephole):
    """A tensor_scalar that feeds a tensor_tensor becomes one scalar_tensor_tensor."""

    id = "scalar-tensor-tensor"
    title = "Fuse a scalar operation into the tensor-tensor operation that uses it"
    problem = "a tile is scaled or shifted in one pass and combined with another tile in the next."
    evidence = "vector_engine_active_time_percent or scalar_engine_active_time_percent is high."
    change = "use nisa.scalar_tensor_tensor(data, op0, operand0, op1, operand1) and delete the scalar pass."
    expectation = "one pass and one temporary less at the cost of the tensor-tensor operation alone."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.08
    keywords = ("scalar_tensor_tensor", "scalar tensor tensor")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind != "tensor_tensor" or op.attrs.get("op") not in _FUSIBLE or op.attrs.get("engine"):
            return None
        for scalar, other in (("data1", "data2"), ("data2", "data1")):
            first = feeder(kernel, op, scalar, "tensor_scalar")
            if first is None or not one_operation(first) or first.attrs["op0"] not in _FUSIBLE:
                continue
            data, partner = first.ref("data"), op.ref(other)
            operand = _scalar_operand(first, "operand0")
            if data is None or partner is None or operand is None or not on_chip(data):
                continue
            if data.shape is None or data.shape != partner.shape or len(data.shape) != 2:
                continue
            if in_psum(data) and in_psum(partner):
                continue
            swapped = scalar == "data2" and op.attrs["op"] not in COMMUTATIVE
            nisa, nl = kernel.alias("nisa"), kernel.alias("nl")
            value = render(
                f"{nisa}.scalar_tensor_tensor",
                data=data.text,
                op0=f"{nl}.{first.attrs['op0']}",
                operand0=operand,
                reverse0="True" if first.flag("reverse0") else None,
                op1=f"{nl}.{op.attrs['op']}",
                operand1=partner.text,
                reverse1="True" if swapped else None,
                mask=op.mask,
                dtype=keyword_dtype(op),
            )
            return Edit(value, [first])
        return None


class ReduceInActivation(Peephole):
    """A sum over the result of an activation is taken by the activation itself."""

    id = "activation-reduce"
    title = "Take the row sum in the same instruction as the activation"
    problem = "the result of an activation is read again by a tensor_reduce that adds it up."
    evidence = "vector_engine_active_time_percent is high and every tile is read twice."
    change = "use nisa.activation_reduce(..., reduce_op=nl.add, reduce_res=slot) with one slot per instruction."
    expectation = (
        "one vector engine pass less for about 64 scalar engine cycles; check that HBM and PSUM traffic do not grow."
    )
    relieves = Resource.VECTOR
    typical_gain = 1.12
    keywords = ("activation_reduce", "row sum in the same instruction", "fused sum")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind != "reduce" or op.attrs.get("op") != "add" or op.mask or op.accumulate or op.flag("negate"):
            return None
        data = op.ref("data")
        if data is None or data.shape is None or len(data.shape) != 2 or not _last_axis(op):
            return None
        source = kernel.definition(data, op)
        if source is None or source.kind != "activation" or source.mask or source.attrs.get("reduce_op"):
            return None
        if source.path != op.path or source.block is not op.block or source.dest is None or op.dest is None:
            return None
        reaches_all = source.ref("data")
        if reaches_all is None or reaches_all.buffer.space is Space.HBM or source.accumulate:
            return None
        if not kernel.stable_between(source, op):
            return None
        return self._edit(kernel, op, source, data)

    @staticmethod
    def _edit(kernel: Kernel, op: Op, source: Op, data: Ref) -> Edit:
        nl, nisa = kernel.alias("nl"), kernel.alias("nisa")
        before, slot = _result_slot(kernel, op, data)
        bias, scale = source.args.get("bias"), source.args.get("scale")
        needs_bias = bias is not None and not is_zero(kernel, source, "bias")
        value = render(
            f"{nisa}.activation_reduce",
            op=f"{nl}.{source.attrs['op']}",
            data=source.args["data"].text,
            reduce_op=f"{nl}.add",
            reduce_res=slot,
            bias=bias.text if bias is not None and needs_bias else None,
            scale=scale.text if scale is not None else None,
            dtype=keyword_dtype(source),
        )
        return Edit(value, [op], before, at=source)


def _result_slot(kernel: Kernel, op: Op, data: Ref) -> tuple[list[str], str]:
    """Where a fused reduction puts its result: statements that allocate it, and its text."""
    assert op.dest is not None and data.shape is not None
    if op.dest.buffer.origin != "value":
        return [], op.dest.text
    nl = kernel.alias("nl")
    slot, rows = op.dest.buffer.name, data.shape[0].text()
    dtype = op.attrs.get("dtype") or f"{nl}.float32"
    allocation = f"{slot} = {nl}.ndarray(({nl}.par_dim({rows}), 1), dtype={dtype}, buffer={nl}.sbuf)"
    return [allocation], f"{slot}[{nl}.arange({rows})[:, None], {nl}.arange(1)[None, :]]"


class ReduceWithScalarOperation(Peephole):
    """A reduction over the result of a tensor_scalar, or of a copy out of PSUM, is taken by that instruction."""

    id = "tensor-scalar-reduce"
    title = "Take the row reduction in the same instruction as the scalar operation or PSUM eviction"
    problem = "a tile is produced by a scalar operation or copied out of PSUM and then read again by a tensor_reduce."
    evidence = "the engines read every tile twice: psum_read_bytes and sbuf_read_bytes are high beside the arithmetic."
    change = (
        "use nisa.tensor_scalar_reduce(data, op0, operand0, reduce_op, reduce_res); a copy is a multiplication by 1."
    )
    expectation = "eviction and reduction take one vector engine pass; the scalar engine is relieved of the copy."
    relieves = Resource.SCALAR
    typical_gain = 1.08
    keywords = ("tensor_scalar_reduce", "evict and reduce")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind != "reduce" or op.attrs.get("op") not in ("add", "maximum", "minimum") or op.mask or op.accumulate:
            return None
        data = op.ref("data")
        if data is None or data.shape is None or len(data.shape) != 2 or not _last_axis(op) or op.flag("negate"):
            return None
        source = kernel.definition(data, op)
        if source is None or source.path != op.path or source.block is not op.block or source.mask or source.accumulate:
            return None
        if source.dest is None or op.dest is None or not kernel.stable_between(source, op):
            return None
        operation, operand = "multiply", "1.0"
        origin = source.ref("src") if source.kind == "copy" else source.ref("data")
        if source.kind == "tensor_scalar":
            text = _scalar_operand(source, "operand0")
            if not one_operation(source) or source.flag("reverse0") or text is None:
                return None
            operation, operand = source.attrs["op0"], text
        elif source.kind != "copy" or not in_psum(origin):
            return None
        if origin is None or not on_chip(origin) or source.dest.buffer.space is Space.PSUM:
            return None
        before, slot = _result_slot(kernel, op, data)
        nisa, nl = kernel.alias("nisa"), kernel.alias("nl")
        reduction = {"add": "add", "maximum": "max", "minimum": "min"}[op.attrs["op"]]
        value = render(
            f"{nisa}.tensor_scalar_reduce",
            data=origin.text,
            op0=f"{nl}.{operation}",
            operand0=operand,
            reduce_op=f"{nl}.{reduction}",
            reduce_res=slot,
            dtype=keyword_dtype(source),
        )
        return Edit(value, [op], before, at=source)


def _last_axis(op: Op) -> bool:
    axis = op.attrs.get("axis", "").replace(" ", "")
    return axis in ("[1]", "1", "(1,)", "-1", "[-1]")


class EpilogueFromPsum(Peephole):
    """An operation on a copy of a PSUM tile reads PSUM itself."""

    id = "epilogue-from-psum"
    title = "Apply the operation while the tile leaves PSUM instead of copying it first"
    problem = "a PSUM tile is copied to SBUF only to be read once by the next elementwise operation."
    evidence = "psum_read_bytes and sbuf_write_bytes count the same tile twice; the scalar engine is busy with copies."
    change = "let the operation read the PSUM tile directly and delete the copy."
    expectation = "one scalar engine pass less; a tensor_tensor with one operand in PSUM also costs half."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.06
    keywords = ("psum eviction", "leave psum", "read psum directly", "epilogue")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        operands = {
            "activation": ("data",),
            "tensor_scalar": ("data",),
            "tensor_tensor": ("data1", "data2"),
            "reduce": ("data",),
            "scalar_tensor_tensor": ("data", "operand1"),
            "copy": ("src",),
        }.get(op.kind)
        if operands is None or "gpsimd" in op.attrs.get("engine", "").lower():
            return None
        for name in operands:
            copied = feeder(kernel, op, name, "copy")
            if copied is None:
                continue
            source = copied.ref("src")
            if source is None or not in_psum(source) or not _same_type(copied):
                continue
            if any(in_psum(op.ref(other)) for other in operands if other != name):
                continue
            value = _with_operand(op, copied, name, source)
            if value is not None:
                return Edit(value, [copied])
        return None


def _same_type(op: Op) -> bool:
    """Whether a copy keeps fp32: its dtype is absent or copied from a tensor of the kernel."""
    dtype = op.attrs.get("dtype", "")
    return not dtype or dtype.endswith(("float32", ".dtype"))


def _with_operand(op: Op, old: Op, argument: str, new: Ref) -> str | None:
    """The call of ``op`` with one operand replaced."""
    target = op.ref(argument)
    assert target is not None
    if isinstance(op.call, ast.BinOp) or not isinstance(op.call, ast.Call):
        # ``buffer[...] = tile`` is a copy without a call.
        return new.text if op.kind == "copy" and not isinstance(op.call, ast.BinOp) else None
    call = copy.deepcopy(op.call)
    replaced = False
    for number, item in enumerate(op.call.args):
        if item is target.node:
            call.args[number] = copy.deepcopy(new.node)
            replaced = True
    for number, keyword in enumerate(op.call.keywords):
        if keyword.value is target.node:
            call.keywords[number].value = copy.deepcopy(new.node)
            replaced = True
    return ast.unparse(call) if replaced else None


class RemoveCopy(Peephole):
    """A copy between SBUF tiles that only renames a tile disappears."""

    id = "remove-copy"
    title = "Delete a copy of a tile that is only read afterwards"
    problem = "an SBUF tile is copied to another SBUF tile of the same layout and then only read."
    evidence = "sbuf_read_bytes and sbuf_write_bytes exceed what the arithmetic needs."
    change = "read the original tile and delete the copy."
    expectation = "one pass less; mostly it exposes further fusion."
    relieves = Resource.SCALAR
    typical_gain = 1.02
    keywords = ("delete the copy", "remove the copy", "needless copy")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind == "store":
            copied = feeder(kernel, op, "value", "copy")
            source = copied.ref("src") if copied is not None else None
            if copied is None or source is None or source.buffer.space is not Space.SBUF or not _same_type(copied):
                return None
            value = _with_operand(op, copied, "value", source)
            return Edit(value, [copied]) if value is not None else None
        for name, argument in op.args.items():
            if not isinstance(argument, Ref):
                continue
            copied = feeder(kernel, op, name, "copy")
            source = copied.ref("src") if copied is not None else None
            if copied is None or source is None or source.dims is None or not _same_type(copied):
                continue
            if (
                source.buffer.space is not Space.SBUF
                or copied.dest is None
                or copied.dest.buffer.space is not Space.SBUF
            ):
                continue
            if source.shape != argument.shape or not _base_zero(source):
                continue
            value = _with_operand(op, copied, name, source)
            if value is not None:
                return Edit(value, [copied])
        return None


def _base_zero(ref: Ref) -> bool:
    """Whether a tile starts on partition 0, so that no instruction sees two different bases."""
    assert ref.dims is not None
    partition = ref.dims[ref.buffer.block_dims] if len(ref.dims) > ref.buffer.block_dims else None
    return partition is not None and partition.start.value == 0


class DropDeadResult(Peephole):
    """A result that nothing reads is not computed."""

    id = "drop-dead-result"
    title = "Delete an operation whose result nothing reads"
    problem = "a buffer is written and never read."
    evidence = "engine instruction counts exceed what the result needs."
    change = "delete the operation and the buffer."
    expectation = "its passes and its memory disappear."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.02
    keywords = ("dead", "never read", "unused buffer")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.dest is None or op.kind in ("store", "unknown") or op.dest.buffer.space is Space.HBM:
            return None
        buffer = op.dest.buffer
        if buffer.reads or buffer.returned or any(write.kind == "unknown" for write in buffer.writes):
            return None
        if op.kind in ("activation_reduce", "tensor_scalar_reduce") or op.attrs.get("reduce_op"):
            return None
        if buffer.name in _hidden_names(kernel):
            return None
        return Edit("")


def _hidden_names(kernel: Kernel) -> set[str]:
    """Names inside operands that the analysis does not understand."""
    hidden: set[str] = set()
    for op in kernel.ops:
        for argument in op.args.values():
            if isinstance(argument, Opaque):
                hidden |= {node.id for node in walk(argument.node) if isinstance(node, ast.Name)}
    return hidden


RULES = (
    RemoveCopy(),
    EpilogueFromPsum(),
    TwoScalarOperations(),
    ScalarTensorTensor(),
    ReduceInActivation(),
    ReduceWithScalarOperation(),
    DropDeadResult(),
)
