"""Chains of elementwise operations that one scalar engine function computes (docs/rewriter.md, A5)."""

from __future__ import annotations

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.patterns import (
    activation_call,
    activation_scale,
    feeder,
    is_plain_reciprocal,
    is_zero,
    one_operation,
    scaled,
)
from accelopt_ray.rewrite.regions import Op, Ref
from accelopt_ray.rewrite.rule import Edit, Peephole, Resource, same_mask


class RecogniseSilu(Peephole):
    """``x / (1 + exp(-x))`` becomes one activation."""

    id = "recognise-silu"
    title = "Replace the exponential, add, reciprocal and multiply chain by one SiLU activation"
    problem = "x * 1/(1 + exp(-x)) is computed in four passes although the scalar engine has this function."
    evidence = "vector_engine_active_time_percent dominates and HBM traffic is at its minimum."
    change = "compute activation(op=nl.silu, data=x) and delete the chain of temporaries."
    expectation = (
        "vector engine time drops to about zero; one scalar engine pass per tile remains, so DMA bounds the loop."
    )
    relieves = Resource.VECTOR
    typical_gain = 1.35
    keywords = ("silu", "swish", "x*sigmoid")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind != "tensor_tensor" or op.attrs.get("op") not in ("multiply", "divide"):
            return None
        pairs = [("data1", "data2")]
        if op.attrs["op"] == "multiply":
            pairs.append(("data2", "data1"))
        for plain, other in pairs:
            x = op.ref(plain)
            chain = self._sigmoid_chain(kernel, op, other)
            if x is None or chain is None:
                continue
            source, drop = chain
            if source.same_region(x):
                return Edit(activation_call(kernel, "silu", x.text, op), drop)
        return None

    def _sigmoid_chain(self, kernel: Kernel, op: Op, operand: str) -> tuple[Ref, list[Op]] | None:
        if op.attrs["op"] == "divide":
            return denominator_of_sigmoid(kernel, op, operand)
        sigmoid = feeder(kernel, op, operand, "activation")
        if sigmoid is not None and sigmoid.attrs.get("op") == "sigmoid":
            data = sigmoid.ref("data")
            if data is not None and activation_scale(sigmoid) == 1.0 and is_zero(kernel, sigmoid, "bias"):
                return data, [sigmoid]
            return None
        inverse = feeder(kernel, op, operand, ("reciprocal", "activation", "tensor_scalar"))
        if inverse is None or not is_plain_reciprocal(kernel, inverse):
            return None
        chain = denominator_of_sigmoid(kernel, inverse, "data")
        return (chain[0], [*chain[1], inverse]) if chain is not None else None


class RecogniseSigmoid(Peephole):
    """``1 / (1 + exp(-x))`` becomes one activation."""

    id = "recognise-sigmoid"
    title = "Replace the exponential, add and reciprocal chain by one sigmoid activation"
    problem = "1/(1 + exp(-x)) is computed in three passes although the scalar engine has this function."
    evidence = "vector_engine_active_time_percent is high."
    change = "compute activation(op=nl.sigmoid, data=x) and delete the chain of temporaries."
    expectation = "two passes and the slow reciprocal leave the vector engine."
    relieves = Resource.VECTOR
    typical_gain = 1.25
    keywords = ("sigmoid",)

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if not is_plain_reciprocal(kernel, op):
            return None
        chain = denominator_of_sigmoid(kernel, op, "data")
        if chain is None:
            return None
        return Edit(activation_call(kernel, "sigmoid", chain[0].text, op), chain[1])


def denominator_of_sigmoid(kernel: Kernel, user: Op, operand: str) -> tuple[Ref, list[Op]] | None:
    """Reads ``1 + exp(-x)`` as an operand: x and the operations that compute the operand."""
    total = feeder(kernel, user, operand, "tensor_scalar")
    if total is None or not one_operation(total) or total.attrs["op0"] != "add" or total.number("operand0") != 1:
        return None
    exponential = feeder(kernel, total, "data", "activation")
    if exponential is None or exponential.attrs.get("op") != "exp" or not is_zero(kernel, exponential, "bias"):
        return None
    data = exponential.ref("data")
    if data is None or not same_mask(exponential, user):
        return None
    if activation_scale(exponential) == -1.0:
        return data, [total, exponential]
    negated = feeder(kernel, exponential, "data", "tensor_scalar")
    read = scaled(negated)
    if activation_scale(exponential) == 1.0 and negated is not None and read is not None and read[2] == -1.0:
        return read[0], [total, exponential, negated]
    return None


RULES = (RecogniseSilu(), RecogniseSigmoid())
