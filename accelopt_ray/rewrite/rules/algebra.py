"""Algebraic rules: the same value from fewer or cheaper instructions (docs/rewriter.md, A)."""

from __future__ import annotations

import ast
import copy
import math

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.patterns import (
    activation_call,
    activation_scale,
    decimal,
    feeder,
    is_plain_reciprocal,
    is_zero,
    keyword_dtype,
    on_chip,
    one_operation,
    scaled,
    tensor_scalar_call,
)
from accelopt_ray.rewrite.regions import Number, Op, Opaque, Ref
from accelopt_ray.rewrite.rule import Edit, Peephole, Resource, free_size, is_column, render


class FactorScaledSelf(Peephole):
    """``x - c*x`` becomes ``(1 - c)*x``."""

    id = "factor-scaled-self"
    title = "Factor a scaled self-subtraction into one multiplication"
    problem = "a tile is multiplied by a constant only to be added to or subtracted from itself."
    evidence = "vector_engine_active_time_percent is high while HBM traffic is at its minimum."
    change = "replace the multiply and the add or subtract by one tensor_scalar multiply with the folded constant."
    expectation = "one pass less on the vector engine; HBM traffic unchanged."
    relieves = Resource.VECTOR
    typical_gain = 1.05
    keywords = ("factor", "self-subtraction", "weight decay")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind != "tensor_tensor" or op.attrs.get("op") not in ("add", "subtract"):
            return None
        subtract = op.attrs["op"] == "subtract"
        for plain, other in (("data1", "data2"), ("data2", "data1")):
            product = feeder(kernel, op, other, "tensor_scalar")
            read = scaled(product)
            x = op.ref(plain)
            if product is None or read is None or x is None or read[2] is None or not read[0].same_region(x):
                continue
            factor = 1.0 + read[2]
            if subtract:
                factor = 1.0 - read[2] if plain == "data1" else read[2] - 1.0
            value = tensor_scalar_call(kernel, op, x.text, "multiply", decimal(factor))
            return Edit(value, [product], details=(f"The folded constant is {decimal(factor)}.",))
        return None


class SqrtReciprocalToRsqrt(Peephole):
    """``1 / sqrt(e)`` becomes ``rsqrt(e)``."""

    id = "rsqrt"
    title = "Replace square root followed by reciprocal with one rsqrt activation"
    problem = "a square root feeds nothing but a reciprocal or a division."
    evidence = "scalar and vector engines are both busy on small or full tiles."
    change = "compute activation(op=nl.rsqrt) with the square root's scale and bias."
    expectation = "one pass and one temporary less; the slow reciprocal leaves the vector engine."
    relieves = Resource.VECTOR
    typical_gain = 1.05
    keywords = ("rsqrt", "reciprocal square root")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if is_plain_reciprocal(kernel, op):
            root = feeder(kernel, op, "data", "activation")
            if root is None or root.attrs.get("op") != "sqrt":
                return None
            return Edit(self._rsqrt(kernel, root, op), [root])
        if op.kind == "tensor_tensor" and op.attrs.get("op") == "divide":
            root = feeder(kernel, op, "data2", "activation")
            numerator = op.ref("data1")
            if root is None or root.attrs.get("op") != "sqrt" or numerator is None:
                return None
            name = kernel.fresh("inverse_root")
            nisa, nl = kernel.alias("nisa"), kernel.alias("nl")
            value = render(
                f"{nisa}.tensor_tensor", data1=numerator.text, data2=name, op=f"{nl}.multiply", mask=op.mask,
                dtype=keyword_dtype(op),
            )  # fmt: skip
            return Edit(value, [root], before=[f"{name} = {self._rsqrt(kernel, root, op)}"])
        return None

    @staticmethod
    def _rsqrt(kernel: Kernel, root: Op, op: Op) -> str:
        scale, bias = root.args.get("scale"), root.args.get("bias")
        data = root.args["data"].text
        return activation_call(
            kernel, "rsqrt", data, op, scale=scale.text if scale else None, bias=bias.text if bias else None
        )


class DivideByColumn(Peephole):
    """``tile / vector`` becomes ``tile * reciprocal(vector)``."""

    id = "reciprocal-of-vector"
    title = "Divide by a per-row value through the reciprocal of the (P, 1) vector"
    problem = "a full tile is divided by one value per row; a division costs the engine several cycles per element."
    evidence = "vector_engine_active_time_percent is high."
    change = "take nisa.reciprocal of the (P, 1) vector once and multiply the tile by it."
    expectation = "the full-tile division becomes a one-pass multiply; the vector's reciprocal costs next to nothing."
    relieves = Resource.VECTOR
    typical_gain = 1.1
    keywords = ("reciprocal of the vector", "divide by a row statistic")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if not one_operation(op) or op.attrs["op0"] != "divide" or op.flag("reverse0"):
            return None
        data, vector = op.ref("data"), op.ref("operand0")
        if vector is None or not is_column(vector) or is_column(data) or op.mask:
            return None
        nisa = kernel.alias("nisa")
        name = kernel.fresh("inverse")
        before = f"{name} = {nisa}.reciprocal(data={vector.text})"
        return Edit(tensor_scalar_call(kernel, op, op.args["data"].text, "multiply", name), before=[before])


class ScaleIntoActivation(Peephole):
    """A multiplication that feeds one activation becomes its scale."""

    id = "scale-into-activation"
    title = "Fold a multiplication into the scale of the activation that follows"
    problem = "a tile is multiplied by a constant or per-row value in a pass of its own before a function is applied."
    evidence = "many one-operation passes on the scalar and vector engines."
    change = "pass the factor as scale= of the activation and delete the multiplication."
    expectation = "one pass and one temporary less; the scale is free on the scalar engine."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.06
    keywords = ("scale of the activation", "activation scale", "fold the multiplication")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind != "activation" or activation_scale(op) is None:
            return None
        product = feeder(kernel, op, "data", "tensor_scalar")
        if product is None or not one_operation(product) or product.attrs["op0"] not in ("multiply", "divide"):
            return None
        data, factor = product.ref("data"), product.args.get("operand0")
        if data is None or factor is None or not on_chip(data):
            return None
        scale = activation_scale(op)
        if product.attrs["op0"] == "divide":
            if product.flag("reverse0") or isinstance(factor, Ref):
                return None
            text = decimal(scale / factor.value) if isinstance(factor, Number) and factor.value and scale else None
            if isinstance(factor, Opaque):
                text = f"{decimal(scale or 0.0)} / {factor.text}"
        elif isinstance(factor, Number):
            text = decimal((scale or 0.0) * factor.value)
        elif scale == 1.0 and (isinstance(factor, Opaque) or is_column(factor)):
            text = factor.text
        else:
            return None
        if text is None or op.attrs.get("reduce_op"):
            return None
        bias = op.args.get("bias")
        value = activation_call(kernel, op.attrs["op"], data.text, op, bias=bias.text if bias else None, scale=text)
        return Edit(value, [product])


class BiasIntoActivation(Peephole):
    """An addition of a per-row value that feeds one activation becomes its bias."""

    id = "bias-into-activation"
    title = "Fold a per-row addition into the bias of the activation that follows"
    problem = "a (P, 1) vector is added to or subtracted from a tile in a pass of its own before a function is applied."
    evidence = "many one-operation passes on the scalar and vector engines."
    change = "pass the vector as bias= of the activation and delete the addition."
    expectation = "one pass and one temporary less; the bias is free on the scalar engine."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.06
    keywords = ("bias of the activation", "activation bias", "fold the addition")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind != "activation" or activation_scale(op) != 1.0 or not is_zero(kernel, op, "bias"):
            return None
        if op.attrs.get("op") in ("copy", "reciprocal") or op.attrs.get("reduce_op"):
            return None
        total = feeder(kernel, op, "data", "tensor_scalar")
        if total is None:
            return None
        data, vector = total.ref("data"), total.ref("operand0")
        scale: str | None = None
        if total.attrs.get("op1"):
            # x * c + vector
            first = total.args.get("operand0")
            vector = total.ref("operand1")
            ordered = not total.flag("reverse1") and total.attrs["op0"] == "multiply" and total.attrs["op1"] == "add"
            if not ordered or first is None or (isinstance(first, Ref) and not is_column(first)):
                return None
            scale = first.text
        elif total.attrs["op0"] != "add":
            return None
        if data is None or vector is None or not is_column(vector) or is_column(data):
            return None
        return Edit(activation_call(kernel, op.attrs["op"], data.text, op, bias=vector.text, scale=scale), [total])


class ConstantAfterActivation(Peephole):
    """``c * rsqrt(x)`` becomes ``rsqrt(x / c^2)``; likewise for square and relu."""

    id = "constant-through-activation"
    title = "Move a constant factor behind a function into its scale"
    problem = "the result of a square, rsqrt or relu is multiplied by a constant in a pass of its own."
    evidence = "many one-operation passes on the scalar and vector engines."
    change = (
        "fold the factor c into the activation's scale (c*rsqrt(x) = rsqrt(x/c^2), c*square(x) = square(sqrt(c)*x))."
    )
    expectation = "one pass and one temporary less."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.05
    keywords = ("constant factor", "through the activation")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        read = scaled(op)
        if read is None or read[2] is None or read[2] <= 0:
            return None
        function = feeder(kernel, op, "data", "activation")
        if function is None or not is_zero(kernel, function, "bias"):
            return None
        scale = activation_scale(function)
        if scale is None or scale <= 0:
            return None
        factor = read[2]
        name = function.attrs.get("op", "")
        folded = {"rsqrt": scale / factor**2, "square": scale * math.sqrt(factor), "relu": scale * factor}.get(name)
        if folded is None or not 1e-12 < folded < 1e12:
            return None
        data = function.args["data"].text
        return Edit(activation_call(kernel, name, data, op, scale=decimal(folded)), [function])


class ConstantThroughSum(Peephole):
    """``c * (a*x + b*y)`` becomes ``(c*a)*x + (c*b)*y``."""

    id = "constant-through-sum"
    title = "Merge a constant factor into the constants of the sum it multiplies"
    problem = "a sum of two scaled tiles is multiplied by yet another constant in a pass of its own."
    evidence = "many one-operation passes on the scalar and vector engines."
    change = "multiply both inner constants by the outer one and delete the outer pass."
    expectation = "one pass and one temporary less."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.04
    keywords = ("merge constants", "linear combination")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        read = scaled(op)
        if read is None or read[2] is None:
            return None
        total = feeder(kernel, op, "data", "tensor_tensor")
        if total is None or total.attrs.get("op") not in ("add", "subtract"):
            return None
        before: list[str] = []
        names: list[str] = []
        drop = [total]
        for operand in ("data1", "data2"):
            product = feeder(kernel, total, operand, "tensor_scalar")
            inner = scaled(product)
            if product is None or inner is None or inner[2] is None:
                return None
            name = kernel.fresh("scaled")
            names.append(name)
            before.append(
                f"{name} = {tensor_scalar_call(kernel, op, inner[0].text, 'multiply', decimal(inner[2] * read[2]))}"
            )
            drop.append(product)
        nisa, nl = kernel.alias("nisa"), kernel.alias("nl")
        value = render(
            f"{nisa}.tensor_tensor", data1=names[0], data2=names[1], op=f"{nl}.{total.attrs['op']}", mask=op.mask,
            dtype=keyword_dtype(op),
        )  # fmt: skip
        return Edit(value, drop, before=before)


class SquareOnScalarEngine(Peephole):
    """``x * x`` (and ``c*x * x``) becomes one square activation."""

    id = "square-activation"
    title = "Compute squares with the scalar engine's square activation"
    problem = "a tile is multiplied by itself on the vector engine, which costs two cycles per fp32 element."
    evidence = "vector_engine_active_time_percent exceeds scalar_engine_active_time_percent."
    change = "use activation(op=nl.square) with a constant factor folded into its scale as a square root."
    expectation = "the product leaves the vector engine; the scalar engine needs one cycle per element."
    relieves = Resource.VECTOR
    typical_gain = 1.12
    keywords = ("square", "move the square")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind != "tensor_tensor" or op.attrs.get("op") != "multiply":
            return None
        x, y = op.ref("data1"), op.ref("data2")
        if x is None or y is None:
            return None
        if x.same_region(y):
            return Edit(activation_call(kernel, "square", x.text, op))
        for plain, other in ((x, "data2"), (y, "data1")):
            product = feeder(kernel, op, other, "tensor_scalar")
            read = scaled(product)
            if product is None or read is None or read[2] is None or read[2] <= 0:
                continue
            if read[0].same_region(plain):
                scale = decimal(math.sqrt(read[2]))
                return Edit(activation_call(kernel, "square", plain.text, op, scale=scale), [product])
        return None


class ReciprocalOnScalarEngine(Peephole):
    """A full-tile reciprocal moves from the vector to the scalar engine."""

    id = "reciprocal-activation"
    title = "Move a full-tile reciprocal to the scalar engine"
    problem = "a reciprocal over a whole tile occupies the vector engine for more than two cycles per element."
    evidence = "vector_engine_active_time_percent exceeds scalar_engine_active_time_percent."
    change = "use activation(op=nl.reciprocal), without a bias, instead of nisa.reciprocal."
    expectation = "vector engine time falls by two to three passes; scalar engine time rises by one."
    relieves = Resource.VECTOR
    typical_gain = 1.15
    keywords = ("reciprocal to the scalar engine", "reciprocal activation")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind != "reciprocal":
            return None
        data = op.ref("data")
        size = free_size(data)
        if data is None or (size is not None and size < 64) or (size is None and not self._is_wide(data)):
            return None
        return Edit(activation_call(kernel, "reciprocal", data.text, op))

    @staticmethod
    def _is_wide(data: Ref) -> bool:
        return data.shape is not None and any(extent.value is None for extent in data.shape[1:])


class SubtractNegated(Peephole):
    """``a + (-1)*b`` becomes ``a - b``."""

    id = "subtract-negated"
    title = "Replace adding a negated tile by a subtraction"
    problem = "a tile is multiplied by -1 only to be added."
    evidence = "vector engine instruction count."
    change = "subtract the tile and delete the negation."
    expectation = "one pass less."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.04
    keywords = ("sign", "negation", "negated")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind != "tensor_tensor" or op.attrs.get("op") not in ("add", "subtract"):
            return None
        for plain, other in (("data1", "data2"), ("data2", "data1")):
            if op.attrs["op"] == "subtract" and other == "data1":
                continue
            product = feeder(kernel, op, other, "tensor_scalar")
            read = scaled(product)
            if product is None or read is None or read[2] != -1.0:
                continue
            operation = "subtract" if op.attrs["op"] == "add" else "add"
            nisa, nl = kernel.alias("nisa"), kernel.alias("nl")
            value = render(
                f"{nisa}.tensor_tensor", data1=op.args[plain].text, data2=read[0].text, op=f"{nl}.{operation}",
                mask=op.mask, dtype=keyword_dtype(op),
            )  # fmt: skip
            return Edit(value, [product])
        return None


class NegatedMaximum(Peephole):
    """``-max(x)`` comes out of the reduction itself."""

    id = "negated-reduce"
    title = "Let the reduction negate its result"
    problem = "the row maximum is multiplied by -1 in an instruction of its own."
    evidence = "many tiny vector engine instructions."
    change = "set negate=True on the tensor_reduce and delete the multiplication."
    expectation = "one small instruction less per row tile."
    relieves = Resource.OVERHEAD
    typical_gain = 1.02
    keywords = ("negate",)

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind != "tensor_scalar" or op.mask:
            return None
        if op.attrs.get("op1"):
            lowest = op.number("operand0")
            identity = op.attrs["op0"] == "maximum" and lowest is not None and lowest <= -3.4028234e38
            if not identity or op.attrs["op1"] != "multiply" or op.number("operand1") != -1.0:
                return None
        elif op.attrs.get("op0") != "multiply" or op.number("operand0") != -1.0:
            return None
        reduction = feeder(kernel, op, "data", "reduce")
        if reduction is None or not reduction.function.startswith("nisa.") or reduction.flag("negate"):
            return None
        negated = copy.deepcopy(reduction.call)
        assert isinstance(negated, ast.Call)
        negated.keywords = [keyword for keyword in negated.keywords if keyword.arg != "negate"]
        negated.keywords.append(ast.keyword("negate", ast.Constant(True)))
        return Edit(ast.unparse(negated), [reduction])


RULES = (
    FactorScaledSelf(),
    SqrtReciprocalToRsqrt(),
    DivideByColumn(),
    ScaleIntoActivation(),
    BiasIntoActivation(),
    ConstantAfterActivation(),
    ConstantThroughSum(),
    SquareOnScalarEngine(),
    ReciprocalOnScalarEngine(),
    SubtractNegated(),
    NegatedMaximum(),
)
