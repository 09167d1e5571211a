"""Small recognisers that several rules share."""

from __future__ import annotations

import ast

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.regions import Number, Op, Opaque, Ref, Space
from accelopt_ray.rewrite.rule import rebound_between, render, same_mask


def feeder(kernel: Kernel, user: Op, argument: str, kind: str | tuple[str, ...]) -> Op | None:
    """The private operation of one of the given kinds that produces an operand of ``user``, masked like it.

    Private means: read by ``user`` alone, in the same loop body, its inputs unchanged in between, so that its
    expression may move to ``user``.
    """
    kinds = (kind,) if isinstance(kind, str) else kind
    op = kernel.private_source(user.ref(argument), user)
    if op is None or op.kind not in kinds or not same_mask(op, user) or op.attrs.get("reduce_op"):
        return None
    if rebound_between(kernel, op, user, op.node):
        return None
    return op


def is_zero(kernel: Kernel, op: Op, argument: str) -> bool:
    """Whether an operand is absent or provably all zeros."""
    value = op.args.get(argument)
    if value is None:
        return True
    if isinstance(value, Number):
        return value.value == 0
    if isinstance(value, Opaque):
        return False
    buffer = value.buffer
    if not buffer.writes:
        return buffer.fill is not None and _zero_text(buffer.fill)
    if len(buffer.writes) != 1 or buffer.writes[0].kind != "memset":
        return False
    return _zero_text(buffer.writes[0].attrs.get("value", ""))


def _zero_text(text: str) -> bool:
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:
        return False
    while isinstance(node, ast.Call) and len(node.args) == 1:
        node = node.args[0]
    return isinstance(node, ast.Constant) and node.value == 0


def one_operation(op: Op) -> bool:
    """Whether a ``tensor_scalar`` performs a single operation."""
    return op.kind == "tensor_scalar" and not op.attrs.get("op1")


def scaled(op: Op | None) -> tuple[Ref, str, float | None] | None:
    """Reads ``x * c``: the tile, the factor's text, and its value when it is a number. c may be a (P, 1) tile."""
    if op is None or not one_operation(op) or op.attrs.get("op0") != "multiply":
        return None
    data, factor = op.ref("data"), op.args.get("operand0")
    if data is None or factor is None:
        return None
    return data, factor.text, factor.value if isinstance(factor, Number) else None


def activation_scale(op: Op) -> float | None:
    """Numeric scale of an activation (1 when absent), or None when it is not a number."""
    if "scale" not in op.args:
        return 1.0
    return op.number("scale")


def keyword_dtype(op: Op) -> str | None:
    """The dtype argument to carry over."""
    return op.attrs.get("dtype")


def on_chip(ref: Ref | None) -> bool:
    """Whether an operand lies in SBUF or PSUM."""
    return ref is not None and ref.buffer.space is not Space.HBM


def in_psum(ref: Ref | None) -> bool:
    """Whether an operand lies in PSUM."""
    return ref is not None and ref.buffer.space is Space.PSUM


def decimal(value: float) -> str:
    """Shortest source text of a number that survives a round trip."""
    return repr(float(value))


def is_plain_reciprocal(kernel: Kernel, op: Op) -> bool:
    """Whether an operation computes ``1 / data`` elementwise."""
    if op.kind == "reciprocal":
        return True
    if op.kind == "tensor_scalar":
        return one_operation(op) and op.attrs["op0"] == "divide" and op.flag("reverse0") and op.number("operand0") == 1
    if op.kind != "activation" or op.attrs.get("op") != "reciprocal":
        return False
    return activation_scale(op) == 1.0 and is_zero(kernel, op, "bias")


def activation_call(kernel: Kernel, function: str, data: str, op: Op, **more: str | None) -> str:
    """Source of an activation with the mask and dtype of ``op``."""
    nisa, nl = kernel.alias("nisa"), kernel.alias("nl")
    return render(f"{nisa}.activation", op=f"{nl}.{function}", data=data, **more, mask=op.mask, dtype=keyword_dtype(op))


def tensor_scalar_call(kernel: Kernel, op: Op, data: str, op0: str, operand0: str) -> str:
    """Source of a one-operation tensor_scalar with the mask and dtype of ``op``."""
    nisa, nl = kernel.alias("nisa"), kernel.alias("nl")
    return render(
        f"{nisa}.tensor_scalar",
        data=data,
        op0=f"{nl}.{op0}",
        operand0=operand0,
        mask=op.mask,
        dtype=keyword_dtype(op),
    )
