"""PSUM as a place for sums and operands (docs/rewriter.md, B7, C2, I3)."""

from __future__ import annotations

import ast

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.normalise import refs_of, replace_ref
from accelopt_ray.rewrite.poly import Poly
from accelopt_ray.rewrite.regions import Buffer, Op, Ref, Space
from accelopt_ray.rewrite.rule import Resource, Rule, Site, anchor_of, tidy
from accelopt_ray.rewrite.syntax import expression, index_of, statement, statements, walk

_PARTITIONS = 128
_BANK_COLUMNS = 512
#: Of eight banks, two are left for the compiler to overlap iterations.
_MOST_BANKS = 6


def fits_bank(kernel: Kernel, shape: tuple[Poly, ...] | None) -> bool:
    """Whether a two-dimensional fp32 tile, which like any has at most 128 rows, provably fits one PSUM bank."""
    return shape is not None and len(shape) == 2 and kernel.names.at_most(shape[1], _BANK_COLUMNS)


def identity_tile(kernel: Kernel, before: Op) -> str:
    """Name of an SBUF tile with the 128 x 128 identity, ready before an operation; loads one if there is none."""
    for op in kernel.ops:
        source = op.ref("src")
        if op.kind != "load" or op.loops or source is None or op.dest is None or op.position > before.position:
            continue
        if source.buffer.origin == "constant" and source.buffer.shape == (Poly.of(_PARTITIONS),) * 2:
            declaration = source.buffer.declaration
            whole = op.dest.buffer.shape == (Poly.of(_PARTITIONS),) * 2 and not op.dest.buffer.block_dims
            if declaration is not None and "identity" in ast.unparse(declaration) and whole:
                return op.dest.buffer.name
    nl, np = kernel.alias("nl"), kernel.alias("np")
    name = kernel.fresh("identity")
    body = kernel.tree.entry.body
    place = next(n for n, item in enumerate(body) if item is before.node or _holds(item, before.node))
    body.insert(
        place,
        statement(f"{name} = {nl}.load({nl}.shared_constant({np}.identity({_PARTITIONS}, dtype={np}.float32)))"),
    )
    return name


def _holds(root: ast.AST, node: ast.AST) -> bool:
    return any(child is node for child in walk(root))


class SumOnTensorEngine(Rule):
    """A running sum of tiles moves from the vector engine into a PSUM bank."""

    id = "sum-on-tensor-engine"
    title = "Let the tensor engine add up the tiles in PSUM"
    problem = "tiles are added to a running sum in SBUF, two vector engine cycles per element and iteration."
    evidence = "vector_engine_active_time_percent is near 1 while hfu_estimated_percent is near 0."
    change = "accumulate in a PSUM tile with nc_matmul(identity, tile), and copy the sum to SBUF once at the end."
    expectation = "the additions leave the vector engine; the tensor engine, idle so far, does them."
    relieves = Resource.VECTOR
    typical_gain = 1.25
    keywords = ("add up the tiles", "sum in psum", "accumulate in psum", "identity matmul")

    def _find(self, kernel: Kernel) -> list[Site]:
        return [
            Site(self.id, anchor_of(op), number, (), (), op.position)
            for number, op in enumerate(op for op in kernel.ops if self._legal(kernel, op))
        ]

    @staticmethod
    def _legal(kernel: Kernel, op: Op) -> bool:
        tile = op.ref("data2")
        if op.kind != "update" or op.attrs.get("op") != "add" or tile is None or not is_running_sum(kernel, op):
            return False
        assert op.dest is not None and op.dest.buffer.shape is not None
        buffer = op.dest.buffer
        if tile.buffer.space is not Space.SBUF or tile.shape != buffer.shape or op.dest.buffer.shape[0].value != 128:
            return False
        return all(loop.parallel for loop in op.loops if loop not in buffer.loops)

    def apply(self, kernel: Kernel, site: Site) -> None:
        op = kernel.ops[site.position]
        if not self._legal(kernel, op):
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        nisa = kernel.alias("nisa")
        assert isinstance(op.node, ast.AugAssign)
        op.node.value = expression(
            f"{nisa}.nc_matmul({identity_tile(kernel, op)}, {op.args['data2'].text}, is_stationary_onezero=True)"
        )
        keep_in_psum(kernel, op)
        tidy(kernel)


def is_running_sum(kernel: Kernel, op: Op) -> bool:
    """Whether an operation adds to a zeroed SBUF tile of at most one bank that is read only after its loops."""
    if op.mask or op.dest is None:
        return False
    buffer = op.dest.buffer
    if buffer.space is not Space.SBUF or buffer.block_dims or buffer.fill != "0" or buffer.returned:
        return False
    if not fits_bank(kernel, buffer.shape) or op.dest.shape != buffer.shape or len(buffer.writes) != 1:
        return False
    inside = [loop for loop in op.loops if loop not in buffer.loops]
    if not inside or not isinstance(buffer.declaration, ast.Assign):
        return False
    if op.dest.dims is None or any(dim.start.symbols for dim in op.dest.dims):
        return False
    readers = 0
    for user, _, ref in refs_of(kernel, buffer):
        if user is op:
            continue
        if any(loop in user.loops for loop in inside) or ref.dims is None or user.position < op.position:
            return False
        readers += 1
    return readers > 0


def keep_in_psum(kernel: Kernel, op: Op) -> None:
    """Moves the tile of a running sum into PSUM; its readers read a copy made after the loops."""
    nl = kernel.alias("nl")
    assert op.dest is not None
    buffer = op.dest.buffer
    readers = [(user, name, ref) for user, name, ref in refs_of(kernel, buffer) if user is not op]
    finished = kernel.fresh(f"{buffer.name}_sum")
    for user, name, ref in readers:
        replace_ref(user, name, ast.unparse(ref.node).replace(buffer.name, finished, 1))
    assert isinstance(buffer.declaration, ast.Assign) and isinstance(buffer.declaration.value, ast.Call)
    call = buffer.declaration.value
    call.keywords = [keyword for keyword in call.keywords if keyword.arg != "buffer"]
    call.keywords.append(ast.keyword("buffer", expression(f"{nl}.psum")))
    first = min((user for user, _, _ in readers), key=lambda user: user.position)
    block, node = _common_block(buffer, first)
    place = index_of(block, node)
    block.insert(place, statement(f"{finished} = {nl}.copy({buffer.name})"))


def _common_block(buffer: Buffer, reader: Op) -> tuple[list[ast.stmt], ast.stmt]:
    """The statement of the buffer's own block that holds a reader."""
    assert buffer.block is not None
    return buffer.block, next(item for item in buffer.block if _holds(item, reader.node))


class OperandInPsum(Rule):
    """A tile between two vector instructions goes through PSUM."""

    id = "operand-in-psum"
    title = "Put the tile between two vector engine instructions into PSUM"
    problem = "a tensor_tensor reads both fp32 operands from SBUF, which costs two cycles per element."
    evidence = "vector_engine_active_time_percent is near 1."
    change = "give the operand's producer a PSUM destination of at most 512 columns; the other operand stays in SBUF."
    expectation = "the reading instruction takes one cycle per element instead of two."
    relieves = Resource.VECTOR
    typical_gain = 1.12
    keywords = ("operand in psum", "one operand in psum", "into psum")

    _PRODUCERS = frozenset({"tensor_tensor", "scalar_tensor_tensor", "tensor_scalar", "activation"})

    def _find(self, kernel: Kernel) -> list[Site]:
        found = [op for op in kernel.ops if self._legal(kernel, op)]
        return [Site(self.id, anchor_of(op), number, (), (), op.position) for number, op in enumerate(found)]

    def _legal(self, kernel: Kernel, op: Op) -> bool:
        if op.kind not in self._PRODUCERS or op.mask or op.dest is None or op.dest.buffer.origin != "value":
            return False
        if op.attrs.get("reduce_op") or not isinstance(op.node, ast.Assign):
            return False
        buffer = op.dest.buffer
        if len(buffer.reads) != 1 or len(buffer.writes) != 1 or buffer.returned or not fits_bank(kernel, buffer.shape):
            return False
        reader, name = buffer.reads[0]
        other = {"data1": "data2", "data2": "data1"}.get(name)
        if reader.kind not in ("tensor_tensor", "update") or other is None or reader.path != op.path or reader.mask:
            return False
        partner = reader.ref(other)
        if partner is None or partner.buffer.space is not Space.SBUF or self._in_psum(kernel, partner, reader):
            return False
        narrow = buffer.shape is not None and buffer.shape[1].value is not None and buffer.shape[1].value < 64
        return not narrow and not any(ref.buffer.space is Space.PSUM for ref in op.reads())

    @staticmethod
    def _in_psum(kernel: Kernel, ref: Ref, reader: Op) -> bool:
        """Whether the compiler is likely to leave a broadcast operand in PSUM already."""
        return any(write.kind == "broadcast" for write in ref.buffer.writes)

    def apply(self, kernel: Kernel, site: Site) -> None:
        op = kernel.ops[site.position]
        if not self._legal(kernel, op):
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        nl = kernel.alias("nl")
        assert op.dest is not None and op.dest.buffer.shape is not None and isinstance(op.node, ast.Assign)
        buffer = op.dest.buffer
        assert buffer.shape is not None
        rows, columns = buffer.shape[0].text(), buffer.shape[1].text()
        text = f"{buffer.name} = {nl}.ndarray(({nl}.par_dim({rows}), {columns}), dtype={nl}.float32, buffer={nl}.psum)"
        place = index_of(op.block, op.node)
        op.block[place:place] = statements(text)
        target = ast.parse(f"{buffer.name}[0:{rows}, 0:{columns}] = 0").body[0]
        assert isinstance(target, ast.Assign)
        op.node.targets[0] = target.targets[0]


class BroadcastInPsum(Rule):
    """A row that is broadcast to all partitions for a vector instruction is left in PSUM, where the tensor engine puts
    it, instead of being copied to SBUF first."""

    id = "broadcast-in-psum"
    title = "Broadcast the row into PSUM and read it there"
    problem = (
        "a row is broadcast to all partitions in SBUF; the tensor_tensor that uses it then reads both fp32 operands "
        "from SBUF, two cycles per element, and the broadcast costs a copy out of PSUM."
    )
    evidence = "vector_engine_active_time_percent is near 1, and hardware_flops are not zero without a matrix product."
    change = "multiply a stationary row of ones with the row on the tensor engine and use the PSUM tile as operand."
    expectation = "the vector instruction takes one cycle per element instead of two; the copies disappear."
    relieves = Resource.VECTOR
    typical_gain = 1.3
    everywhere = True
    keywords = ("broadcast into psum", "row of ones", "broadcasts stay in psum")

    def _find(self, kernel: Kernel) -> list[Site]:
        found = [op for op in kernel.ops if self._row(kernel, op) is not None]
        return [Site(self.id, anchor_of(op), number, (), (), op.position) for number, op in enumerate(found)]

    @staticmethod
    def _row(kernel: Kernel, op: Op) -> Ref | None:
        """The row that a broadcast reads, if its one reader gains by finding the result in PSUM."""
        row = op.ref("src")
        if op.kind != "broadcast" or op.mask or row is None or op.dest is None or not isinstance(op.node, ast.Assign):
            return None
        buffer = op.dest.buffer
        if buffer.origin != "value" or len(buffer.reads) != 1 or len(buffer.writes) != 1 or buffer.returned:
            return None
        if row.buffer.space is not Space.SBUF or row.shape is None or buffer.shape is None:
            return None
        if row.shape != (Poly.of(1), buffer.shape[-1]) or not fits_bank(kernel, buffer.shape):
            return None
        reader, name = buffer.reads[0]
        other = {"data1": "data2", "data2": "data1"}.get(name)
        partner = reader.ref(other) if other is not None else None
        if reader.kind != "tensor_tensor" or reader.path != op.path or partner is None:
            return None
        if partner.buffer.space is not Space.SBUF or any(write.kind == "broadcast" for write in partner.buffer.writes):
            return None
        return row if banks_beside(kernel, op) < _MOST_BANKS else None

    def apply(self, kernel: Kernel, site: Site) -> None:
        op = kernel.ops[site.position]
        row = self._row(kernel, op)
        if row is None or op.dest is None or op.dest.buffer.shape is None or not isinstance(op.node, ast.Assign):
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        nisa = kernel.alias("nisa")
        rows = op.dest.buffer.shape[0].text()
        op.node.value = expression(
            f"{nisa}.nc_matmul({_ones_row(kernel, op, rows)}, {row.text}, is_stationary_onezero=True)"
        )


def banks_beside(kernel: Kernel, op: Op) -> int:
    """PSUM tiles of one bank each that are used in the same outermost loop as an operation."""
    outermost = op.loops[0] if op.loops else None
    return sum(
        1
        for buffer in kernel.buffers
        if buffer.space is Space.PSUM
        and any((user.loops[0] if user.loops else None) is outermost for user in buffer.writes)
    )


def _ones_row(kernel: Kernel, before: Op, width: str) -> str:
    """Name of an SBUF row of ones of a width, ready before an operation; makes one if there is none."""
    for buffer in kernel.buffers:
        constant = buffer.fill == "1" and buffer.space is Space.SBUF and not buffer.loops and not buffer.writes
        if constant and [extent.text() for extent in buffer.shape or ()] == ["1", width]:
            return buffer.name
    nl = kernel.alias("nl")
    name = kernel.fresh("ones")
    body = kernel.tree.entry.body
    place = next(n for n, item in enumerate(body) if item is before.node or _holds(item, before.node))
    body.insert(
        place, statement(f"{name} = {nl}.ones(({nl}.par_dim(1), {width}), dtype={nl}.float32, buffer={nl}.sbuf)")
    )
    return name


RULES = (SumOnTensorEngine(), OperandInPsum(), BroadcastInPsum())
