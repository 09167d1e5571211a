"""Gains over the contraction axis of a product (docs/rewriter.md, A10)."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.normalise import normalise, normalised
from accelopt_ray.rewrite.poly import ONE, ZERO, Poly
from accelopt_ray.rewrite.regions import Buffer, Op, Ref, Space
from accelopt_ray.rewrite.rule import Resource, Rule, Site, anchor_of, render, tidy
from accelopt_ray.rewrite.rules.matmuls import is_transpose, read_instead
from accelopt_ray.rewrite.syntax import expression, index_of, statements

_PARTITIONS = 128


class GainIntoWeight(Rule):
    """A row that scales the columns of a product's left side scales the rows of its right side, once."""

    id = "gain-into-weight"
    title = "Fold the gain over the contraction axis into the resident right side of the product"
    problem = (
        "a row is broadcast over all partitions and multiplied onto every row tile, though it could scale a weight."
    )
    evidence = "vector_engine_active_time_percent is high beside the tensor engine."
    change = (
        "load the gain as (128, 1) columns and multiply each onto its weight tile where that is loaded, once for the "
        "whole kernel; transpose and multiply the rows without it."
    )
    expectation = "one pass of the vector engine over every row tile less, and no broadcast row in SBUF."
    relieves = Resource.VECTOR
    typical_gain = 1.04
    keywords = ("gain into the weight", "fold the gain", "gain over the contraction", "scale the weight")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        found = [op for op in fresh.ops if _read(fresh, op) is not None]
        return [Site(self.id, anchor_of(op), number, (), (), op.position) for number, op in enumerate(found)]

    def apply(self, kernel: Kernel, site: Site) -> None:
        fresh = normalise(kernel)
        op = fresh.ops[site.position]
        gain = _read(fresh, op)
        if gain is None or not isinstance(op.node, ast.Assign):
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        nl, nisa = fresh.alias("nl"), fresh.alias("nisa")
        length = gain.row.dims[1].axes[0].length.text() if gain.row.dims is not None else ""
        for weight in gain.weights:
            load = weight.load
            assert isinstance(load.node, ast.Assign)
            column, raw = fresh.fresh(f"{gain.row.buffer.name}_column"), fresh.fresh(f"{weight.buffer.name}_unscaled")
            first = f"{nl}.ds({weight.start.text()}, {weight.rows})"
            place = index_of(load.block, load.node)
            load.block[place:place] = statements(
                f"{column} = {nl}.load({gain.row.buffer.name}.reshape(({length}, 1))[{first}, 0:1])\n"
                f"{raw} = {ast.unparse(load.call)}"
            )
            load.node.value = expression(
                render(f"{nisa}.tensor_scalar", data=raw, op0=f"{nl}.multiply", operand0=column)
            )
        if op.kind == "scalar_tensor_tensor":
            op.node.value = expression(
                render(
                    f"{nisa}.tensor_scalar",
                    data=gain.data.text,
                    op0=f"{nl}.{op.attrs['op0']}",
                    operand0=op.args["operand0"].text,
                    reverse0=op.attrs.get("reverse0"),
                )
            )
        else:
            read_instead(fresh, op, gain.data)
        tidy(fresh)
        kernel.tree = fresh.tree


@dataclass
class _Weight:
    """A right side, the load that fills it, and which rows of the gain belong to a tile of that load."""

    buffer: Buffer
    load: Op
    start: Poly
    rows: int


@dataclass
class _Gain:
    """A gain in HBM as the row that is loaded, the tile it scales, and the weights that can take it."""

    row: Ref
    data: Ref
    weights: list[_Weight] = field(default_factory=list)


def _read(kernel: Kernel, op: Op) -> _Gain | None:
    """What an operation multiplies by which gain, if all that reads the result can do without it."""
    if op.dest is None or op.mask or not isinstance(op.node, ast.Assign) or op.attrs.get("dtype"):
        return None
    for data, tile in _factors(op):
        row = _row_of(kernel, tile, op)
        if row is None or data.buffer.space is not Space.SBUF or len(data.buffer.writes) != 1:
            continue
        first, own = _first_column(tile), _first_column(op.dest)
        if first is None or own is None or op.dest.buffer.block_dims:
            continue
        uses = _products(kernel, op, first - own)
        weights = _weights(kernel, uses) if uses else None
        if weights:
            return _Gain(row, data, weights)
    return None


def _factors(op: Op) -> list[tuple[Ref, Ref]]:
    """Pairs of a tile and what may be the gain it is multiplied by."""
    if op.kind in ("tensor_tensor", "broadcast_binary") and op.attrs.get("op") == "multiply":
        pairs = [("data1", "data2"), ("data2", "data1")]
    elif op.kind == "scalar_tensor_tensor" and op.attrs.get("op1") == "multiply" and not op.flag("reverse1"):
        pairs = [("data", "operand1")]
    else:
        return []
    found = [(op.ref(data), op.ref(gain)) for data, gain in pairs]
    return [(data, gain) for data, gain in found if data is not None and gain is not None]


def _row_of(kernel: Kernel, tile: Ref, user: Op) -> Ref | None:
    """The (1, K) row in HBM of which every row of a tile is a copy."""
    made = _only_write(tile, user)
    if made is not None and made.kind == "broadcast":
        source = made.ref("src")
        made = _only_write(source, made) if source is not None and _first_column(source) == ZERO else None
    elif tile.shape is None or tile.shape[0] != ONE or user.kind != "broadcast_binary":
        return None
    row = made.ref("src") if made is not None and made.kind == "load" and not made.mask else None
    if row is None or row.dims is None or len(row.dims) != 2 or row.buffer.origin != "argument":
        return None
    shape = row.buffer.shape
    if shape is None or shape[0] != ONE or not row.is_whole:
        return None
    return None if any(other.name == row.buffer.name and other.writes for other in kernel.buffers) else row


def _only_write(ref: Ref, user: Op) -> Op | None:
    """The operation that writes a whole value in front of its user."""
    if ref.buffer.origin != "value" or len(ref.buffer.writes) != 1 or ref.buffer.returned:
        return None
    write = ref.buffer.writes[0]
    return write if write.position < user.position and user.path[: len(write.path)] == write.path else None


def _first_column(ref: Ref) -> Poly | None:
    """Where along the last dimension a two-dimensional region begins, if it is contiguous there."""
    if ref.dims is None or ref.shape is None or len(ref.shape) != 2:
        return None
    dim = ref.dims[-1]
    plain = len(dim.axes) == 1 and dim.axes[0].stride == 1 and dim.axes[0].position == 1
    return dim.start if plain else None


_Use = tuple[Op, Ref, Poly, int]


def _products(kernel: Kernel, op: Op, shift: Poly) -> list[_Use] | None:
    """The products that the scaled tile takes part in: product, other operand, first row of the gain, and how many.

    None if anything else reads the tile. ``shift`` leads from columns of the tile's buffer to elements of the gain.
    """
    assert op.dest is not None
    buffer = op.dest.buffer
    if len(buffer.writes) != 1 or buffer.returned:
        return None
    if buffer.origin != "value" and shift.depends_on(kernel.names.loop_symbols):
        return None
    found: list[_Use] = []
    for reader, name in buffer.reads:
        ref = reader.ref(name)
        column = _first_column(ref) if ref is not None else None
        width = ref.shape[1].value if ref is not None and ref.shape is not None else None
        if column is None or width is None or width > _PARTITIONS or reader.position < op.position or reader.mask:
            return None
        if buffer.origin == "value" and reader.path[: len(op.path)] != op.path:
            return None
        if reader.kind == "high_matmul" and name == "x" and not reader.flag("transpose_x"):
            other = reader.ref("y")
            if other is None:
                return None
            found.append((reader, other, column + shift, width))
        elif is_transpose(kernel, reader, op):
            behind = _behind_transpose(kernel, reader, column + shift, width)
            if behind is None:
                return None
            found += behind
        else:
            return None
    return found


def _behind_transpose(kernel: Kernel, transpose: Op, start: Poly, width: int) -> list[_Use] | None:
    """The products of a transposed tile, seen through its copy into SBUF; None for any other use."""
    assert transpose.dest is not None
    turned = transpose.dest.buffer
    if turned.origin != "value" or len(turned.reads) != 1 or turned.returned:
        return None
    copy = turned.reads[0][0]
    if copy.kind != "copy" or copy.mask or copy.attrs.get("dtype", "float32").endswith("16") or copy.dest is None:
        return None
    kept = copy.dest.buffer
    if copy.path != transpose.path or len(kept.writes) != 1 or kept.returned or kept.space is not Space.SBUF:
        return None
    found: list[_Use] = []
    for product, name in kept.reads:
        other = product.ref({"stationary": "moving", "moving": "stationary"}.get(name, ""))
        ref = product.ref(name)
        if product.kind != "matmul" or product.flag("is_transpose") or product.mask or other is None or ref is None:
            return None
        if not _takes_all_rows(ref, width) or product.position < copy.position:
            return None
        first: Poly | None = start
        if kept.origin != "value" or product.path[: len(copy.path)] != copy.path:
            first = _carried(kernel, start, width, copy.dest, ref)
        if first is None:
            return None
        found.append((product, other, first, width))
    return found


def _carried(kernel: Kernel, start: Poly, width: int, here: Ref, there: Ref) -> Poly | None:
    """What ``start``, known for one mention of a buffer's tiles, is for another mention.

    One of the buffer's dimensions has to count the tiles: its index times their width is ``start``.
    """
    if here.dims is None or there.dims is None or not _takes_all_rows(here, width):
        return None
    if not start.depends_on(kernel.names.loop_symbols):
        return start
    for mine, other in zip(here.dims, there.dims, strict=True):
        if mine.is_point and other.is_point and mine.start * Poly.of(width) == start:
            return other.start * Poly.of(width)
    return None


def _takes_all_rows(ref: Ref, rows: int) -> bool:
    """Whether a region takes the first ``rows`` partitions."""
    return ref.dims is not None and ref.dims[ref.buffer.block_dims].covers(Poly.of(rows))


def _weights(kernel: Kernel, uses: list[_Use]) -> list[_Weight] | None:
    """The right sides of products, if each is loaded once in the whole kernel and used for nothing else."""
    found: list[_Weight] = []
    for buffer in {id(other.buffer): other.buffer for _, other, _, _ in uses}.values():
        mine = [use for use in uses if use[1].buffer is buffer]
        rows = mine[0][3]
        load = _single_load(buffer)
        if load is None or load.dest is None or len(buffer.reads) != len(mine) or any(use[3] != rows for use in mine):
            return None
        if not all(_takes_all_rows(ref, rows) for ref in (load.dest, *(use[1] for use in mine))):
            return None
        starts = {_at_load(kernel, load, use) for use in mine}
        start = starts.pop()
        if starts or start is None:
            return None
        found.append(_Weight(buffer, load, start, rows))
    return found


def _single_load(buffer: Buffer) -> Op | None:
    """The load that fills a buffer, if it fetches no element of its source twice."""
    load = buffer.writes[0] if len(buffer.writes) == 1 else None
    if load is None or load.kind != "load" or load.mask or not isinstance(load.node, ast.Assign):
        return None
    source = load.ref("src")
    if source is None or source.dims is None or source.buffer.origin != "argument" or source.buffer.writes:
        return None
    once = {loop.index for loop in load.loops} <= source.indices
    two = load.dest is not None and load.dest.shape is not None and len(load.dest.shape) == 2
    return load if once and two and buffer.space is Space.SBUF and not buffer.returned else None


def _at_load(kernel: Kernel, load: Op, use: _Use) -> Poly | None:
    """The first row of the gain that belongs to a tile, in terms of the loops around its load."""
    product, other, start, rows = use
    assert load.dest is not None
    if product.position < load.position:
        return None
    inside = {loop.index for loop in load.loops}
    if other.buffer.origin == "value" and product.path[: len(load.path)] == load.path:
        return start if start.symbols & kernel.names.loop_symbols <= inside else None
    return _carried(kernel, start, rows, other, load.dest)


RULES = (GainIntoWeight(),)
