"""Steps of a plan: how they are written down in words, read back, and carried out."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.catalogue import BY_ID
from accelopt_ray.rewrite.nest import NotReorderable
from accelopt_ray.rewrite.rule import Rule, Site
from accelopt_ray.rewrite.syntax import KernelSyntaxError, walk

_EVERYWHERE = "wherever it matches"
_MOST_APPLICATIONS = 60
_LINE = re.compile(r"^[\s>*#\-\d.)]*rewrite\W+(?P<rule>[a-z][a-z0-9-]+[a-z0-9])\b(?P<rest>.*)$", re.I | re.M)
_PARAMETER = re.compile(r"\b([a-z_]+)\s*(?:=|:|\bis\b)?\s*(\d+)\b")


@dataclass(frozen=True)
class Step:
    """One rule applied at one place, or everywhere.

    Attributes:
        rule: Id of the rule.
        anchor: The place in words, ``""`` for everywhere.
        occurrence: Which of several equal places.
        parameters: Chosen parameters.
    """

    rule: str
    anchor: str = ""
    occurrence: int = 0
    parameters: tuple[tuple[str, int], ...] = ()

    def text(self) -> str:
        """The step as a line of a plan."""
        place = f"at {self.anchor}" if self.anchor else _EVERYWHERE
        if self.occurrence:
            place += f" (occurrence {self.occurrence + 1})"
        values = "".join(f"; {name} = {value}" for name, value in self.parameters)
        return f"Rewrite: {self.rule} {place}{values}."


@dataclass(frozen=True)
class Outcome:
    """What carrying out steps led to.

    Attributes:
        source: The kernel afterwards.
        applied: The steps that changed it, with how often.
        skipped: The steps that did not apply, with why.
    """

    source: str
    applied: tuple[tuple[Step, int], ...] = ()
    skipped: tuple[tuple[Step, str], ...] = ()

    @property
    def changed(self) -> bool:
        """Whether anything was done."""
        return bool(self.applied)


def parse_steps(plan: str) -> list[Step]:
    """Reads the steps that a plan spells out; other text is ignored."""
    steps: list[Step] = []
    for match in _LINE.finditer(plan):
        rule = match["rule"].lower()
        if rule not in BY_ID:
            continue
        rest = match["rest"].strip().rstrip(".")
        head, _, tail = rest.partition(";")
        anchor = ""
        occurrence = 0
        found = re.search(r"\(occurrence (\d+)\)", head)
        if found:
            occurrence = int(found[1]) - 1
            head = head.replace(found[0], "")
        if head.strip().lower().startswith("at "):
            anchor = head.strip()[3:].strip()
        parameters = tuple((name, int(value)) for name, value in _PARAMETER.findall(tail))
        steps.append(Step(rule, anchor, occurrence, parameters))
    return steps


def rules_mentioned(text: str) -> list[Rule]:
    """Rules that a text names by id, title or keyword, in order of first mention."""
    lowered = " ".join(text.lower().split())
    found: list[tuple[int, Rule]] = []
    for rule in BY_ID.values():
        places = [lowered.find(word.lower()) for word in (rule.id, rule.title, *rule.keywords)]
        places = [place for place in places if place >= 0]
        if places:
            found.append((min(places), rule))
    return [rule for _, rule in sorted(found, key=lambda item: item[0])]


def carry_out(source: str, steps: Sequence[Step]) -> Outcome:
    """Applies steps in order; a step that does not apply is skipped.

    Raises:
        KernelSyntaxError: The source is no kernel.
    """
    _analysed(source)
    applied: list[tuple[Step, int]] = []
    skipped: list[tuple[Step, str]] = []
    for step in steps:
        source, count, reason = _carry_out_one(source, step)
        if count:
            applied.append((step, count))
        else:
            skipped.append((step, reason))
    return Outcome(source, tuple(applied), tuple(skipped))


@lru_cache(maxsize=4096)
def _carry_out_one(source: str, step: Step) -> tuple[str, int, str]:
    """The kernel after one step, how often it was applied, and why not more often."""
    count = 0
    reason = "the pattern does not occur"
    limit = 1 if step.anchor else _MOST_APPLICATIONS
    while count < limit:
        site = _choose(source, step)
        if site is None:
            break
        together = not step.anchor and BY_ID[step.rule].independent_sites
        sites = sites_of(source, step.rule) if together else (site,)
        changed = _apply(source, sites)
        if isinstance(changed, Exception):
            reason = str(changed)
            break
        source = changed
        count += len(sites)
    return source, count, reason


@lru_cache(maxsize=256)
def _analysed(source: str) -> Kernel:
    """An analysis shared by all rules that only look."""
    return Kernel.parse(source)


@lru_cache(maxsize=8192)
def sites_of(source: str, rule_id: str) -> tuple[Site, ...]:
    """The sites of one rule in a kernel."""
    return tuple(BY_ID[rule_id].find(_analysed(source)))


def _choose(source: str, step: Step) -> Site | None:
    sites = sites_of(source, step.rule)
    if not sites:
        return None
    if not step.anchor:
        fitting = [site for site in sites if not step.parameters or site.parameters == step.parameters]
        return fitting[0] if fitting else None
    at_place = [site for site in sites if _same_place(site.anchor, step.anchor)]
    exact = [site for site in at_place if site.parameters == step.parameters]
    numbered = [site for site in exact if site.occurrence == step.occurrence]
    for candidates in (numbered, exact, at_place if not step.parameters else []):
        if candidates:
            return candidates[0]
    same_parameters = [site for site in sites if site.parameters == step.parameters]
    return same_parameters[0] if len(same_parameters) == 1 else None


def _same_place(one: str, other: str) -> bool:
    return re.sub(r"[`'\"\s]", "", one.lower()) == re.sub(r"[`'\"\s]", "", other.lower())


def _apply(source: str, sites: Sequence[Site]) -> str | Exception:
    """The kernel after one rewrite, or after several of one rule, or why it was refused."""
    kernel = Kernel.parse(source)
    try:
        for site in sites:
            BY_ID[site.rule].apply(kernel, site)
    except (LookupError, NotReorderable) as error:
        return error
    changed = kernel.source()
    if changed == source:
        return LookupError("the rewrite changes nothing")
    fault = self_check(changed)
    return LookupError(fault) if fault else changed


def self_check(source: str) -> str:
    """A light check of a rewritten kernel: it parses, has an entry and reads only names that exist; ``""`` if good."""
    try:
        tree = _analysed(source).tree.module
    except (SyntaxError, KernelSyntaxError) as error:
        return f"the result does not parse: {error}"
    defined = set(dir(builtins))
    for node in walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {(item.asname or item.name).split(".")[0] for item in node.names}
    for node in walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in defined:
            return f"the result uses the name {node.id}, which nothing defines"
    return ""
