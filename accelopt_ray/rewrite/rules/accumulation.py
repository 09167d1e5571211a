"""Sums of products stay in PSUM until they are complete (docs/rewriter.md, A11, F1, G7)."""

from __future__ import annotations

import ast

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.normalise import normalise, normalised, refs_of
from accelopt_ray.rewrite.regions import Buffer, Loop, Op, Ref, Space
from accelopt_ray.rewrite.rule import Resource, Rule, Site, anchor_of, remove, tidy
from accelopt_ray.rewrite.rules.psum import fits_bank, is_running_sum, keep_in_psum
from accelopt_ray.rewrite.syntax import expression, index_of, statements


class AccumulateInPsum(Rule):
    """Products that are added up in SBUF are accumulated in one PSUM tile."""

    id = "accumulate-in-psum"
    title = "Accumulate the products in PSUM and copy the sum out once"
    problem = "every partial product is read from PSUM and added to a sum in SBUF."
    evidence = "psum_read_bytes are a multiple of the output's size and the vector engine is busy beside products."
    change = "declare the sum in PSUM, zeroed, add each product to it with +=, and copy it to SBUF after the loop."
    expectation = "one PSUM read for each sum instead of each product; the additions leave the vector engine."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.15
    keywords = ("accumulate in psum", "accumulate the products", "sum of products")

    def _find(self, kernel: Kernel) -> list[Site]:
        found = [op for op in kernel.ops if _product(kernel, op) is not None]
        return [Site(self.id, anchor_of(op), number, (), (), op.position) for number, op in enumerate(found)]

    def apply(self, kernel: Kernel, site: Site) -> None:
        op = kernel.ops[site.position]
        product = _product(kernel, op)
        if product is None or op.dest is None:
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        if op.kind == "loop_reduce":
            _replace_reduction(kernel, op, product)
        else:
            if product is not op:
                place = index_of(op.block, op.node)
                target = ast.unparse(op.node.targets[0] if isinstance(op.node, ast.Assign) else op.dest.node)
                op.block[place : place + 1] = statements(f"{target} += {ast.unparse(product.call)}")
                remove(product.block, product.node)
            keep_in_psum(kernel, op)
        tidy(kernel)


def _product(kernel: Kernel, op: Op) -> Op | None:
    """The product that an operation adds to a sum in SBUF, if the sum may stay in PSUM."""
    if op.kind == "matmul":
        plain = op.accumulate and not op.flag("is_transpose")
        return op if plain and is_running_sum(kernel, op) else None
    if op.kind == "loop_reduce":
        return _reduced(kernel, op)
    if op.attrs.get("op") != "add" or op.dest is None:
        return None
    if op.kind == "update":
        added = op.ref("data2")
        sums = is_running_sum(kernel, op)
    elif op.kind == "tensor_tensor" and isinstance(op.node, ast.Assign):
        first, second = op.ref("data1"), op.ref("data2")
        if first is None or second is None or first.buffer is second.buffer:
            return None
        added = second if first.same_region(op.dest) else first
        kept = first if added is second else second
        sums = kept.same_region(op.dest) and _is_sum_of(kernel, op)
    else:
        return None
    return _private_product(kernel, added, op) if sums else None


def _is_sum_of(kernel: Kernel, op: Op) -> bool:
    """Whether ``total = total + product`` is a running sum: nothing else reads the total inside the loops."""
    assert op.dest is not None
    buffer = op.dest.buffer
    inside = [loop for loop in op.loops if loop not in buffer.loops]
    if buffer.space is not Space.SBUF or buffer.block_dims or buffer.fill != "0" or buffer.returned or not inside:
        return False
    if not fits_bank(kernel, buffer.shape) or op.dest.shape != buffer.shape or len(buffer.writes) != 1 or op.mask:
        return False
    others = [user for user, _, _ in refs_of(kernel, buffer) if user is not op]
    late = all(user.position > op.position and not set(inside) & set(user.loops) for user in others)
    return bool(others) and late and isinstance(buffer.declaration, ast.Assign)


def _private_product(kernel: Kernel, ref: Ref | None, user: Op) -> Op | None:
    product = kernel.private_source(ref, user)
    if product is None or product.kind != "matmul" or product.accumulate or product.mask or user.mask:
        return None
    return None if product.flag("is_transpose") or product.attrs.get("dtype") else product


def _reduced(kernel: Kernel, op: Op) -> Op | None:
    """The product that a ``loop_reduce`` sums over the loops directly around it."""
    if op.dest is None or op.attrs.get("op") != "add" or op.mask or not isinstance(op.node, ast.Assign):
        return None
    product = _private_product(kernel, op.ref("x"), op)
    if product is None or not fits_bank(kernel, op.dest.shape) or op.dest.dims is None or not _summed(op):
        return None
    buffer = op.dest.buffer
    if buffer.space is not Space.SBUF or len(buffer.writes) != 1 or set(_summed(op)) & set(buffer.loops):
        return None
    inside = {loop.index for loop in _summed(op)}
    if op.dest.indices & inside or any(loop.kind == "if" for loop in _summed(op)):
        return None
    for user, _, ref in refs_of(kernel, buffer):
        if user is not op and (ref.dims is None or set(_summed(op)) & set(user.loops)):
            return None
    return product


def _summed(op: Op) -> list[Loop]:
    """The loops of a ``loop_reduce``, if they are exactly the innermost ones around it."""
    names = {part.strip() for part in op.attrs.get("loop_indices", "").strip("[]()").split(",") if part.strip()}
    inner: list[Loop] = []
    for loop in reversed(op.loops):
        if loop.index.split("@")[0] not in names:
            break
        inner.insert(0, loop)
    return inner if len(inner) == len(names) else []


def _replace_reduction(kernel: Kernel, op: Op, product: Op) -> None:
    nl = kernel.alias("nl")
    assert op.dest is not None and op.dest.shape is not None and isinstance(op.node, ast.Assign)
    outer = _summed(op)[0]
    name = kernel.fresh("sum")
    rows, columns = (extent.text() for extent in op.dest.shape)
    target = ast.unparse(op.node.targets[0])
    place = index_of(outer.block, outer.node)
    declared = f"{name} = {nl}.zeros(({nl}.par_dim({rows}), {columns}), dtype={nl}.float32, buffer={nl}.psum)"
    outer.block[place + 1 : place + 1] = statements(f"{target} = {nl}.copy({name})")
    outer.block[place:place] = statements(declared)
    place = index_of(op.block, op.node)
    op.block[place : place + 1] = statements(f"{name} += {ast.unparse(product.call)}")
    remove(product.block, product.node)


class JoinProducts(Rule):
    """Two products whose sum is formed outside PSUM are added up in one PSUM tile."""

    id = "join-products"
    title = "Accumulate both products in one PSUM tile and copy their sum out once"
    problem = "two products leave PSUM one by one and are added on the vector engine."
    evidence = "psum_read_bytes are twice the size of the sum and the vector engine is busy beside products."
    change = "declare one zeroed PSUM tile, add both products to it with +=, and copy it out where they were added."
    expectation = "one PSUM read for the sum instead of two; the addition and a temporary tile disappear."
    relieves = Resource.ELEMENTWISE
    typical_gain = 1.03
    keywords = ("side product", "same psum group", "join the products")

    def _find(self, kernel: Kernel) -> list[Site]:
        fresh = normalised(kernel)
        found = [op for op in fresh.ops if _summands(fresh, op) is not None]
        return [Site(self.id, anchor_of(op), number, (), (), op.position) for number, op in enumerate(found)]

    def apply(self, kernel: Kernel, site: Site) -> None:
        fresh = normalise(kernel)
        op = fresh.ops[site.position]
        summands = _summands(fresh, op)
        if summands is None or not isinstance(op.node, ast.Assign):
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        nl = fresh.alias("nl")
        name = fresh.fresh("joined")
        shape = summands[0][0].shape
        assert shape is not None
        rows, columns = (extent.text() for extent in shape)
        first = min(_creation(op.block, buffer) for buffer, _ in summands)
        for buffer, eviction in summands:
            for write in buffer.writes:
                place = index_of(write.block, write.node)
                write.block[place : place + 1] = statements(f"{name} += {ast.unparse(write.call)}")
            if eviction is not None:
                remove(eviction.block, eviction.node)
        dtype = f", dtype={op.attrs['dtype']}" if op.attrs.get("dtype") else ""
        op.node.value = expression(f"{nl}.copy({name}{dtype})")
        declared = f"{name} = {nl}.zeros(({nl}.par_dim({rows}), {columns}), dtype={nl}.float32, buffer={nl}.psum)"
        op.block[first:first] = statements(declared)
        tidy(fresh)
        kernel.tree = fresh.tree


_Summand = tuple[Buffer, Op | None]


def _summands(kernel: Kernel, op: Op) -> tuple[_Summand, _Summand] | None:
    """The two PSUM tiles with products that an operation adds, and the copies through which it reads them."""
    if op.kind != "tensor_tensor" or op.attrs.get("op") != "add" or op.mask or op.dest is None:
        return None
    if op.dest.buffer.space is not Space.SBUF or not isinstance(op.node, ast.Assign):
        return None
    first, second = (_summand(kernel, op.ref(name), op) for name in ("data1", "data2"))
    if first is None or second is None or first[0] is second[0] or first[0].shape != second[0].shape:
        return None
    return first, second


def _summand(kernel: Kernel, ref: Ref | None, user: Op) -> _Summand | None:
    """A PSUM tile that only ``user`` reads, at once or through a private copy, and that holds nothing but products."""
    eviction: Op | None = None
    if ref is not None and ref.buffer.space is Space.SBUF:
        eviction = kernel.private_source(ref, user)
        if eviction is None or eviction.kind != "copy" or eviction.mask or not _keeps_precision(eviction):
            return None
        ref = eviction.ref("src")
    if ref is None or ref.buffer.space is not Space.PSUM or not ref.is_whole:
        return None
    buffer, reader = ref.buffer, eviction or user
    if buffer.block_dims or buffer.returned or len(buffer.reads) != 1 or buffer.loops != user.loops:
        return None
    if not fits_bank(kernel, buffer.shape) or not buffer.writes:
        return None
    if not all(_is_plain_product(write) and write.position < reader.position for write in buffer.writes):
        return None
    if all(write.accumulate for write in buffer.writes):
        return (buffer, eviction) if buffer.fill == "0" and buffer.block is user.block else None
    single = buffer.writes[0]
    alone = len(buffer.writes) == 1 and single.block is user.block and buffer.block in (None, user.block)
    return (buffer, eviction) if alone else None


def _is_plain_product(write: Op) -> bool:
    """Whether an operation writes or adds an unmasked product to a whole tile, in every iteration of its loops."""
    if write.kind not in ("matmul", "high_matmul") or write.mask or write.dest is None or not write.dest.is_whole:
        return False
    special = write.flag("is_transpose") or any(write.attrs.get(name) for name in ("dtype", "tile_position"))
    return not special and isinstance(write.node, (ast.Assign, ast.AugAssign))


def _keeps_precision(op: Op) -> bool:
    dtype = op.attrs.get("dtype")
    return dtype is None or dtype.endswith("float32")


def _creation(block: list[ast.stmt], buffer: Buffer) -> int:
    """Where in a block a buffer comes into being."""
    created = buffer.declaration or buffer.writes[0].node
    return index_of(block, created)


RULES = (AccumulateInPsum(), JoinProducts())
