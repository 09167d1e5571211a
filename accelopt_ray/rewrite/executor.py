"""The executor's part: carrying out a plan on a kernel."""

from __future__ import annotations

from accelopt_ray.rewrite.catalogue import BY_ID
from accelopt_ray.rewrite.prompt import Request
from accelopt_ray.rewrite.steps import Step, carry_out, parse_steps, rules_mentioned, sites_of
from accelopt_ray.rewrite.syntax import KernelSyntaxError


def execute(request: Request) -> str:
    """Answers with an explanation and the new kernel in one code block."""
    if not request.kernels:
        return "The prompt holds no kernel that parses and defines an entry, so no change was made."
    source = request.kernels[-1]
    steps = parse_steps(request.plan)
    try:
        if not steps:
            steps = _guess(request.plan, source)
        outcome = carry_out(source, steps)
    except KernelSyntaxError as error:
        return f"No change was made: {error}."
    lines: list[str] = []
    for step, count in outcome.applied:
        times = f" ({count} places)" if count > 1 else ""
        lines.append(f"- {BY_ID[step.rule].title}{times}.")
    for step, reason in outcome.skipped:
        lines.append(f"- Skipped {step.rule}: {reason}.")
    if not outcome.changed:
        head = "No change was made: the plan names no rewrite that provably applies to this kernel."
    else:
        head = "The plan is carried out:"
    return "\n".join([head, *lines, "", "```python", outcome.source.rstrip("\n"), "```", ""])


def _guess(plan: str, source: str) -> list[Step]:
    """Steps for a plan in free words: the rules it mentions that apply to the kernel."""
    return [Step(rule.id) for rule in rules_mentioned(plan) if sites_of(source, rule.id)]
