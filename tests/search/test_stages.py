"""The order of stages: what waits for what, and that nothing but time hangs on it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from scripted_world import World
from test_search_loop import search, small

from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult
from accelopt_ray.outcome import UserError
from accelopt_ray.search.services import ModelCall, ModelReply

STAGES = ("parent", "planner", "executor", "evaluation")
SIZES: dict[str, Any] = {"iterations": 2, "plans_per_candidate": 3, "attempts_per_plan": 2, "use_memory": False}


class Watching(World):
    """Writes down when each thing starts and ends."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.moments: list[tuple[str, str]] = []

    async def complete(self, call: ModelCall) -> ModelReply:
        self.moments.append(("start", call.call_id))
        reply = await super().complete(call)
        self.moments.append(("end", call.call_id))
        return reply

    async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
        self.moments.append(("start", job.evaluation_id))
        result = await super().evaluate(job)
        self.moments.append(("end", job.evaluation_id))
        return result

    def of_iteration_2(self) -> list[tuple[str, str]]:
        return [(kind, name) for kind, name in self.moments if ".i2." in name]


def kind_of(name: str) -> str:
    last = name.rpartition(".")[2]
    return last if last in ("planner", "executor", "parent") else "evaluation"


def watched(order: str, seed: int = 3) -> Watching:
    world = Watching(delays=random.Random(seed), longest_delay=30, bad_kernels=0.0, simulated=False)
    search(world, small("published", **SIZES, stage_order=order, staged_check=False))
    return world


@pytest.mark.parametrize("order", ["barriers", "published"])
@pytest.mark.parametrize("preset", ["published", "beyond"])
@pytest.mark.parametrize("seed", range(2))
def test_what_comes_out_does_not_hang_on_the_order_of_stages(order: str, preset: str, seed: int):
    def trajectory(stage_order: str) -> object:
        world = World(delays=random.Random(seed), longest_delay=20, failures=0.1, simulated=False, noise=0.05)
        search(world, small(preset, stage_order=stage_order, fix_attempts=seed))
        return world.trajectory()

    assert trajectory(order) == trajectory("overlapped")


def test_with_barriers_each_stage_ends_before_the_next_one_starts():
    moments = watched("barriers").of_iteration_2()
    assert {kind_of(name) for _, name in moments} == set(STAGES)
    for earlier, later in itertools.pairwise(STAGES):
        last_end = max(at for at, (kind, name) in enumerate(moments) if kind_of(name) == earlier and kind == "end")
        first_start = min(at for at, (kind, name) in enumerate(moments) if kind_of(name) == later and kind == "start")
        assert last_end < first_start, (earlier, later)


def test_in_the_published_order_plans_take_turns_and_kernels_are_evaluated_one_by_one():
    moments = watched("published").of_iteration_2()
    carried_out = [(kind, name) for kind, name in moments if kind_of(name) in ("executor", "evaluation")]
    plans = [".".join(name.split(".")[:4]) for _, name in carried_out]
    assert plans == sorted(plans), "a plan's turn came before the end of an earlier one's"
    going = 0
    for kind, name in carried_out:
        if kind_of(name) == "evaluation":
            going += 1 if kind == "start" else -1
            assert going <= 1, "two kernels were evaluated at once"
    executors = [kind for kind, name in carried_out if kind_of(name) == "executor"]
    assert executors[:2] == ["start", "start"], "a plan's kernels are written side by side"


def test_by_default_nothing_waits_for_what_it_does_not_need():
    moments = watched("overlapped").of_iteration_2()
    first = {kind: min(at for at, (_, name) in enumerate(moments) if kind_of(name) == kind) for kind in STAGES}
    last = {kind: max(at for at, (_, name) in enumerate(moments) if kind_of(name) == kind) for kind in STAGES}
    for earlier, later in itertools.pairwise(STAGES[1:]):
        assert first[later] < last[earlier], (earlier, later)


def test_who_does_not_wait_for_all_cannot_have_barriers():
    with pytest.raises(UserError, match="stage_order barriers waits for all and selection_share 0.5 does not"):
        small(stage_order="barriers", selection_share=0.5)
