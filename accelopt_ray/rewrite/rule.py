"""What a rewrite rule is: it finds sites, says what it would do there, and does it."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from accelopt_ray.outcome import StrEnum
from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.regions import Op, Ref
from accelopt_ray.rewrite.syntax import expression, index_of, names_read, statements, walk


class Resource(StrEnum):
    """What a rule relieves; ties a rule to the profile counters that reveal its need."""

    VECTOR = "vector engine"
    SCALAR = "scalar engine"
    ELEMENTWISE = "vector and scalar engines"
    TRAFFIC = "HBM traffic"
    SPILL = "spills"
    TENSOR = "tensor engine"
    OVERHEAD = "fixed overhead"
    NONE = "nothing by itself"


@dataclass(frozen=True)
class Site:
    """One place where a rule applies.

    Attributes:
        rule: Id of the rule.
        anchor: Name of the value or loop at the place, as the source writes it.
        occurrence: Which of the sites with this rule, anchor and parameters it is, in program order.
        parameters: Chosen parameters, such as a tile width.
        details: Facts for the description.
        position: Internal: program position of the operation or number of the loop.
    """

    rule: str
    anchor: str
    occurrence: int = 0
    parameters: tuple[tuple[str, int], ...] = ()
    details: tuple[str, ...] = field(default=(), compare=False)
    position: int = field(default=0, compare=False)


class Rule(ABC):
    """A general source-to-source transformation with its own legality proof."""

    id: str
    title: str
    #: The waste, in words: what a reader of the source sees.
    problem: str
    #: The profile reading that reveals it.
    evidence: str
    #: What to write instead.
    change: str
    #: What the counters should do afterwards.
    expectation: str
    relieves: Resource
    #: Typical speed-up when the relieved resource is the bottleneck.
    typical_gain: float = 1.05
    #: Whether it is a variant for its own sake and no part of "everything at once".
    exclusive: bool = False
    #: Whether "everything at once" rewrites all its sites instead of the first: one alone leaves half the waste.
    everywhere: bool = False
    #: Whether all sites of one analysis may be rewritten one after the other without analysing again.
    independent_sites: bool = False
    #: Words by which a plan or an experience item may mention the rule.
    keywords: tuple[str, ...] = ()

    def find(self, kernel: Kernel) -> list[Site]:
        """All sites at which the rewrite is provably legal, in program order; none if the kernel is not understood."""
        return self._find(kernel) if kernel.understood else []

    @abstractmethod
    def _find(self, kernel: Kernel) -> list[Site]:
        """As :meth:`find`, of a kernel that is understood."""

    @abstractmethod
    def apply(self, kernel: Kernel, site: Site) -> None:
        """Carries the rewrite out on ``kernel.tree``, in place."""

    def describe(self, site: Site) -> str:
        """The plan text for one site."""
        detail = " ".join(site.details)
        place = f"Place: {site.anchor}." + (f" {detail}" if detail else "")
        return (
            f"{self.title}. Problem: {self.problem} Evidence: {self.evidence} {place} Change: {self.change} "
            f"Expected: {self.expectation}"
        )


@dataclass
class Edit:
    """A change to one operation's statement.

    Attributes:
        value: Source of the new right-hand side, or ``""`` when the statement disappears.
        drop: Operations whose statements disappear.
        before: Statements to put in front.
        after: Statements to put behind.
        details: Facts for the description.
        at: The operation whose statement changes, if it is not the one that was matched.
    """

    value: str
    drop: Sequence[Op] = ()
    before: Sequence[str] = ()
    after: Sequence[str] = ()
    details: tuple[str, ...] = ()
    at: Op | None = None


class Peephole(Rule):
    """A rule that rewrites one operation together with private operations that feed it."""

    @abstractmethod
    def match(self, kernel: Kernel, op: Op) -> Edit | None:
        """The edit at ``op``, or None when the rule does not apply there."""

    def _find(self, kernel: Kernel) -> list[Site]:
        sites: list[Site] = []
        for op in kernel.ops:
            if op.kind == "unknown":
                continue
            edit = self.match(kernel, op)
            if edit is not None:
                sites.append(numbered(sites, self.id, anchor_of(op), (), edit.details, op.position))
        return sites

    def apply(self, kernel: Kernel, site: Site) -> None:
        op = kernel.ops[site.position]
        edit = self.match(kernel, op)
        if edit is None:
            raise LookupError(f"{self.id} no longer applies at {site.anchor}")
        perform(kernel, edit.at or op, edit)


def numbered(
    earlier: Sequence[Site],
    rule: str,
    anchor: str,
    parameters: tuple[tuple[str, int], ...],
    details: tuple[str, ...],
    position: int,
) -> Site:
    """A site with its occurrence counted among earlier ones."""
    count = sum(1 for site in earlier if site.anchor == anchor and site.parameters == parameters)
    return Site(rule, anchor, count, parameters, details, position)


def anchor_of(op: Op) -> str:
    """How a plan names an operation: the value it defines."""
    if op.dest is None:
        return f"line {op.line}"
    return f"`{op.dest.buffer.name}`"


def perform(kernel: Kernel, op: Op, edit: Edit) -> None:
    """Applies an edit to the tree and removes declarations that nothing uses any more."""
    statement = op.node
    index = index_of(op.block, statement)
    if edit.value and isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr)):
        statement.value = expression(edit.value)
    op.block[index + 1 : index + 1] = [s for text in edit.after for s in statements(text)]
    op.block[index:index] = [s for text in edit.before for s in statements(text)]
    for victim in edit.drop:
        remove(victim.block, victim.node)
    if not edit.value:
        remove(op.block, statement)
    tidy(kernel)


def remove(block: list[ast.stmt], node: ast.stmt) -> None:
    """Removes a statement; an emptied block keeps a ``pass``."""
    for number, item in enumerate(block):
        if item is node:
            del block[number]
            break
    if not block:
        block.append(ast.Pass())


def tidy(kernel: Kernel) -> None:
    """Removes empty loops, and allocations and index names that nothing mentions any more."""
    entry = kernel.tree.entry
    changed = True
    while changed:
        changed = _drop_empty_loops(entry.body)
        used = {n.id for n in walk(entry) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        changed = _drop_unused(kernel, entry.body, used) or changed


def _drop_empty_loops(body: list[ast.stmt]) -> bool:
    changed = False
    for statement in list(body):
        if isinstance(statement, ast.For):
            changed = _drop_empty_loops(statement.body) or changed
            idle = all(
                isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
                for s in statement.body
            )
            if idle:
                body.remove(statement)
                changed = True
    return changed


def _drop_unused(kernel: Kernel, body: list[ast.stmt], used: set[str]) -> bool:
    changed = False
    for statement in list(body):
        if isinstance(statement, ast.For):
            changed = _drop_unused(kernel, statement.body, used) or changed
            continue
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            continue
        target = statement.targets[0]
        if isinstance(target, ast.Name) and target.id not in used and _is_pure(kernel, statement.value):
            body.remove(statement)
            changed = True
    return changed


_PURE_CALLS = (
    "nl.arange", "nl.ndarray", "nl.zeros", "nl.full", "nl.par_dim", "nl.ds", "nl.shared_constant", "np.", "par_dim",
)  # fmt: skip


def _is_pure(kernel: Kernel, value: ast.expr) -> bool:
    """Whether evaluating an expression only allocates, computes sizes or selects a view."""
    for node in walk(value):
        if isinstance(node, ast.Call):
            name = kernel.names.dotted(node.func)
            allowed = name.startswith(_PURE_CALLS)
            if not allowed and not (isinstance(node.func, ast.Attribute) and node.func.attr in ("type", "dtype")):
                return False
    return True


def render(function: str, /, **arguments: str | None) -> str:
    """Source of a call with keyword arguments; those that are None or empty are left out."""
    parts = [f"{name}={value}" for name, value in arguments.items() if value]
    return f"{function}({', '.join(parts)})"


def same_mask(*ops: Op) -> bool:
    """Whether operations are masked alike."""
    return len({op.mask for op in ops}) == 1


def rebound_between(kernel: Kernel, first: Op, last: Op, node: ast.AST) -> bool:
    """Whether a name that ``node`` reads is assigned between two operations of one block."""
    names = names_read(node)
    inside = False
    for statement in last.block:
        if statement is first.node:
            inside = True
            continue
        if statement is last.node:
            break
        if inside and isinstance(statement, ast.Assign):
            for target in statement.targets:
                if any(isinstance(t, ast.Name) and t.id in names for t in walk(target) if _is_store(t)):
                    return True
    return False


def _is_store(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def free_size(ref: Ref | None) -> int | None:
    """Free elements per partition of a tile, or None when unknown."""
    if ref is None or ref.shape is None:
        return None
    total = 1
    for extent in ref.shape[1:]:
        if extent.value is None:
            return None
        total *= extent.value
    return total


def is_column(ref: Ref | None) -> bool:
    """Whether the tile is provably (P, 1)."""
    return free_size(ref) == 1
