"""Softmax: the scale of the scores (docs/rewriter.md, H2)."""

from __future__ import annotations

import ast

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.normalise import replace_operand
from accelopt_ray.rewrite.patterns import activation_call, activation_scale, decimal, one_operation, scaled
from accelopt_ray.rewrite.regions import Op, Ref, Space
from accelopt_ray.rewrite.rule import Resource, Rule, Site, anchor_of, is_column, rebound_between, remove, tidy
from accelopt_ray.rewrite.syntax import expression, index_of, statement


class ScaleInsideExponential(Rule):
    """Scores that are scaled before their maximum is taken are scaled inside the exponential."""

    id = "scale-inside-exponential"
    title = "Take the maximum of the unscaled scores and scale inside the exponential"
    problem = "a pass over the scores multiplies them by a positive constant before the maximum and the exponential."
    evidence = "vector_engine_active_time_percent or scalar_engine_active_time_percent is high."
    change = "reduce the unscaled scores, multiply the (P, 1) maximum by the constant, pass the constant as scale."
    expectation = "one pass over the scores less."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.08
    keywords = ("unscaled scores", "scale inside", "inside exp", "scale inside the exponential")

    def _find(self, kernel: Kernel) -> list[Site]:
        found = [op for op in kernel.ops if self._uses(kernel, op) is not None]
        return [Site(self.id, anchor_of(op), number, (), (), op.position) for number, op in enumerate(found)]

    @staticmethod
    def _uses(kernel: Kernel, op: Op) -> tuple[Ref, float, list[Op], list[Op]] | None:
        """Scores, constant, maxima and activations, if these are all that reads the scaled scores."""
        read = scaled(op)
        if read is None or read[2] is None or not read[2] > 0 or op.mask or op.attrs.get("dtype") or op.dest is None:
            return None
        scores, buffer = read[0], op.dest.buffer
        if scores.buffer.space is not Space.SBUF or is_column(op.dest) or not one_operation(op):
            return None
        if buffer.space is not Space.SBUF or len(buffer.writes) != 1 or buffer.returned or not buffer.reads:
            return None
        maxima: list[Op] = []
        activations: list[Op] = []
        for reader, name in buffer.reads:
            ref = reader.ref(name)
            if ref is None or not ref.same_region(op.dest) or reader.block is not op.block or reader.mask:
                return None
            if not kernel.stable_between(op, reader) or rebound_between(kernel, op, reader, op.node):
                return None
            if reader.kind == "reduce" and reader.attrs.get("op") == "maximum" and isinstance(reader.node, ast.Assign):
                maxima.append(reader)
            elif (
                reader.kind == "activation"
                and name == "data"
                and not reader.attrs.get("reduce_op")
                and activation_scale(reader) is not None
                and isinstance(reader.node, ast.Assign)
            ):
                activations.append(reader)
            else:
                return None
        return (scores, read[2], maxima, activations) if maxima and activations else None

    def apply(self, kernel: Kernel, site: Site) -> None:
        op = kernel.ops[site.position]
        uses = self._uses(kernel, op)
        if uses is None:
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        scores, factor, maxima, activations = uses
        nl, nisa = kernel.alias("nl"), kernel.alias("nisa")
        for reader in activations:
            bias = reader.args.get("bias")
            scale = decimal(factor * (activation_scale(reader) or 0.0))
            assert isinstance(reader.node, ast.Assign)
            reader.node.value = expression(
                activation_call(
                    kernel, reader.attrs["op"], scores.text, reader,
                    scale=scale, bias=bias.text if bias is not None else None,
                )
            )  # fmt: skip
        for reader in maxima:
            assert isinstance(reader.node, ast.Assign)
            target, raw = reader.node.targets[0], kernel.fresh("unscaled_max")
            replace_operand(reader, "data", scores.text)
            reader.node.targets[0] = ast.Name(raw, ast.Store())
            text = f"{nisa}.tensor_scalar(data={raw}, op0={nl}.multiply, operand0={decimal(factor)})"
            place = index_of(reader.block, reader.node)
            reader.block.insert(place + 1, statement(f"{ast.unparse(target)} = {text}"))
        remove(op.block, op.node)
        tidy(kernel)


RULES = (ScaleInsideExponential(),)
