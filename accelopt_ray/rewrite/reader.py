"""Reading one call or operator expression as a canonical operation on tiles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from accelopt_ray.rewrite.calls import REDUCE_OPERATION, SIGNATURES, operation_name
from accelopt_ray.rewrite.poly import ONE, Poly
from accelopt_ray.rewrite.regions import Argument, Buffer, Loop, Number, Op, Opaque, Ref, Space
from accelopt_ray.rewrite.syntax import walk
from accelopt_ray.rewrite.values import Names

ALLOCATIONS = frozenset({"nl.ndarray", "nl.zeros", "nl.full", "nl.ones", "nl.empty_like", "nl.zeros_like"})
OPERATORS = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"}
_ABOUT = frozenset({"shape", "dtype", "ndim"})
_STATIC_KEYWORDS = frozenset({"mask", "dtype", "name", "engine"})


@dataclass(frozen=True)
class Reading:
    """A call in canonical form; see :class:`~accelopt_ray.rewrite.regions.Op` for the fields."""

    kind: str
    args: dict[str, Argument]
    attrs: dict[str, str]
    mask: str
    function: str


class CallReader:
    """Reads expressions in the environment of one kernel."""

    def __init__(self, names: Names) -> None:
        self.names = names

    def allocation(
        self, name: str, value: ast.expr, statement: ast.stmt, block: list[ast.stmt], loops: tuple[Loop, ...]
    ) -> Buffer | None:
        """The buffer a call allocates, or None when it is no allocation."""
        if not isinstance(value, ast.Call):
            return None
        function = self.names.dotted(value.func)
        if function == "nl.shared_constant":
            shape = self._constant_shape(value)
            return Buffer(name, Space.HBM, shape, declaration=statement, block=block, loops=loops, origin="constant")
        if function not in ALLOCATIONS:
            return None
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        shape_node = keywords.get("shape", value.args[0] if value.args else None)
        extents: list[Poly] | None = []
        block_dims = 0
        if isinstance(shape_node, (ast.Tuple, ast.List)):
            for number, part in enumerate(shape_node.elts):
                extent = self.names.poly(part)
                if isinstance(part, ast.Call) and self.names.dotted(part.func).endswith("par_dim"):
                    block_dims = number
                if extent is None or extents is None:
                    extents = None
                else:
                    extents.append(extent)
        else:
            static = self.names.evaluate(shape_node)
            extents = list(static) if isinstance(static, tuple) and all(isinstance(x, Poly) for x in static) else None
        where = ast.unparse(keywords["buffer"]).lower() if "buffer" in keywords else ""
        space = Space.HBM if "hbm" in where else Space.PSUM if "psum" in where else Space.SBUF
        fill = None
        if function in ("nl.zeros", "nl.zeros_like"):
            fill = "0"
        elif function == "nl.ones":
            fill = "1"
        elif function == "nl.full":
            fill_node = keywords.get("fill_value", value.args[1] if len(value.args) > 1 else None)
            fill = ast.unparse(fill_node) if fill_node is not None else None
        return Buffer(
            name,
            space,
            tuple(extents) if extents is not None else None,
            block_dims,
            statement,
            block,
            loops,
            "declared",
            fill,
        )

    def _constant_shape(self, value: ast.Call) -> tuple[Poly, ...] | None:
        inner = value.args[0] if value.args else None
        if isinstance(inner, ast.Call) and ast.unparse(inner.func).endswith(("identity", "eye")) and inner.args:
            size = self.names.poly(inner.args[0])
            return (size, size) if size is not None else None
        return None

    def is_operation(self, node: ast.expr) -> bool:
        """Whether an expression computes a tile (as against a size, an index or a view)."""
        if isinstance(node, ast.Call):
            function = self.names.dotted(node.func)
            if function in SIGNATURES:
                return True
            if isinstance(node.func, ast.Attribute) and node.func.attr == "broadcast_to":
                return isinstance(self.names.evaluate(node.func.value), Ref) or self.is_operation(node.func.value)
            head = function.split(".")[0]
            if head in ("nl", "nisa") and self.names.evaluate(node) is None and function not in ALLOCATIONS:
                return any(self.touches_buffer(a) for a in [*node.args, *[k.value for k in node.keywords]])
            return False
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return any(
                isinstance(self.names.evaluate(side), Ref) or self.is_operation(side)
                for side in (node.left, node.right)
            )
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return isinstance(self.names.evaluate(node.operand), Ref) or self.is_operation(node.operand)
        return False

    def touches_buffer(self, node: ast.expr) -> bool:
        """Whether an expression names a tensor."""
        about = [n.value for n in walk(node) if isinstance(n, ast.Attribute) and n.attr in _ABOUT]
        names = [n for n in walk(node) if isinstance(n, ast.Name) and not any(n is base for base in about)]
        return any(isinstance(self.names.values.get(name.id), Ref) for name in names)

    def read(self, value: ast.expr) -> Reading | None:
        """The operation an expression stands for, or None when it is not understood."""
        if isinstance(value, ast.BinOp):
            operator = OPERATORS[type(value.op)]
            operands = {"x": self._argument(value.left), "y": self._argument(value.right)}
            return self._binary(operator, operands, "", "operator")
        if isinstance(value, ast.UnaryOp):
            data = self._argument(value.operand)
            minus = Number(-1.0, ast.UnaryOp(ast.USub(), ast.Constant(1.0)))
            return Reading("tensor_scalar", {"data": data, "operand0": minus}, {"op0": "multiply"}, "", "operator")
        if not isinstance(value, ast.Call):
            return None
        function = self.names.dotted(value.func)
        signature = SIGNATURES.get(function)
        if signature is None:
            if isinstance(value.func, ast.Attribute) and value.func.attr == "broadcast_to" and value.args:
                source = self._argument(value.func.value)
                return Reading("broadcast", {"src": source}, {"shape": ast.unparse(value.args[0])}, "", "broadcast_to")
            return None
        values: dict[str, ast.expr] = dict(zip(signature.positional, value.args, strict=False))
        if len(value.args) > len(signature.positional):
            return None
        mask = ""
        for keyword in value.keywords:
            if keyword.arg is None:
                return None
            if keyword.arg == "mask":
                is_none = isinstance(keyword.value, ast.Constant) and keyword.value.value is None
                mask = "" if is_none else ast.unparse(keyword.value)
            values[keyword.arg] = keyword.value
        if "x" in values and signature.operands == ("data",):
            values.setdefault("data", values["x"])
        operands = {
            name: self._argument(values[name])
            for name in signature.operands
            if name in values and not (isinstance(values[name], ast.Constant) and values[name].value is None)  # type: ignore[attr-defined]
        }
        attributes = {name: ast.unparse(values[name]) for name in signature.attributes if name in values}
        for name in ("op", "op0", "op1", "reduce_op"):
            if name in attributes:
                attributes[name] = "" if attributes[name] == "None" else operation_name(attributes[name])
        if "dtype" in values:
            attributes["dtype"] = ast.unparse(values["dtype"])
        if signature.kind == "unary":
            attributes["op"] = function.rsplit(".", 1)[-1]
            return Reading("activation", operands, attributes, mask, function)
        if signature.kind == "high_reduce":
            attributes["op"] = operation_name(REDUCE_OPERATION[function.rsplit(".", 1)[-1]])
            return Reading("reduce", operands, attributes, mask, function)
        if signature.kind == "binary":
            read = self._binary(function.rsplit(".", 1)[-1], operands, mask, function)
            if read is not None and "dtype" in attributes:
                read.attrs["dtype"] = attributes["dtype"]
            return read
        return Reading(signature.kind, operands, attributes, mask, function)

    def _binary(self, operation: str, operands: dict[str, Argument], mask: str, function: str) -> Reading | None:
        x, y = operands.get("x"), operands.get("y")
        if x is None or y is None:
            return None
        if any(isinstance(side, Opaque) and self.touches_buffer(side.node) for side in (x, y)):
            return None
        if isinstance(x, Ref) and isinstance(y, Ref):
            left, right = x.shape, y.shape
            if left is not None and right is not None:
                if left == right:
                    return Reading("tensor_tensor", {"data1": x, "data2": y}, {"op": operation}, mask, function)
                if _is_column(right) and left[0] == right[0]:
                    return Reading("tensor_scalar", {"data": x, "operand0": y}, {"op0": operation}, mask, function)
                if _is_column(left) and left[0] == right[0]:
                    attributes = {"op0": operation, "reverse0": "True"}
                    return Reading("tensor_scalar", {"data": y, "operand0": x}, attributes, mask, function)
            return Reading("broadcast_binary", {"data1": x, "data2": y}, {"op": operation}, mask, function)
        if isinstance(x, Ref):
            return Reading("tensor_scalar", {"data": x, "operand0": y}, {"op0": operation}, mask, function)
        if isinstance(y, Ref):
            attributes = {"op0": operation, "reverse0": "True"}
            return Reading("tensor_scalar", {"data": y, "operand0": x}, attributes, mask, function)
        return None

    def _argument(self, node: ast.expr) -> Argument:
        value = self.names.evaluate(node)
        if isinstance(value, Ref):
            return Ref(value.buffer, value.dims, node)
        if isinstance(value, float):
            return Number(value, node)
        if isinstance(value, Poly) and value.value is not None:
            return Number(float(value.value), node)
        return Opaque(node)


def operand_slots(value: ast.expr) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where the operands of a call or operator stand: holder, field, and place in the field if it is a list."""
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Attribute) and value.func.attr == "broadcast_to":
            yield value.func, "value", None
        for number in range(len(value.args)):
            yield value, "args", number
        for keyword in value.keywords:
            if keyword.arg not in _STATIC_KEYWORDS:
                yield keyword, "value", None
    elif isinstance(value, ast.BinOp):
        yield value, "left", None
        yield value, "right", None
    elif isinstance(value, ast.UnaryOp):
        yield value, "operand", None


def _is_column(shape: tuple[Poly, ...]) -> bool:
    return all(extent == ONE for extent in shape[1:])


def result_shape(names: Names, op: Op) -> tuple[Poly, ...] | None:
    """Shape of the tile an operation yields, or None when it is not known."""
    if op.kind == "memset":
        shape = names.evaluate(ast.parse(op.attrs.get("shape", "0"), mode="eval").body)
        known = isinstance(shape, tuple) and all(isinstance(item, Poly) for item in shape)
        return shape if known else None  # type: ignore[return-value]
    if op.kind == "broadcast":
        shape = names.evaluate(ast.parse(op.attrs["shape"], mode="eval").body)
        known = isinstance(shape, tuple) and all(isinstance(item, Poly) for item in shape)
        return shape if known else None  # type: ignore[return-value]
    if op.kind == "broadcast_binary":
        shapes = [ref.shape for ref in op.reads()]
        if len(shapes) == 2 and all(shape is not None and len(shape) == 2 for shape in shapes):
            (p0, f0), (p1, f1) = shapes  # type: ignore[misc]
            return (p1 if p0 == ONE else p0, f1 if f0 == ONE else f0)
        return None
    first = next((ref for ref in op.reads()), None)
    shape = first.shape if first is not None else None
    if shape is None:
        return None
    if op.kind == "reduce":
        return (shape[0], ONE) if len(shape) == 2 else None
    if op.kind in ("transpose", "load_transpose"):
        return (shape[1], shape[0]) if len(shape) == 2 else None
    if op.kind == "matmul":
        moving = op.ref("moving")
        return (shape[1], moving.shape[1]) if moving is not None and moving.shape is not None else None
    if op.kind == "high_matmul":
        moving = op.ref("y")
        rows = shape[1] if op.flag("transpose_x") else shape[0]
        return (rows, moving.shape[1]) if moving is not None and moving.shape is not None else None
    return shape
