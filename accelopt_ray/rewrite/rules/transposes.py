"""Transposes that the DMA engine makes while it loads (docs/rewriter.md, D5)."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.normalise import render_dim, render_ref
from accelopt_ray.rewrite.poly import ZERO, Poly
from accelopt_ray.rewrite.regions import Axis, Buffer, Dim, Op, Ref, Space
from accelopt_ray.rewrite.rule import Edit, Peephole, Resource, render
from accelopt_ray.rewrite.syntax import walk

#: Partitions of a tile, and the largest side of a transpose on the tensor engine.
_PARTITIONS = 128
#: Narrower pieces would leave too much of the tensor engine idle.
_LEAST_ROWS = 32
#: What the tensor engine transposes without rounding; a kernel that takes a tensor's own type takes floating point.
_EXACT_TYPES = frozenset({"", "dtype", "float32", "bfloat16", "float16"})


@dataclass(frozen=True)
class _Pieces:
    """How the rows of the source become columns of the result.

    Attributes:
        rows, columns: Extents of the source tile.
        height: Rows of a piece.
        count: Number of pieces.
    """

    rows: Poly
    columns: Poly
    height: Poly
    count: int


class TransposeOnTensorEngine(Peephole):
    """A transposing load becomes plain loads whose tiles the tensor engine transposes."""

    id = "transpose-on-tensor-engine"
    title = "Load as it lies in HBM and transpose on the tensor engine"
    problem = "a load exchanges the axes of its tile, so that the DMA engines move single elements."
    evidence = "(hbm_read_bytes + hbm_write_bytes) / latency is far below the bandwidth while no engine is busy."
    change = "load up to 128 rows at a time, transpose them with nisa.nc_transpose into PSUM, and copy them out."
    expectation = "DMA transfers of whole rows; transpose_flops and one copy for each tile of 128 rows."
    relieves = Resource.TRAFFIC
    typical_gain = 1.3
    everywhere = True
    keywords = ("load_transpose2d", "dma_transpose", "transposing load", "dma transpose")

    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        source, dest = op.ref("src"), op.dest
        pieces = _pieces(kernel, op)
        if pieces is None or source is None or dest is None:
            return None
        nl, nisa = kernel.alias("nl"), kernel.alias("nisa")
        dtype = op.attrs.get("dtype")
        loaded, flipped = kernel.fresh("rows_loaded"), kernel.fresh("rows_flipped")
        detail = (f"A tile of {pieces.rows.text()} x {pieces.columns.text()} in {pieces.count} piece(s).",)
        if pieces.count == 1:
            load = render(f"{nl}.load", src=source.text, dtype=dtype)
            lines = [f"{loaded} = {load}", f"{flipped} = {nisa}.nc_transpose({loaded})"]
            return Edit(f"{nl}.copy({flipped})", before=lines, details=detail)
        assert source.dims is not None and dest.dims is not None
        part = kernel.fresh("part")
        step = Poly.symbol(part) * pieces.height
        load = render(f"{nl}.load", src=_piece(source, 0, step, pieces.height, nl), dtype=dtype)
        body = (
            f"for {part} in {nl}.affine_range({pieces.count}):\n"
            f"    {loaded} = {load}\n"
            f"    {flipped} = {nisa}.nc_transpose({loaded})\n"
            f"    {_piece(dest, 1, step, pieces.height, nl)} = {nl}.copy({flipped})"
        )
        before = [body]
        if dest.buffer.origin == "value":
            shape = f"({nl}.par_dim({pieces.columns.text()}), {pieces.rows.text()})"
            kind = dtype or f"{source.buffer.name}.dtype"
            before.insert(0, f"{dest.buffer.name} = {nl}.ndarray({shape}, dtype={kind}, buffer={nl}.sbuf)")
        return Edit("", before=before, details=detail)


def _piece(ref: Ref, axis: int, step: Poly, length: Poly, nl: str) -> str:
    """Source of the part of a region that starts ``step`` further along one tile axis."""
    assert ref.dims is not None
    base = _base(ref)
    dims = tuple(
        Dim(dim.start + step, (Axis(axis, 1, length),)) if any(a.position == axis for a in dim.axes) else dim
        for dim in ref.dims
    )
    if all(len(dim.axes) <= 1 and all(each.stride == 1 for each in dim.axes) for dim in dims):
        walked = [dim.axes[0].position for dim in dims if dim.axes]
        if walked == sorted(walked):
            return f"{base}[{', '.join(render_dim(dim, nl, True) for dim in dims)}]"
    return render_ref(base, dims, nl)


def _base(ref: Ref) -> str:
    """Source of the whole tensor of which a region is a part, or ``""`` where the region has a name of its own."""
    node = ref.node
    if isinstance(node, ast.Subscript) and not (isinstance(node.slice, ast.Constant) and node.slice.value is Ellipsis):
        return ast.unparse(node.value)
    node = node.value if isinstance(node, ast.Subscript) else node
    return ref.buffer.name if isinstance(node, ast.Name) and node.id == ref.buffer.name else ""


def _pieces(kernel: Kernel, op: Op) -> _Pieces | None:
    """How to cut a transposing load into tiles, or None when it is none or its shape is not known."""
    source, dest = op.ref("src"), op.dest
    if op.kind != "load_transpose" or op.mask or op.accumulate or source is None or dest is None:
        return None
    if op.attrs.get("axes", "None").strip("()[]").replace(" ", "") not in ("None", "1,0"):
        return None
    if op.attrs.get("dtype", "").rsplit(".", 1)[-1].strip("'\"") not in _EXACT_TYPES:
        return None
    if source.buffer.space is not Space.HBM or dest.buffer.space is not Space.SBUF or _places_tiles(kernel):
        return None
    if any(loop.kind == "if" for loop in op.loops) or not isinstance(op.node, ast.Assign):
        return None
    shape = source.shape
    if source.dims is None or shape is None or len(shape) != 2 or not _has_axes(source, (0, 1)):
        return None
    rows, columns = shape  # The columns fit the tensor engine: they are the partitions of the result already.
    if not _fits(dest, rows, columns):
        return None
    if kernel.names.at_most(rows, _PARTITIONS):
        return _Pieces(rows, columns, rows, 1)
    if rows.value is None or not (_base(source) and _base(dest)):
        return None
    height = max(size for size in range(1, _PARTITIONS + 1) if rows.value % size == 0)
    if height < _LEAST_ROWS or any(axis.stride != 1 for dim in source.dims for axis in dim.axes):
        return None
    return _Pieces(rows, columns, Poly.of(height), rows.value // height)


def _has_axes(ref: Ref, positions: tuple[int, ...]) -> bool:
    """Whether exactly these tile axes run along a dimension of their own, in this order."""
    assert ref.dims is not None
    return tuple(axis.position for dim in ref.dims for axis in dim.axes) == positions and all(
        len(dim.axes) <= 1 for dim in ref.dims
    )


def _fits(dest: Ref, rows: Poly, columns: Poly) -> bool:
    """Whether the result is a whole new tile, or a plain region that an engine can write: from partition 0 on."""
    buffer: Buffer = dest.buffer
    if buffer.origin == "value":
        return len(buffer.writes) == 1 and not buffer.returned
    if buffer.origin != "declared" or dest.dims is None or dest.shape != (columns, rows):
        return False
    if not _has_axes(dest, (0, 1)) or any(axis.stride != 1 for dim in dest.dims for axis in dim.axes):
        return False
    return all(dim.is_point or dim.start == ZERO for dim in dest.dims[: buffer.block_dims + 1])


def _places_tiles(kernel: Kernel) -> bool:
    """Whether the kernel allocates its tiles itself; such a kernel may not use the tensor engine's transposes."""
    return any(isinstance(node, ast.Attribute) and node.attr.endswith("alloc") for node in walk(kernel.tree.entry))


RULES = (TransposeOnTensorEngine(),)
