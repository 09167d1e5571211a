"""The planner's part: which rewrites apply, in what order they look promising, and one of them as a plan."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from accelopt_ray.rewrite.catalogue import BY_ID, CLEANUP, PEEPHOLES, STRUCTURAL
from accelopt_ray.rewrite.prompt import Experience, Request
from accelopt_ray.rewrite.rule import Resource, Rule, Site
from accelopt_ray.rewrite.steps import Step, carry_out, rules_mentioned, sites_of
from accelopt_ray.rewrite.syntax import KernelSyntaxError

_WORKED = 1.25
_FAILED = 0.4
#: Probability ratio of neighbouring ranks when a plan is drawn.
_DECAY = 0.62
_MOST_OPTIONS = 20
_NOTHING = (
    "No rewrite of the catalogue applies to this kernel: keep it as it is. Every pattern was checked against the "
    "syntax tree and none could be proved legal."
)


@dataclass(frozen=True)
class Option:
    """A plan that could be proposed.

    Attributes:
        steps: What to do, in order.
        source: The kernel it leads to.
        descriptions: Text per rule.
        score: Expected speed-up before experience is taken into account.
    """

    steps: tuple[Step, ...]
    source: str
    descriptions: tuple[str, ...]
    score: float

    @property
    def tag(self) -> str:
        """Names the plan by what it does, in eight hexadecimal digits."""
        return hashlib.sha256("\n".join(step.text() for step in self.steps).encode()).hexdigest()[:8]


def plan_text(request: Request, seed: int, sample: int) -> str:
    """Writes one plan for the request's kernel.

    Args:
        request: The prompt.
        seed: The request's seed.
        sample: Number of the sample within the request (``n`` > 1); different numbers give different plans.
    """
    if not request.kernels:
        return "The prompt holds no kernel that parses and defines an entry, so there is nothing to plan."
    try:
        untried = [option for option in options_for(request.kernels[-1]) if option.tag not in request.tried]
        options = rank(untried, request.counters, request.experiences)
    except KernelSyntaxError as error:
        return f"No plan: {error}."
    if not options:
        return _NOTHING
    return _write(_draw(options, seed, sample), request.counters)


def _draw(options: Sequence[Option], seed: int, sample: int) -> Option:
    """Draws without replacement by rank; the first sample of a request is the first draw."""
    stream = random.Random(seed)
    left = list(range(len(options)))
    chosen = left[0]
    for _ in range(sample % len(options) + 1):
        weights = [_DECAY**number for number in range(len(left))]
        chosen = stream.choices(left, weights)[0]
        left.remove(chosen)
    return options[chosen]


def rank(options: Sequence[Option], counters: Mapping[str, float], experiences: Sequence[Experience]) -> list[Option]:
    """Orders options by expected gain under the profile and the experience shown."""
    liked: dict[str, float] = {}
    for item in experiences:
        mentioned = rules_mentioned(item.text)
        for number, rule in enumerate(mentioned):
            weight = _FAILED if item.warns else 1.0 + (_WORKED - 1.0) * min(item.speedup, 2.0) / (1 + number)
            liked[rule.id] = liked.get(rule.id, 1.0) * weight

    def value(option: Option) -> float:
        gain = 1.0
        for identifier in dict.fromkeys(step.rule for step in option.steps):
            rule = BY_ID[identifier]
            gain *= 1.0 + (rule.typical_gain - 1.0) * relevance(rule.relieves, counters)
            gain *= min(max(liked.get(identifier, 1.0), 0.3), 1.6)
        return gain * option.score

    return sorted(options, key=lambda option: (-value(option), [step.text() for step in option.steps]))


def relevance(resource: Resource, counters: Mapping[str, float]) -> float:
    """How much relieving a resource matters under a profile, 0 to 1; 0.6 when the profile does not say."""
    if not counters:
        return 0.6
    vector = counters.get("vector_engine_active_time_percent", 0.5)
    scalar = counters.get("scalar_engine_active_time_percent", 0.5)
    read, write = counters.get("hbm_read_bytes", 0.0), counters.get("hbm_write_bytes", 0.0)
    latency_s = counters.get("latency", 0.0) * 1e-3
    dma = min((read + write) / (latency_s * 255e9), 1.0) if latency_s else 0.5
    hfu = counters.get("hfu_estimated_percent", 0.0)
    spill = counters.get("spill_save_bytes", 0.0) + counters.get("spill_reload_bytes", 0.0)
    if resource is Resource.VECTOR:
        return _scale(vector)
    if resource is Resource.SCALAR:
        return _scale(scalar)
    if resource is Resource.ELEMENTWISE:
        return _scale(max(vector, scalar))
    if resource is Resource.SPILL:
        return min(1.0, 0.15 + 3.0 * spill / (read + write)) if spill and read + write else 0.1
    if resource is Resource.TRAFFIC:
        return _scale(dma)
    if resource is Resource.TENSOR:
        return _scale(2.0 * hfu)
    return 0.4


def _scale(active: float) -> float:
    return min(max(active, 0.1), 1.0)


@lru_cache(maxsize=256)
def options_for(source: str) -> tuple[Option, ...]:
    """All plans for a kernel: single rules, structural rewrites, and each with the simplifications it enables.

    Raises:
        KernelSyntaxError: The source is no kernel.
    """
    options: list[Option] = []
    seen = {source}

    def add(steps: Sequence[Step], score: float = 1.0) -> None:
        if len(options) >= _MOST_OPTIONS:
            return
        outcome = carry_out(source, steps)
        if outcome.changed and outcome.source not in seen:
            seen.add(outcome.source)
            kept = tuple(step for step, _ in outcome.applied)
            options.append(Option(kept, outcome.source, tuple(_descriptions(source, kept)), score))

    simplify = _simplification(source)
    everything = _everything(source)
    for steps in everything:
        add(steps)
    for steps in _all_but_one(source, everything):
        add(steps, 0.97)
    structural = [site for rule in STRUCTURAL for site in sites_of(source, rule.id)]
    for site in structural:
        step = _step(site)
        alone = carry_out(source, [step])
        if alone.changed:
            add(
                [
                    step,
                    *_cleanup(alone.source),
                    *_simplification(carry_out(source, [step, *_cleanup(alone.source)]).source),
                ]
            )
            add([step, *_cleanup(alone.source)])
    if simplify:
        add(simplify)
        for left_out in dict.fromkeys(step.rule for step in simplify):
            add([step for step in simplify if step.rule != left_out], 0.98)
    for rule in (*PEEPHOLES, *CLEANUP):
        if sites_of(source, rule.id):
            add([Step(rule.id)])
    return tuple(options)


def _everything(source: str) -> list[list[Step]]:
    """Structural rewrites one after the other (the first site each), with all simplifications, and without them.

    Buffers that a compiler declared with one block per iteration hide what depends on what, so a second variant sinks
    them first, if that makes a difference.
    """
    variants: list[list[Step]] = []
    known: list[list[str]] = []
    for first in ([], _cleanup(source)):
        steps = _structure(carry_out(source, first).source)
        rules = [step.rule for step in steps if BY_ID[step.rule] not in CLEANUP]
        if steps and rules not in known:
            known.append(rules)
            steps = [*first, *steps]
            variants += [[*steps, *_simplification(carry_out(source, steps).source)], steps]
    return variants


def _all_but_one(source: str, everything: Sequence[Sequence[Step]]) -> Iterator[list[Step]]:
    """Structural rewrites with all simplifications, each time without one of them: one too many may undo the rest."""
    used = dict.fromkeys(step.rule for steps in everything[:1] for step in steps)
    structural = [rule for rule in STRUCTURAL if rule.id in used]
    if len(structural) < 2:
        return
    for rule in reversed(structural):
        steps = _structure(source, rule)
        yield [*steps, *_simplification(carry_out(source, steps).source)]


def _structure(source: str, without: Rule | None = None) -> list[Step]:
    """Structural rewrites one after the other, each at its first site or at all, and tidied up after."""
    steps: list[Step] = []
    current = source
    for rule in STRUCTURAL:
        sites = sites_of(current, rule.id)
        if not sites or rule.exclusive or rule is without:
            continue
        step = Step(rule.id) if rule.everywhere else _step(sites[0])
        trial = carry_out(current, [step])
        if trial.changed:
            cleanup = _cleanup(trial.source)
            steps += [step, *cleanup]
            current = carry_out(trial.source, cleanup).source
    return steps


def _cleanup(source: str) -> list[Step]:
    return [step for step, _ in carry_out(source, [Step(rule.id) for rule in CLEANUP]).applied]


def _simplification(source: str) -> list[Step]:
    """Peephole rules in canonical order, repeated until nothing changes."""
    steps: list[Step] = []
    current = source
    for _ in range(3):
        outcome = carry_out(current, [Step(rule.id) for rule in PEEPHOLES])
        if not outcome.changed:
            break
        steps += [step for step, _ in outcome.applied]
        current = outcome.source
    return steps


def _step(site: Site) -> Step:
    return Step(site.rule, site.anchor, site.occurrence, site.parameters)


def _descriptions(source: str, steps: Sequence[Step]) -> list[str]:
    texts: list[str] = []
    current = source
    for step in steps:
        rule = BY_ID[step.rule]
        sites = [site for site in sites_of(current, rule.id) if not step.anchor or site.anchor == step.anchor]
        chosen = next((s for s in sites if s.parameters == step.parameters), sites[0] if sites else None)
        texts.append(_describe(rule, chosen, [site.anchor for site in sites] if not step.anchor else []))
        current = carry_out(current, [step]).source
    return texts


def _describe(rule: Rule, site: Site | None, anchors: Sequence[str]) -> str:
    if site is None:
        return f"{rule.title}. Problem: {rule.problem} Change: {rule.change} Expected: {rule.expectation}"
    if len(anchors) > 1:
        places = ", ".join(dict.fromkeys(anchors))
        site = Site(site.rule, places, 0, site.parameters, site.details)
    return rule.describe(site)


def _write(option: Option, counters: Mapping[str, float]) -> str:
    rules = ", ".join(dict.fromkeys(step.rule for step in option.steps))
    lines = [f"Plan {option.tag}: {rules}", ""]
    lines += ["One step, made of rewrites that belong together:" if len(option.steps) > 1 else "One step:", ""]
    for number, text in enumerate(option.descriptions, 1):
        lines.append(f"{number}. {text}" if len(option.descriptions) > 1 else text)
    shown = [
        f"{name} = {counters[name]:g}"
        for name in ("vector_engine_active_time_percent", "scalar_engine_active_time_percent", "spill_save_bytes")
        if name in counters
    ]
    if shown:
        lines += ["", f"The profile reads {', '.join(shown)}."]
    lines += [
        "",
        "Keep names, arguments, outputs and fp32 arithmetic as they are. To be carried out in this order:",
        "",
    ]
    lines += [step.text() for step in option.steps]
    return "\n".join(lines)
