"""Layout rules: using all partitions (docs/rewriter.md, C3, C4)."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.normalise import normalise, normalised
from accelopt_ray.rewrite.poly import ZERO, Poly
from accelopt_ray.rewrite.regions import Buffer, Op, Ref, Space
from accelopt_ray.rewrite.rule import Resource, Rule, Site, anchor_of, rebound_between, remove, render, tidy
from accelopt_ray.rewrite.syntax import index_of, statement, statements


@dataclass
class _Rotation:
    """``high = a*c - b*s`` and ``low = b*c + a*s`` for the two halves a, b of one tile.

    Attributes:
        difference, total: The operations that write the halves of the result.
        products: The four multiplications.
        copies: Copies that only bring a half to another partition.
        tile: The tile that holds a and b.
        out: The tile that receives both results.
        cosine, sine: The loads of c and s.
        half: Partitions of one half.
    """

    difference: Op
    total: Op
    products: list[Op]
    copies: list[Op]
    tile: Buffer
    out: Buffer
    cosine: Op
    sine: Op
    half: Poly
    columns: Poly


class PackRotation(Rule):
    """A rotation of two half tiles runs once on all partitions."""

    id = "pack-rotation"
    title = "Rotate both halves at once on all partitions"
    problem = (
        "a pair a*c - b*s and b*c + a*s is computed on the two halves of a tile separately, six half-height vector "
        "instructions where engine time does not depend on the height."
    )
    evidence = "vector_engine_active_time_percent dominates while HBM traffic is at its minimum."
    change = (
        "build the swapped tile [-b; a] and the stacked coefficients [c; c], [s; s] with scalar engine copies, then "
        "compute tile*[c; c] + swapped*[s; s] with three full-height instructions."
    )
    expectation = "half the vector engine instructions; the copies run on the otherwise idle scalar engine."
    relieves = Resource.VECTOR
    typical_gain = 1.6
    keywords = ("rotation", "all partitions", "both halves", "packed halves")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        sites: list[Site] = []
        for op in fresh.ops:
            if self._match(fresh, op) is not None:
                sites.append(Site(self.id, anchor_of(op), 0, (), (), op.position))
        return sites

    def _match(self, kernel: Kernel, difference: Op) -> _Rotation | None:
        if difference.kind != "tensor_tensor" or difference.attrs.get("op") != "subtract" or difference.dest is None:
            return None
        out = difference.dest.buffer
        if out.origin != "declared" or out.space is not Space.SBUF or out.block_dims or len(out.writes) != 2:
            return None
        total = next(op for op in out.writes if op is not difference)
        if total.kind != "tensor_tensor" or total.attrs.get("op") != "add" or total.block is not difference.block:
            return None
        products = [self._product(kernel, op, name) for op in (difference, total) for name in ("data1", "data2")]
        if any(product is None for product in products) or difference.mask or total.mask:
            return None
        ac, bs, first, second = products
        assert ac is not None and bs is not None and first is not None and second is not None
        for bc, as_ in ((first, second), (second, first)):
            found = self._assign(kernel, difference, total, [ac, bs, bc, as_])
            if found is not None:
                return found
        return None

    @staticmethod
    def _product(kernel: Kernel, user: Op, name: str) -> Op | None:
        product = kernel.private_source(user.ref(name), user)
        if product is None or product.kind != "tensor_tensor" or product.attrs.get("op") != "multiply" or product.mask:
            return None
        return None if rebound_between(kernel, product, user, product.node) else product

    def _assign(self, kernel: Kernel, difference: Op, total: Op, products: list[Op]) -> _Rotation | None:
        """Tries to read the products as a*c, b*s, b*c, a*s."""
        ac, bs, bc, as_ = products
        for a_name, c_name in (("data1", "data2"), ("data2", "data1")):
            a, c = self._half(kernel, ac, a_name), ac.ref(c_name)
            if a is None or c is None:
                continue
            for b_name, s_name in (("data1", "data2"), ("data2", "data1")):
                b, s = self._half(kernel, bs, b_name), bs.ref(s_name)
                if b is None or s is None:
                    continue
                if not self._is_product(kernel, bc, b[0], c) or not self._is_product(kernel, as_, a[0], s):
                    continue
                copies = [op for op in (a[1], b[1]) if op is not None]
                found = self._check(kernel, difference, total, products, copies, a[0], b[0], c, s)
                if found is not None:
                    return found
        return None

    def _is_product(self, kernel: Kernel, op: Op, half: Ref, factor: Ref) -> bool:
        for one, other in (("data1", "data2"), ("data2", "data1")):
            read = self._half(kernel, op, one)
            second = op.ref(other)
            if read is not None and second is not None and read[0].same_region(half) and second.same_region(factor):
                return True
        return False

    @staticmethod
    def _half(kernel: Kernel, op: Op, name: str) -> tuple[Ref, Op | None] | None:
        """The region a factor stands for, seen through a copy that only moves it to another partition."""
        ref = op.ref(name)
        if ref is None or ref.dims is None:
            return None
        copied = kernel.definition(ref, op)
        if copied is not None and copied.kind == "copy" and not copied.mask and copied.path == op.path:
            source = copied.ref("src")
            readers = {id(reader) for reader, _ in ref.buffer.reads}
            if (
                source is not None
                and source.dims is not None
                and source.buffer.space is Space.SBUF
                and len(readers) == 2
            ):
                return source, copied
        return ref, None

    @staticmethod
    def _check(
        kernel: Kernel,
        difference: Op,
        total: Op,
        products: list[Op],
        copies: list[Op],
        a: Ref,
        b: Ref,
        c: Ref,
        s: Ref,
    ) -> _Rotation | None:
        tile = a.buffer
        if a.buffer is not b.buffer or tile.space is not Space.SBUF or tile.block_dims or len(tile.writes) != 1:
            return None
        if difference.dest is None or total.dest is None:
            return None
        regions = (a, b, difference.dest, total.dest)
        if any(ref.dims is None or len(ref.dims) != 2 for ref in regions):
            return None
        half = c.shape[0] if c.shape is not None else None
        if half is None or s.shape != c.shape or c.shape is None or len(c.shape) != 2:
            return None
        columns = c.shape[1]
        for upper, lower in ((a, b), (difference.dest, total.dest)):
            assert upper.dims is not None and lower.dims is not None
            if upper.dims[0].start != ZERO or lower.dims[0].start != half:
                return None
            if upper.shape != (half, columns) or lower.dims[1] != upper.dims[1] or upper.dims[1].start != ZERO:
                return None
        out = difference.dest.buffer
        if tile.shape is None or out.shape is None or tile.shape[1] != columns or out.shape[1] != columns:
            return None
        if tile.shape[0] != out.shape[0]:
            return None
        loads: list[Op] = []
        for ref in (c, s):
            buffer = ref.buffer
            if buffer.origin != "value" or len(buffer.writes) != 1 or buffer.writes[0].kind != "load":
                return None
            load = buffer.writes[0]
            if (
                load.mask
                or load.block is not difference.block
                or any(reader not in products for reader, _ in buffer.reads)
            ):
                return None
            loads.append(load)
        if any(op not in products and op not in copies and op.kind != "load" for op, _ in tile.reads):
            return None
        if any(op.block is not difference.block for op in [*products, *copies]):
            return None
        return _Rotation(difference, total, products, copies, tile, out, loads[0], loads[1], half, columns)

    def apply(self, kernel: Kernel, site: Site) -> None:
        fresh = normalise(kernel)
        found = self._match(fresh, fresh.ops[site.position])
        if found is None:
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        nl, nisa = fresh.alias("nl"), fresh.alias("nisa")
        assert found.tile.shape is not None
        rows, half, columns = found.tile.shape[0].text(), found.half.text(), found.columns.text()
        # The halves are equal, or the original's instructions would have had operands of different heights.
        upper, lower = f"[0:{half}, 0:{columns}]", f"[{half}:{rows}, 0:{columns}]"
        whole = f"[0:{rows}, 0:{columns}]"
        swapped, pairs = fresh.fresh("swapped"), {}
        text: list[str] = []
        tile = found.tile.name

        def allocate(name: str) -> str:
            return f"{name} = {nl}.ndarray(({nl}.par_dim({rows}), {columns}), dtype={nl}.float32, buffer={nl}.sbuf)"

        text.append(allocate(swapped))
        negated = render(f"{nisa}.activation", op=f"{nl}.copy", data=f"{tile}{lower}", scale="-1.0")
        text.append(f"{swapped}{upper} = {negated}")
        text.append(f"{swapped}{lower} = {nl}.copy({tile}{upper})")
        for load in (found.cosine, found.sine):
            assert load.dest is not None
            source = load.dest.buffer.name
            pair = fresh.fresh(f"{source}_pair")
            pairs[source] = pair
            place = index_of(load.block, load.node)
            load.block.insert(place, statement(allocate(pair)))
            assert isinstance(load.node, ast.Assign)
            load.node.targets[0] = ast.parse(f"{pair}{upper} = 0").body[0].targets[0]  # type: ignore[attr-defined]
            text.append(f"{pair}{lower} = {nl}.copy({pair}{upper})")
        assert found.cosine.dest is not None and found.sine.dest is not None
        cosine, sine = (pairs[op.dest.buffer.name] for op in (found.cosine, found.sine) if op.dest is not None)
        direct, crossed = fresh.fresh("direct"), fresh.fresh("crossed")
        for name, one, other in ((direct, tile, cosine), (crossed, swapped, sine)):
            text.append(f"{name} = {nisa}.tensor_tensor({one}{whole}, {other}{whole}, op={nl}.multiply)")
        text.append(f"{found.out.name}{whole} = {nisa}.tensor_tensor({direct}, {crossed}, op={nl}.add)")
        last = max((found.difference, found.total), key=lambda op: op.position)
        block = last.block
        index = index_of(block, last.node)
        block[index + 1 : index + 1] = [s for line in text for s in statements(line)]
        for op in (found.difference, found.total, *found.products, *found.copies):
            remove(op.block, op.node)
        tidy(fresh)
        kernel.tree = fresh.tree


RULES = (PackRotation(),)
