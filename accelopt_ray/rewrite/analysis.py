"""One pass over a kernel that yields its loops, buffers and operations.

The pass canonicalises on the way: an operation nested inside another one's operands becomes a statement of its own, and
``nl`` helpers and operators are read as the instructions they stand for. Python is never executed.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from accelopt_ray.rewrite.calls import canonical_module
from accelopt_ray.rewrite.poly import ONE, ZERO, Poly
from accelopt_ray.rewrite.reader import OPERATORS, CallReader, Reading, operand_slots, result_shape
from accelopt_ray.rewrite.regions import Argument, Buffer, Loop, Op, Opaque, Ref, Space
from accelopt_ray.rewrite.syntax import KernelSyntaxError, SourceTree, index_of, names_read, substitute, walk
from accelopt_ray.rewrite.values import Names, whole

_LOOPS = {
    "nl.affine_range": "affine_range",
    "nl.sequential_range": "sequential_range",
    "nl.static_range": "static_range",
}


class Kernel:
    """An analysed kernel.

    Attributes:
        tree: The syntax tree; rules edit it and then analyse it again.
        ops: All operations in program order.
        buffers: All buffers in order of creation.
        loops: All loops in program order.
        names: Final static environment (module aliases above all).
    """

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self.names = Names()
        self._reader = CallReader(self.names)
        self.ops: list[Op] = []
        self.buffers: list[Buffer] = []
        self.loops: list[Loop] = []
        self.understood = True
        self.statics: list[tuple[list[ast.stmt], ast.Assign]] = []
        self._flattened: list[tuple[ast.Assign, str]] = []
        self._taken = {node.id for node in walk(tree.module) if isinstance(node, ast.Name)}
        self._taken |= {argument.arg for argument in tree.entry.args.args}
        self._positions = itertools.count()
        self._read_imports(tree.module.body)
        self._bind_arguments(tree.entry)
        self._walk(tree.entry.body, ())

    @classmethod
    def parse(cls, source: str) -> Kernel:
        """Parses and analyses kernel source.

        Raises:
            KernelSyntaxError: The text does not parse, has no entry or is nested beyond reason.
        """
        try:
            return cls(SourceTree(source))
        except RecursionError as error:
            raise KernelSyntaxError("the kernel is nested too deeply to analyse") from error

    def source(self) -> str:
        """Prints the kernel; operations that were only taken out of their operands for the analysis go back."""
        for assignment, name in reversed(self._flattened):
            self._nest_again(assignment, name)
        return self.tree.source()

    def _nest_again(self, assignment: ast.Assign, name: str) -> None:
        mentions = [n for n in walk(self.tree.entry) if isinstance(n, ast.Name) and n.id == name]
        if len(mentions) != 2:
            return
        for block in _blocks(self.tree.entry):
            place = next((number for number, item in enumerate(block) if item is assignment), None)
            if place is None:
                continue
            following = block[place + 1] if place + 1 < len(block) else None
            if following is None or isinstance(following, (ast.For, ast.If)):
                return
            if any(n in mentions for n in walk(following)):
                substitute(following, {name: assignment.value})
                del block[place]
            return

    def fresh(self, stem: str) -> str:
        """Returns a name that the kernel does not use, and reserves it."""
        if stem not in self._taken:
            self._taken.add(stem)
            return stem
        for number in itertools.count(1):
            name = f"{stem}_{number}"
            if name not in self._taken:
                self._taken.add(name)
                return name
        raise AssertionError("unreachable")

    def alias(self, module: str) -> str:
        """The name under which ``nl`` or ``nisa`` is imported; adds the import when there is none."""
        for name, canonical in self.names.modules.items():
            if canonical == module and name.isidentifier():
                return name
        path = {"nl": "neuronxcc.nki.language", "nisa": "neuronxcc.nki.isa", "np": "numpy"}[module]
        body = self.tree.module.body
        last = max((n for n, s in enumerate(body) if isinstance(s, (ast.Import, ast.ImportFrom))), default=-1)
        body.insert(last + 1, ast.parse(f"import {path} as {module}").body[0])
        self.names.modules[module] = module
        return module

    # --- walking -------------------------------------------------------------------------------------------------

    def _read_imports(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.Import):
                for item in statement.names:
                    self.names.modules[item.asname or item.name] = canonical_module(item.name)
            elif isinstance(statement, ast.ImportFrom) and statement.module:
                for item in statement.names:
                    full = canonical_module(f"{statement.module}.{item.name}")
                    self.names.modules[item.asname or item.name] = full
            elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                self._read_constant(statement.targets[0], statement.value)

    def _read_constant(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, item in zip(target.elts, value.elts, strict=False):
                self._read_constant(one, item)
        elif isinstance(target, ast.Name):
            static = self.names.evaluate(value)
            if isinstance(static, (Poly, float)):
                self.names.values[target.id] = static

    def _bind_arguments(self, entry: ast.FunctionDef) -> None:
        tensors: set[str] = set()
        for node in walk(entry):
            base = None
            if isinstance(node, (ast.Subscript, ast.Attribute)):
                base = node.value
            if isinstance(base, ast.Name):
                tensors.add(base.id)
            if isinstance(node, ast.Call):
                tensors |= {a.id for a in node.args[:1] if isinstance(a, ast.Name) and _is_load(node)}
        for argument in entry.args.args:
            if argument.arg in tensors:
                buffer = Buffer(argument.arg, Space.HBM, None, origin="argument")
                self.buffers.append(buffer)
                self.names.values[argument.arg] = Ref(buffer, None, ast.Name(argument.arg, ast.Load()))

    def _walk(self, body: list[ast.stmt], loops: tuple[Loop, ...]) -> None:
        position = 0
        while position < len(body):
            before = len(body)
            statement = body[position]
            self._statement(statement, body, loops)
            position += 1 + len(body) - before

    def _statement(self, statement: ast.stmt, block: list[ast.stmt], loops: tuple[Loop, ...]) -> None:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self._read_imports([statement])
        elif isinstance(statement, ast.Assert):
            self._assertion(statement.test)
        elif isinstance(statement, ast.For):
            self._loop(statement, block, loops)
        elif isinstance(statement, ast.If):
            guard = Loop(statement, "", "if", ZERO, ONE, None, block)  # type: ignore[arg-type]
            for branch in (statement.body, statement.orelse):
                self._walk(branch, (*loops, guard))
        elif isinstance(statement, ast.Return):
            for name in names_read(statement):
                value = self.names.values.get(name)
                if isinstance(value, Ref):
                    value.buffer.returned = True
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assign(statement, statement.targets[0], block, loops)
        elif isinstance(statement, ast.AugAssign):
            self._augmented(statement, block, loops)
        elif isinstance(statement, ast.Expr):
            if not isinstance(statement.value, ast.Constant):
                self._operation(statement, statement.value, None, block, loops)
        elif not isinstance(statement, ast.Pass):
            self.understood = False

    def _assertion(self, test: ast.expr) -> None:
        """Learns argument shapes from ``assert x.shape == (M, K)``."""
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
            return
        sides = [test.left, test.comparators[0]]
        for operand, other in (sides, sides[::-1]):
            side = operand
            while isinstance(side, ast.Call) and ast.unparse(side.func) in ("tuple", "list") and side.args:
                side = side.args[0]
            if isinstance(side, ast.Attribute) and side.attr == "shape" and isinstance(side.value, ast.Name):
                base = self.names.values.get(side.value.id)
                shape = self.names.evaluate(other)
                known = isinstance(shape, tuple) and all(isinstance(item, Poly) for item in shape)
                if isinstance(base, Ref) and base.buffer.shape is None and known:
                    base.buffer.shape = shape  # type: ignore[assignment]
                    self.names.values[side.value.id] = whole(base.buffer, base.node)

    def _loop(self, statement: ast.For, block: list[ast.stmt], loops: tuple[Loop, ...]) -> None:
        index = statement.target.id if isinstance(statement.target, ast.Name) else ""
        kind, bounds = self._range(statement.iter)
        start, stop, step = bounds
        trips: Poly | None = None
        if start is not None and stop is not None and step is not None:
            span = stop - start
            if step == ONE:
                trips = span
            elif span.value is not None and step.value:
                trips = Poly.of(-(-span.value // step.value))
        loop = Loop(statement, self._loop_symbol(index), kind, start or ZERO, step or ONE, trips, block)
        if not index or not kind:
            self.understood = False
        self.loops.append(loop)
        if index:
            self.names.values[index] = Poly.symbol(loop.index)
        self._walk(statement.body, (*loops, loop))
        if statement.orelse:
            self.understood = False

    def _loop_symbol(self, index: str) -> str:
        count = sum(1 for loop in self.loops if loop.index.split("@")[0] == index)
        symbol = index if count == 0 else f"{index}@{count + 1}"
        self.names.loop_symbols.add(symbol)
        return symbol

    def _range(self, node: ast.expr) -> tuple[str, tuple[Poly | None, Poly | None, Poly | None]]:
        if not isinstance(node, ast.Call) or node.keywords:
            return "", (None, None, None)
        name = self.names.dotted(node.func)
        kind = _LOOPS.get(name, "range" if name == "range" else "")
        values = [self.names.poly(argument) for argument in node.args]
        if len(values) == 1:
            return kind, (ZERO, values[0], ONE)
        if len(values) == 2:
            return kind, (values[0], values[1], ONE)
        if len(values) == 3:
            return kind, (values[0], values[1], values[2])
        return kind, (None, None, None)

    # --- statements ----------------------------------------------------------------------------------------------

    def _assign(self, statement: ast.Assign, target: ast.expr, block: list[ast.stmt], loops: tuple[Loop, ...]) -> None:
        value = statement.value
        if isinstance(target, ast.Name):
            allocated = self._reader.allocation(target.id, value, statement, block, loops)
            if allocated is not None:
                self._bind(target.id, allocated)
                return
        if self._reader.is_operation(value):
            self._operation(statement, value, target, block, loops)
            return
        if isinstance(target, ast.Subscript):
            source = self.names.evaluate(value)
            if isinstance(source, Ref):
                self._emit(statement, block, loops, Reading("copy", {"src": source}, {}, "", ""), target, value)
            else:
                self._unknown(statement, block, loops)
            return
        if isinstance(target, ast.Tuple):
            self._unpack(target, value)
            return
        if isinstance(target, ast.Name):
            static = self.names.evaluate(value)
            self.names.conditions.pop(target.id, None)
            if static is None:
                selection = self.names.selection(value)
                self.names.values.pop(target.id, None)
                if isinstance(value, (ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp)):
                    self.names.conditions[target.id] = selection
                if self._reader.touches_buffer(value):
                    self._unknown(statement, block, loops)
                elif not self._mentions_index(value):
                    self.names.values[target.id] = Poly.symbol(target.id)
                    self.names.learn_limit(target.id, value)
            else:
                self.names.values[target.id] = static
                if loops:
                    self.statics.append((block, statement))

    def _mentions_index(self, node: ast.AST) -> bool:
        for name in names_read(node):
            value = self.names.values.get(name)
            if (
                not isinstance(value, (Poly, float))
                or (isinstance(value, Poly) and value.depends_on(self.names.loop_symbols))
            ) and name in self.names.values:
                return True
        return False

    def _unpack(self, target: ast.Tuple, value: ast.expr) -> None:
        static = self.names.evaluate(value)
        names = [element.id if isinstance(element, ast.Name) else "" for element in target.elts]
        if isinstance(static, tuple) and len(static) == len(names):
            for name, item in zip(names, static, strict=False):
                if name:
                    self.names.values[name] = item
            return
        is_shape = isinstance(value, ast.Attribute) and value.attr == "shape"
        base = self.names.evaluate(value.value) if is_shape else None  # type: ignore[attr-defined]
        symbols = tuple(Poly.symbol(name) for name in names)
        if isinstance(value, ast.Tuple):
            for name, element in zip(names, value.elts, strict=False):
                item = self.names.evaluate(element)
                if name:
                    self.names.values[name] = item if item is not None else Poly.symbol(name)
            return
        for name, symbol in zip(names, symbols, strict=False):
            if name:
                self.names.values[name] = symbol
        if isinstance(base, Ref) and base.buffer.shape is None and len(set(names)) == len(names):
            base.buffer.shape = symbols
            self.names.values[base.buffer.name] = whole(base.buffer, base.node)

    def _augmented(self, statement: ast.AugAssign, block: list[ast.stmt], loops: tuple[Loop, ...]) -> None:
        destination = self.names.evaluate(statement.target)
        if not isinstance(destination, Ref):
            if isinstance(statement.target, ast.Name):
                self.names.values.pop(statement.target.id, None)
            return
        operator = OPERATORS.get(type(statement.op))
        if operator == "add" and self._reader.is_operation(statement.value):
            self._operation(statement, statement.value, statement.target, block, loops, accumulate=True)
            return
        source = self.names.evaluate(statement.value)
        if operator is None or not isinstance(source, Ref):
            self._unknown(statement, block, loops)
            return
        arguments: dict[str, Argument] = {"data1": destination, "data2": source}
        read = Reading("update", arguments, {"op": operator}, "", "")
        self._emit(statement, block, loops, read, statement.target, statement.value)

    def _bind(self, name: str, buffer: Buffer) -> None:
        self.buffers.append(buffer)
        self.names.values[name] = whole(buffer, ast.Name(name, ast.Load()))

    # --- operations ----------------------------------------------------------------------------------------------

    def _operation(
        self,
        statement: ast.stmt,
        value: ast.expr,
        target: ast.expr | None,
        block: list[ast.stmt],
        loops: tuple[Loop, ...],
        accumulate: bool = False,
    ) -> None:
        self._flatten(statement, value, block, loops)
        read = self._reader.read(value)
        if read is None:
            self._unknown(statement, block, loops)
            return
        if read.kind == "store":
            destination = read.args.pop("dst", None)
            target = destination.node if isinstance(destination, Ref) else None
        self._emit(statement, block, loops, read, target, value, accumulate)

    def _flatten(self, statement: ast.stmt, value: ast.expr, block: list[ast.stmt], loops: tuple[Loop, ...]) -> None:
        """Moves operations nested in the operands of ``value`` into statements of their own."""
        for holder, field, number in operand_slots(value):
            slot = getattr(holder, field)
            operand = slot[number] if number is not None else slot
            is_constant = isinstance(operand, ast.Call) and self.names.dotted(operand.func) == "nl.shared_constant"
            if not self._reader.is_operation(operand) and not is_constant:
                continue
            name = self.fresh("constant" if is_constant else "tile")
            assignment = ast.Assign([ast.Name(name, ast.Store())], operand)
            ast.fix_missing_locations(ast.copy_location(assignment, statement))
            block.insert(index_of(block, statement), assignment)
            self._flattened.append((assignment, name))
            self._assign(assignment, assignment.targets[0], block, loops)
            replacement = ast.Name(name, ast.Load())
            if number is None:
                setattr(holder, field, replacement)
            else:
                slot[number] = replacement

    def _emit(
        self,
        statement: ast.stmt,
        block: list[ast.stmt],
        loops: tuple[Loop, ...],
        read: Reading,
        target: ast.expr | None,
        call: ast.expr,
        accumulate: bool = False,
    ) -> None:
        position = next(self._positions)
        kind, arguments = read.kind, read.args
        op = Op(
            statement, block, loops, kind, None, arguments, read.attrs, read.mask, accumulate, position, call,
            read.function,
        )  # fmt: skip
        if op.mask:
            selection = self.names.selection(ast.parse(op.mask, mode="eval").body)
            op.mask_symbols, op.mask_axes = selection.symbols, selection.axes
        for name, argument in arguments.items():
            if isinstance(argument, Ref):
                argument.buffer.reads.append((op, name))
                if name == "reduce_res":
                    argument.buffer.writes.append(op)
            elif isinstance(argument, Opaque):
                self._hidden_reads(op, argument.node)
        if isinstance(target, ast.Name) and not accumulate and kind != "update":
            buffer = Buffer(target.id, Space.SBUF, result_shape(self.names, op), loops=loops, origin="value")
            if kind in ("matmul", "high_matmul", "transpose"):
                buffer.space = Space.PSUM
            self._bind(target.id, buffer)
            op.dest = whole(buffer, ast.Name(target.id, ast.Load()))
            buffer.writes.append(op)
        elif target is not None:
            destination = self.names.evaluate(target)
            if isinstance(destination, Ref):
                op.dest = Ref(destination.buffer, destination.dims, target)
                destination.buffer.writes.append(op)
        self.ops.append(op)

    def _hidden_reads(self, op: Op, node: ast.AST) -> None:
        for name in names_read(node):
            value = self.names.values.get(name)
            if isinstance(value, Ref):
                op.args[f"hidden {name}"] = Ref(value.buffer, None, ast.Name(name, ast.Load()))
                value.buffer.reads.append((op, f"hidden {name}"))

    def _unknown(self, statement: ast.stmt, block: list[ast.stmt], loops: tuple[Loop, ...]) -> None:
        """Records a statement the analysis cannot read as touching every buffer it names."""
        op = Op(statement, block, loops, "unknown", None, {}, {}, "", False, next(self._positions), ast.Constant(None))
        self._hidden_reads(op, statement)
        for ref in op.reads():
            ref.buffer.writes.append(op)
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        for target in targets:
            if isinstance(target, ast.Name):
                buffer = Buffer(target.id, Space.SBUF, None, loops=loops, origin="value")
                self._bind(target.id, buffer)
                op.dest = whole(buffer, ast.Name(target.id, ast.Load()))
                buffer.writes.append(op)
        self.ops.append(op)

    # --- queries -------------------------------------------------------------------------------------------------

    def definition(self, ref: Ref, before: Op) -> Op | None:
        """The one operation that writes exactly ``ref`` and whose value reaches ``before``, or None.

        The buffer has a single write; the write stands earlier, in the same loop body or in an enclosing one.
        """
        if ref.dims is None or len(ref.buffer.writes) != 1 or ref.buffer.returned:
            return None
        writer = ref.buffer.writes[0]
        if writer.dest is None or writer.accumulate or not writer.dest.same_region(ref) or writer.kind == "store":
            return None
        if writer.position >= before.position or before.path[: len(writer.path)] != writer.path:
            return None
        return writer

    def single_use(self, op: Op) -> bool:
        """Whether the value of ``op`` is read once in all and not returned."""
        if op.dest is None:
            return False
        buffer = op.dest.buffer
        return len(buffer.reads) == 1 and len(buffer.writes) == 1 and not buffer.returned

    def private_source(self, ref: Ref | None, user: Op) -> Op | None:
        """The definition of an operand when ``user`` is its only reader, sits in the same body and nothing between
        the two overwrites what the definition reads; such a definition can be folded into ``user``.
        """
        if ref is None:
            return None
        writer = self.definition(ref, user)
        if writer is None or not self.single_use(writer) or writer.path != user.path or writer.block is not user.block:
            return None
        return writer if self.stable_between(writer, user) else None

    def stable_between(self, first: Op, last: Op) -> bool:
        """Whether nothing between two operations writes to a buffer (by name) that ``first`` reads."""
        names = {ref.buffer.name for ref in first.reads()}
        for op in self.ops:
            between = first.position < op.position < last.position
            if between and op.dest is not None and op.dest.buffer.name in names:
                return False
        return True


def _blocks(root: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Every statement list below a statement."""
    for node in walk(root):
        for field in ("body", "orelse"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block


def _is_load(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "store", "load_transpose2d", "dma_copy")
