"""What the tensor engine may be told about its operands (docs/rewriter.md, G5)."""

from __future__ import annotations

import ast
import re

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.regions import Op, Ref
from accelopt_ray.rewrite.rule import Edit, Peephole, Resource

_ONE_ZERO = re.compile(r"\.(?:identity|eye|ones|zeros|tri)\(|shared_identity_matrix")
_VALUE = re.compile(r"^(?:0|1)(?:\.0*)?$")


class OneZeroHint(Peephole):
    """A product with an operand of zeros and ones says so."""

    id = "one-zero-hint"
    title = "Tell the tensor engine that an operand holds only zeros and ones"
    problem = "a product with an identity or a tile of ones is computed at the full cost of fp32."
    evidence = "transpose_flops are part of hardware_flops while the tensor engine is the busiest."
    change = "set is_moving_onezero or is_stationary_onezero on the product."
    expectation = "fewer passes of the tensor engine for these products; same flops and bytes."
    relieves = Resource.TENSOR
    typical_gain = 1.02
    keywords = ("onezero", "zeros and ones", "identity operand")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        if op.kind != "matmul" or not isinstance(op.call, ast.Call):
            return None
        missing = [
            f"is_{side}_onezero"
            for side in ("stationary", "moving")
            if not op.flag(f"is_{side}_onezero") and _is_one_zero(op.ref(side))
        ]
        # Named already, the answer may be a variable; positional flags are rare and left alone.
        if not missing or any(name in op.attrs for name in missing) or len(op.call.args) > 2:
            return None
        keywords = [*op.call.keywords, *(ast.keyword(name, ast.Constant(True)) for name in missing)]
        return Edit(ast.unparse(ast.Call(op.call.func, op.call.args, keywords)))


def _is_one_zero(ref: Ref | None) -> bool:
    """Whether every element of an operand is provably 0 or 1."""
    if ref is None:
        return False
    buffer = ref.buffer
    if not buffer.writes:
        return buffer.fill is not None and bool(_VALUE.match(buffer.fill))
    if len(buffer.writes) != 1 or (buffer.fill is not None and not _VALUE.match(buffer.fill)):
        return False
    write = buffer.writes[0]
    if write.kind == "memset":
        return bool(_VALUE.match(write.attrs.get("value", "")))
    source = write.ref("src")
    if write.kind != "load" or source is None or source.buffer.origin != "constant" or source.buffer.writes:
        return False
    declaration = source.buffer.declaration
    if not isinstance(declaration, ast.Assign) or not isinstance(declaration.value, ast.Call):
        return False
    made = declaration.value.args[0] if declaration.value.args else None
    # Nothing around the constructor: ``2 * np.eye(n)`` is something else.
    return isinstance(made, ast.Call) and bool(_ONE_ZERO.search(f".{ast.unparse(made.func).rsplit('.', 1)[-1]}("))


RULES = (OneZeroHint(),)
