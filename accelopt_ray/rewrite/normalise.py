"""Bringing a kernel into the form in which loops can be reordered: explicit subscripts, one name per loop."""

from __future__ import annotations

import ast
import copy

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.poly import ONE, Poly
from accelopt_ray.rewrite.regions import Dim, Op, Ref
from accelopt_ray.rewrite.syntax import expression, substitute, walk


def normalised(kernel: Kernel) -> Kernel:
    """A normalised copy; ``kernel`` stays as it is."""
    return normalise(Kernel(kernel.tree.copy()))


def normalise(kernel: Kernel) -> Kernel:
    """Gives every loop its own index name and writes sizes and views inside loops out where they are used.

    Edits ``kernel.tree`` and returns a new analysis of it.
    """
    for loop in kernel.loops:
        if "@" in loop.index and isinstance(loop.node.target, ast.Name):
            old, new = loop.node.target.id, kernel.fresh(loop.node.target.id)
            loop.node.target = ast.Name(new, ast.Store())
            for statement in loop.node.body:
                substitute(statement, {old: ast.Name(new, ast.Load())})
    for block, assignment in kernel.statics:
        target = assignment.targets[0]
        assert isinstance(target, ast.Name)
        inside = False
        for statement in block:
            if statement is assignment:
                inside = True
            elif inside:
                if _rebinds(statement, target.id):
                    break
                substitute(statement, {target.id: assignment.value})
        block[:] = [statement for statement in block if statement is not assignment]
    renamed = Kernel(kernel.tree)
    _separate_names(renamed)
    return Kernel(kernel.tree)


def _separate_names(kernel: Kernel) -> None:
    """Gives every buffer inside a loop a name of its own, so that statements can move between bodies."""
    seen: set[str] = set()
    for buffer in kernel.buffers:
        if buffer.name not in seen or not buffer.loops:
            seen.add(buffer.name)
            continue
        mentions = refs_of(kernel, buffer)
        if any(not names_directly(ref.node, buffer.name) for _, _, ref in mentions):
            continue
        new = kernel.fresh(buffer.name)
        seen.add(new)
        for op, name, ref in mentions:
            target = ref.node if name != "dest" else _destination_node(op)
            for node in walk(target):
                if isinstance(node, ast.Name) and node.id == buffer.name:
                    node.id = new
        if isinstance(buffer.declaration, ast.Assign):
            buffer.declaration.targets[0] = ast.Name(new, ast.Store())


def names_directly(node: ast.expr, name: str) -> bool:
    """Whether a region is written with the name of its buffer, not with that of a view."""
    base = node.value if isinstance(node, ast.Subscript) else node
    return isinstance(base, ast.Name) and base.id == name


def _destination_node(op: Op) -> ast.AST:
    node = op.node
    if op.kind == "store":
        call = node.value  # type: ignore[attr-defined]
        return next((k.value for k in call.keywords if k.arg == "dst"), None) or call.args[0]  # type: ignore[no-any-return]
    if isinstance(node, ast.Assign):
        return node.targets[0]
    return node.target  # type: ignore[attr-defined, no-any-return]


def _rebinds(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == name for target in statement.targets
    )


def render_dim(dim: Dim, nl: str, slices: bool) -> str:
    """Source of one subscript."""
    if dim.is_point:
        return dim.start.text()
    if slices and len(dim.axes) == 1 and dim.axes[0].stride == 1:
        length = dim.axes[0].length
        if dim.start == Poly():
            return f"0:{length.text()}"
        if dim.start.value is not None and length.value is not None:
            return f"{dim.start.value}:{dim.start.value + length.value}"
        return f"{nl}.ds({dim.start.text()}, {length.text()})"
    parts: list[str] = []
    rank = max(2, max(axis.position for axis in dim.axes) + 1)
    for axis in dim.axes:
        index = ", ".join(":" if position == axis.position else "None" for position in range(rank))
        grid = f"{nl}.arange({axis.length.text()})[{index}]"
        parts.append(grid if axis.stride == 1 else f"{axis.stride} * {grid}")
    start = dim.start.text()
    return " + ".join(([start] if start != "0" else []) + parts)


def render_ref(name: str, dims: tuple[Dim, ...], nl: str, rank: int = 2) -> str:
    """Source of a region: slices where the tile axes follow the dimensions in order, index grids otherwise."""
    positions = [axis.position for dim in dims for axis in dim.axes]
    simple = all(len(dim.axes) <= 1 and all(axis.stride == 1 for axis in dim.axes) for dim in dims)
    slices = simple and positions == sorted(positions) and len(positions) == rank
    slices = slices and positions == list(range(rank))
    if not slices:
        rank = max([rank, *(position + 1 for position in positions)])
        return f"{name}[{', '.join(_grid_text(dim, nl, rank) for dim in dims)}]"
    return f"{name}[{', '.join(render_dim(dim, nl, True) for dim in dims)}]"


def _grid_text(dim: Dim, nl: str, rank: int) -> str:
    if dim.is_point:
        return dim.start.text()
    parts: list[str] = []
    for axis in dim.axes:
        index = ", ".join(":" if position == axis.position else "None" for position in range(rank))
        grid = f"{nl}.arange({axis.length.text()})[{index}]"
        parts.append(grid if axis.stride == 1 else f"{axis.stride} * {grid}")
    start = dim.start.text()
    return " + ".join(([start] if start != "0" else []) + parts)


def replace_operand(op: Op, name: str, text: str) -> None:
    """Writes an operand of ``op`` anew, in the tree."""
    argument = op.args[name]
    _replace_node(op.node, argument.node, expression(text))


def replace_destination(op: Op, text: str) -> None:
    """Writes the destination of ``op`` anew, in the tree."""
    target = expression(text)
    node = op.node
    if op.kind == "store":
        call = node.value  # type: ignore[attr-defined]
        for keyword in call.keywords:
            if keyword.arg == "dst":
                keyword.value = target
                return
        call.args[0] = target
        return
    _store_context(target)
    if isinstance(node, ast.Assign):
        node.targets[0] = target
    elif isinstance(node, ast.AugAssign):
        node.target = target  # type: ignore[assignment]


def _store_context(node: ast.expr) -> None:
    if isinstance(node, (ast.Name, ast.Subscript)):
        node.ctx = ast.Store()


def _replace_node(root: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in walk(root):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, copy.deepcopy(new))
                return
            if isinstance(value, list):
                for number, item in enumerate(value):
                    if item is old:
                        value[number] = copy.deepcopy(new)
                        return


def refs_of(kernel: Kernel, buffer: object) -> list[tuple[Op, str, Ref]]:
    """Every mention of a buffer: ``(operation, operand name or "dest", region)``."""
    found: list[tuple[Op, str, Ref]] = []
    for op in kernel.ops:
        if op.dest is not None and op.dest.buffer is buffer:
            found.append((op, "dest", op.dest))
        for name, argument in op.args.items():
            if isinstance(argument, Ref) and argument.buffer is buffer:
                found.append((op, name, argument))
    return found


def replace_ref(op: Op, name: str, text: str) -> None:
    """Writes one mention found by :func:`refs_of` anew."""
    if name == "dest":
        replace_destination(op, text)
    else:
        replace_operand(op, name, text)


__all__ = ["ONE", "names_directly", "normalise", "refs_of", "render_dim", "render_ref", "replace_ref"]
