"""The exact prompt that a role is sent first in a search, found by searching until it is asked for.

Only the baseline is evaluated; the roles before the wanted one answer what they are told to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from accelopt_ray.agents.rendering import Prompt, PromptLibrary
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult, TaskRef
from accelopt_ray.outcome import CallOutcome, UserError
from accelopt_ray.search.context import SearchTask
from accelopt_ray.search.loop import run_search
from accelopt_ray.search.services import ModelCall, ModelReply
from accelopt_ray.search.settings import SearchSettings

PLACEHOLDER_PLAN = "(the planner's plan)"
PLACEHOLDER_REPLY = "(an executor's reply without a kernel)"


class _AskedError(Exception):
    """The wanted call was about to be made."""

    def __init__(self, call: ModelCall) -> None:
        self.call = call


class _Preview:
    """Services that end the search at the first call of one role."""

    def __init__(
        self, role: str, replies: Mapping[str, str], evaluate: Callable[[EvaluationJob], EvaluationResult]
    ) -> None:
        self._role = role
        self._replies = replies
        self._evaluate = evaluate

    async def complete(self, call: ModelCall) -> ModelReply:
        if call.role == self._role:
            raise _AskedError(call)
        return ModelReply(call.call_id, CallOutcome.OK, reply_text=self._replies[call.role])

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        return self._evaluate(job)

    async def record(self, table: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Keeps nothing."""

    def progress(self, event: str, **values: object) -> None:
        """Tells nobody."""


async def preview(
    role: str,
    settings: SearchSettings,
    task: SearchTask,
    task_ref: TaskRef,
    prompts: PromptLibrary,
    evaluate: Callable[[EvaluationJob], EvaluationResult],
    plan: str = PLACEHOLDER_PLAN,
) -> Prompt:
    """Returns what a role is sent in the first iteration, for the first sample of the first candidate.

    Args:
        role: ``planner``, ``executor``, ``summarizer`` or ``fixer``.
        settings: The search's settings; its sizes do not matter.
        task: The task.
        task_ref: How the evaluation finds it.
        prompts: Prompt files.
        evaluate: Evaluates the baseline.
        plan: The plan that executor and fixer are shown.

    Raises:
        UserError: There is no such role, or the baseline is not correct.
    """
    if role == "summarizer":
        # It is shown two kernels of a search and the ratio of their latencies; here the baseline stands for both.
        source = task.baseline_source()
        return prompts.summarizer(slow=source, fast=source, speedup=1.0)
    if role not in ("planner", "executor", "fixer"):
        raise UserError(f"there is no role {role!r}: choose planner, executor, summarizer or fixer")
    first = settings.replace(
        iterations=1,
        beam_width=1,
        plans_per_candidate=1,
        attempts_per_plan=1,
        fix_attempts=max(1, settings.fix_attempts),
    )
    replies = {"planner": plan, "executor": PLACEHOLDER_REPLY}
    try:
        result = await run_search(first, task, _Preview(role, replies, evaluate), prompts=prompts, task_ref=task_ref)
    except _AskedError as asked:
        return Prompt(asked.call.system_prompt, asked.call.user_prompt)
    raise UserError(f"the {role} of {task.name} is asked nothing: {result.reason or result.status}")
