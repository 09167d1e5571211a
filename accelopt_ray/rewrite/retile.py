"""Changing how wide the tiles of an elementwise region are along their free axis.

A region is a set of operations on two-dimensional tiles whose free axis has one common extent, the old width. Each
operand is either that wide or one column. Widening runs over more columns per instruction and fewer iterations;
splitting does the opposite with whole rows. Both are legal because every operation treats columns independently (a scan
carries a state, which the scan rule passes on).
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.nest import NotReorderable
from accelopt_ray.rewrite.normalise import refs_of, render_dim, render_ref, replace_ref
from accelopt_ray.rewrite.poly import ONE, ZERO, Poly
from accelopt_ray.rewrite.regions import Axis, Buffer, Dim, Loop, Op, Ref, Space
from accelopt_ray.rewrite.syntax import expression

#: Operations that treat the columns of their tiles independently.
COLUMNWISE = frozenset(
    [
        "load",
        "store",
        "copy",
        "activation",
        "tensor_scalar",
        "tensor_tensor",
        "scalar_tensor_tensor",
        "reciprocal",
        "broadcast",
        "update",
    ]
)


@dataclass
class Region:
    """Operations with a common free width.

    Attributes:
        ops: The operations.
        width: Their free extent.
        inner: Buffers created inside, whose own free extent changes with the width.
        wide: Mentions that are as wide as the region: operation, operand name, region, number of the free dimension.
    """

    ops: Sequence[Op]
    width: Poly
    inner: list[Buffer] = field(default_factory=list)
    wide: list[tuple[Op, str, Ref, int]] = field(default_factory=list)

    @property
    def tiles(self) -> int:
        """How many tiles of the region's width are alive at once, at most."""
        return len({id(ref.buffer) for _, _, ref, _ in self.wide if ref.buffer.space is not Space.HBM})


def read_region(kernel: Kernel, ops: Sequence[Op], scope: Loop | None, kinds: frozenset[str] = COLUMNWISE) -> Region:
    """Checks that operations form a region.

    Args:
        kernel: The kernel, normalised.
        ops: The operations.
        scope: Buffers created inside this loop may change their shape; None allows any that only ``ops`` use.
        kinds: Operations that are allowed.

    Raises:
        NotReorderable: They do not.
    """
    width: Poly | None = None
    chosen = set(map(id, ops))
    mentions: list[tuple[Op, str, Ref, int]] = []
    for op in ops:
        if op.kind not in kinds or (op.accumulate and op.kind != "update"):
            raise NotReorderable(f"{op.kind} does not treat columns independently")
        if op.mask_axes - {0} or any(loop.kind == "if" for loop in op.loops):
            raise NotReorderable("a mask or condition depends on the column")
        named = [(name, value) for name, value in op.args.items() if isinstance(value, Ref)]
        operands = [*named, *([("dest", op.dest)] if op.dest is not None else [])]
        if operands and all(ref.shape is not None and _is_column(ref) for _, ref in operands):
            continue
        for name, ref in operands:
            if ref.shape is None or len(ref.shape) != 2 or ref.dims is None:
                raise NotReorderable(f"{ref.text} is not a two-dimensional tile")
            if ref.buffer.space is Space.PSUM:
                raise NotReorderable("PSUM tiles are limited to 512 columns")
            if ref.shape[1] == ONE and name != "dest":
                continue
            if width is not None and ref.shape[1] != width:
                raise NotReorderable("the tiles have different widths")
            width = ref.shape[1]
            number = next(
                (n for n, dim in enumerate(ref.dims) for axis in dim.axes if axis.position == 1), len(ref.dims) - 1
            )
            dim = ref.dims[number]
            if len(dim.axes) != 1 or dim.axes[0].stride != 1:
                raise NotReorderable("columns are not contiguous")
            mentions.append((op, name, ref, number))
    if width is None:
        raise NotReorderable("nothing is wide")
    region = Region(ops, width, wide=mentions)
    for _, _, ref, _ in mentions:
        buffer = ref.buffer
        if buffer.space is Space.HBM or buffer in region.inner or (scope is not None and scope not in buffer.loops):
            continue
        if any(id(op) not in chosen for op, _, _ in refs_of(kernel, buffer)):
            if scope is None:
                raise NotReorderable(f"{buffer.name} is also used elsewhere")
            continue
        region.inner.append(buffer)
    return region


def _is_column(ref: Ref) -> bool:
    return ref.shape is not None and all(extent == ONE for extent in ref.shape[1:])


def rewrite_dims(kernel: Kernel, op: Op, name: str, ref: Ref, changed: dict[int, Dim], dropped: frozenset[int]) -> None:
    """Writes some subscripts of a region anew and leaves the others as they stand."""
    assert ref.dims is not None
    nl = kernel.alias("nl")
    node = ref.node
    elements = list(node.slice.elts) if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) else []
    if len(elements) != len(ref.dims) or not isinstance(node, ast.Subscript):
        dims = tuple(changed.get(n, dim) for n, dim in enumerate(ref.dims) if n not in dropped)
        replace_ref(op, name, render_ref(ref.buffer.name, dims, nl))
        return
    parts: list[str] = []
    for number, element in enumerate(elements):
        if number in dropped:
            continue
        if number in changed:
            slices = isinstance(element, ast.Slice) or (
                isinstance(element, ast.Call) and ast.unparse(element.func).endswith(".ds")
            )
            parts.append(render_dim(changed[number], nl, slices))
        else:
            parts.append(ast.unparse(element))
    replace_ref(op, name, f"{ast.unparse(node.value)}[{', '.join(parts)}]")


def resize(kernel: Kernel, buffer: Buffer, width: Poly, dropped: frozenset[int] = frozenset()) -> None:
    """Declares a buffer with a new free extent, and without some block dimensions."""
    if buffer.origin != "declared":
        return
    assert isinstance(buffer.declaration, ast.Assign) and isinstance(buffer.declaration.value, ast.Call)
    call = buffer.declaration.value
    shape = next((k.value for k in call.keywords if k.arg == "shape"), None) or call.args[0]
    if not isinstance(shape, (ast.Tuple, ast.List)):
        raise NotReorderable(f"the shape of {buffer.name} is not written out")
    shape.elts = [*shape.elts[:-1], expression(width.text())]
    shape.elts = [element for number, element in enumerate(shape.elts) if number not in dropped]
    call.keywords = [keyword for keyword in call.keywords if keyword.arg != "name"]


def widen_op_shapes(region: Region, width: Poly) -> None:
    """Writes the shape arguments of broadcasts anew."""
    for op in region.ops:
        if op.kind == "broadcast" and isinstance(op.call, ast.Call):
            shape = op.call.args[-1]
            if not isinstance(shape, (ast.Tuple, ast.List)):
                raise NotReorderable("the shape of a broadcast is not written out")
            shape.elts[-1] = expression(width.text())


def full_extent(ref: Ref, number: int) -> bool:
    """Whether the free dimension is taken as a whole."""
    assert ref.dims is not None
    shape = ref.buffer.shape
    return shape is not None and ref.dims[number].covers(shape[number])


def moved(start: Poly, width: Poly) -> Dim:
    """A free dimension of a new place and width."""
    return Dim(start, (Axis(1, 1, width),))


__all__ = ["ONE", "ZERO", "Region", "full_extent", "moved", "read_region", "resize", "rewrite_dims", "widen_op_shapes"]
