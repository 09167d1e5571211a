"""Matrix products: transposes, normalisation and blocking (docs/rewriter.md, A9, E5, G2, G3, H3)."""

from __future__ import annotations

import ast

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.normalise import normalise, normalised, render_ref, replace_ref
from accelopt_ray.rewrite.poly import Poly
from accelopt_ray.rewrite.regions import Dim, Loop, Op, Ref, Space
from accelopt_ray.rewrite.rule import Resource, Rule, Site, anchor_of, is_column, remove, render, tidy
from accelopt_ray.rewrite.syntax import expression, index_of, statements

_PARTITIONS = 128


class SharedTranspose(Rule):
    """``nl.matmul`` inside a loop that does not change its left side becomes one transpose and ``nc_matmul``."""

    id = "shared-transpose"
    title = "Transpose the left side of the product once and share it between all column blocks"
    problem = (
        "nl.matmul transposes its left side on the tensor engine at every call, though the same tile is used for every "
        "column block."
    )
    evidence = "transpose_flops is more than 6 percent of hardware_flops."
    change = (
        "transpose all contraction tiles of the row strip once in front of the column loop, keep them in SBUF, and "
        "call nisa.nc_matmul(transposed tile, right tile) inside."
    )
    expectation = "transpose_flops divided by the number of column blocks; the tensor engine is free for products."
    relieves = Resource.TENSOR
    typical_gain = 1.18
    keywords = ("shared transpose", "transpose once", "nl.matmul", "transposes of the left side")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        return [
            Site(self.id, anchor_of(op), 0, (), (), op.position)
            for op in fresh.ops
            if self._plan(fresh, op) is not None
        ]

    @staticmethod
    def _plan(kernel: Kernel, op: Op) -> tuple[Loop, Loop] | None:
        """The loop in front of which to transpose and the contraction loop."""
        if op.kind != "high_matmul" or op.mask or op.flag("transpose_x") or op.dest is None:
            return None
        left = op.ref("x")
        if left is None or left.dims is None or left.shape is None or left.buffer.space is not Space.SBUF:
            return None
        if left.buffer.block_dims or len(left.dims) != 2 or left.buffer.shape is None:
            return None
        rows, columns = left.dims
        if not rows.covers(left.buffer.shape[0]) or not kernel.names.at_most(left.shape[0], _PARTITIONS):
            return None
        width = left.shape[1].value
        if width is None or width > _PARTITIONS or len(columns.axes) != 1 or columns.axes[0].stride != 1:
            return None
        along = [loop for loop in op.loops if columns.start.depends_on([loop.index])]
        if len(along) != 1 or columns.start != Poly.symbol(along[0].index) * Poly.of(width):
            return None
        contraction = along[0]
        if contraction.trips is None or not contraction.parallel:
            return None
        outer: Loop | None = None
        for loop in reversed(op.loops):
            if loop in left.buffer.loops or any(loop in write.loops for write in left.buffer.writes):
                break
            if loop.kind == "if":
                return None
            outer = loop
        if outer is None or contraction.trips.depends_on(kernel.names.loop_symbols):
            return None
        start = min(o.position for o in kernel.ops if outer in o.loops)
        if any(write.position >= start for write in left.buffer.writes):
            return None
        return outer, contraction

    def apply(self, kernel: Kernel, site: Site) -> None:
        fresh = normalise(kernel)
        op = fresh.ops[site.position]
        plan = self._plan(fresh, op)
        left = op.ref("x")
        if plan is None or left is None or left.shape is None or left.dims is None:
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        outer, contraction = plan
        nl, nisa = fresh.alias("nl"), fresh.alias("nisa")
        name = fresh.fresh(f"{left.buffer.name}_transposed")
        part, flipped = fresh.fresh("part"), fresh.fresh("flipped")
        rows, width = left.shape[0].text(), left.shape[1].text()
        assert contraction.trips is not None
        trips = contraction.trips.text()
        source = f"{left.buffer.name}[0:{rows}, {nl}.ds({part} * {width}, {width})]"
        text = (
            f"{name} = {nl}.ndarray(({trips}, {nl}.par_dim({width}), {rows}), dtype={nl}.float32, buffer={nl}.sbuf)\n"
            f"for {part} in {nl}.affine_range({trips}):\n"
            f"    {flipped} = {nisa}.nc_transpose({source})\n"
            f"    {name}[{part}, 0:{width}, 0:{rows}] = {nl}.copy({flipped})\n"
        )
        right = op.args["y"].text
        call = f"{nisa}.nc_matmul({name}[{contraction.index.split('@')[0]}, 0:{width}, 0:{rows}], {right})"
        assert isinstance(op.node, (ast.Assign, ast.AugAssign))
        op.node.value = expression(call)
        place = index_of(outer.block, outer.node)
        outer.block[place:place] = statements(text)
        tidy(fresh)
        kernel.tree = fresh.tree


class DeferScale(Rule):
    """A per-row scale of a product's left side moves behind the product."""

    id = "defer-row-scale"
    title = "Apply the per-row scale when the product leaves PSUM instead of on its left operand"
    problem = "every element of a wide tile is scaled by a per-row value before it is transposed and multiplied."
    evidence = (
        "scalar_engine_active_time_percent or vector_engine_active_time_percent is high beside the tensor engine."
    )
    change = (
        "transpose and multiply the unscaled tile, and multiply by the (P, 1) vector while copying the result out of "
        "PSUM."
    )
    expectation = "one pass over the wide tile less; the scale costs nothing extra at eviction."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.15
    keywords = ("defer", "normalise after the product", "scale at eviction", "deferred normalisation")

    def _find(self, kernel: Kernel) -> list[Site]:
        return [
            Site(self.id, anchor_of(op), 0, (), (), op.position)
            for op in kernel.ops
            if self._chain(kernel, op) is not None
        ]

    @staticmethod
    def _chain(kernel: Kernel, op: Op) -> tuple[list[Op], Op, Ref] | None:
        """From the scaled tile to the evictions of the products: uses to rewrite, and the scale."""
        if op.kind != "tensor_scalar" or op.attrs.get("op0") != "multiply" or op.attrs.get("op1") or op.mask:
            return None
        scale, data = op.ref("operand0"), op.ref("data")
        if scale is None or data is None or not is_column(scale) or op.dest is None or len(op.dest.buffer.writes) != 1:
            return None
        if data.buffer.space is not Space.SBUF or op.dest.buffer.returned:
            return None
        vector = kernel.definition(scale, op)
        if vector is None or (not vector.loops and op.loops):
            return None
        transposes = [reader for reader, _ in op.dest.buffer.reads]
        if not transposes or not all(is_transpose(kernel, reader, op) for reader in transposes):
            return None
        evictions: list[Op] = []
        for transpose in transposes:
            for product in _products_of(transpose):
                if product is None:
                    return None
                found = _evictions_of(product, vector)
                if not found:
                    return None
                evictions += [eviction for eviction in found if eviction not in evictions]
        return evictions, vector, scale

    def apply(self, kernel: Kernel, site: Site) -> None:
        op = kernel.ops[site.position]
        chain = self._chain(kernel, op)
        if chain is None:
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        evictions, _, scale = chain
        nl, nisa = kernel.alias("nl"), kernel.alias("nisa")
        for eviction in evictions:
            assert isinstance(eviction.node, ast.Assign)
            eviction.node.value = expression(
                render(
                    f"{nisa}.tensor_scalar",
                    data=eviction.args["src"].text,
                    op0=f"{nl}.multiply",
                    operand0=scale.text,
                    dtype=eviction.attrs.get("dtype"),
                )
            )
        data = op.ref("data")
        assert data is not None
        read_instead(kernel, op, data)
        tidy(kernel)


def read_instead(kernel: Kernel, op: Op, data: Ref) -> None:
    """Lets the readers of an operation's result read ``data`` in its place; where that cannot be said, copies it."""
    assert op.dest is not None and isinstance(op.node, ast.Assign)
    direct = op.dest.buffer.origin == "value" and all(
        isinstance(ref.node, (ast.Subscript, ast.Name))
        for reader, name in op.dest.buffer.reads
        for ref in [reader.args[name]]
        if isinstance(ref, Ref)
    )
    if direct and data.dims is not None:
        for reader, name in list(op.dest.buffer.reads):
            ref = reader.args[name]
            assert isinstance(ref, Ref)
            _read_through(kernel, reader, name, ref, data)
        remove(op.block, op.node)
    else:
        op.node.value = expression(f"{kernel.alias('nl')}.copy({data.text})")


def _read_through(kernel: Kernel, reader: Op, name: str, ref: Ref, data: Ref) -> None:
    """Lets a reader of a result read the operand it was made from."""
    assert ref.dims is not None and data.dims is not None
    tile_dims = {axis.position: dim for dim in ref.dims for axis in dim.axes}
    dims: list[Dim] = []
    for dim in data.dims:
        if dim.is_point or not dim.axes:
            dims.append(dim)
            continue
        inner = tile_dims.get(dim.axes[0].position)
        dims.append(Dim(dim.start + inner.start, inner.axes) if inner is not None else dim)
    replace_ref(reader, name, render_ref(data.buffer.name, tuple(dims), kernel.alias("nl")))


def is_transpose(kernel: Kernel, reader: Op, source: Op) -> bool:
    """Whether an operation transposes a two-dimensional part of the source's result."""
    if reader.mask or reader.accumulate or reader.dest is None or reader.path[: len(source.path)] != source.path:
        return False
    if reader.kind == "transpose":
        operand = reader.ref("data")
    elif reader.kind == "matmul" and reader.flag("is_transpose"):
        operand = reader.ref("stationary")
    else:
        return False
    if operand is None or operand.dims is None or source.dest is None or operand.buffer is not source.dest.buffer:
        return False
    shape = source.dest.buffer.shape
    number = operand.buffer.block_dims
    return shape is not None and operand.dims[number].covers(shape[number])


def _products_of(transpose: Op) -> list[Op | None]:
    """Products whose stationary side is a transposed tile, seen through one copy; None for any other use."""
    assert transpose.dest is not None
    found: list[Op | None] = []
    for reader, _ in transpose.dest.buffer.reads:
        if reader.kind != "copy" or reader.mask or reader.dest is None or reader.dest.buffer.returned:
            return [None]
        if reader.dest.buffer.space is not Space.SBUF or any(w is not reader for w in reader.dest.buffer.writes):
            return [None]
        for product, name in reader.dest.buffer.reads:
            fits = product.kind == "matmul" and name == "stationary" and not product.flag("is_transpose")
            found.append(product if fits else None)
    return found or [None]


def _evictions_of(product: Op, vector: Op) -> list[Op]:
    """Copies out of PSUM of a product's result, if that is all that reads it and the scale is constant meanwhile."""
    if product.dest is None or product.dest.buffer.space is not Space.PSUM or product.mask:
        return []
    buffer = product.dest.buffer
    if any(write is not product for write in buffer.writes) or buffer.returned:
        return []
    readers = [reader for reader, _ in buffer.reads]
    for reader in readers:
        whole = reader.kind == "copy" and not reader.mask and isinstance(reader.node, ast.Assign) and reader.function
        if not whole or reader.path[: len(vector.path)] != vector.path:
            return []
    if product.path[: len(vector.path)] != vector.path or not set(vector.loops) <= set(buffer.loops) | _named(product):
        return []
    return readers


def _named(product: Op) -> set[Loop]:
    """Loops that select the destination of a product."""
    assert product.dest is not None
    return {loop for loop in product.loops if loop.index in product.dest.indices}


RULES = (SharedTranspose(), DeferScale())
