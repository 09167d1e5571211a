"""Plans that repeat are sampled again, the same ones whatever arrives first."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from scripted_world import ScriptedTask, World
from test_search_loop import search, small

from accelopt_ray.agents.rendering import PromptLibrary
from accelopt_ray.outcome import CallOutcome
from accelopt_ray.rewrite.prompt import read_request
from accelopt_ray.search.diversity import plan_title
from accelopt_ray.search.plan_text import PlanText
from accelopt_ray.search.services import ModelCall, ModelReply

LONG = (
    "Fuse the two passes over the rows of the input so that each tile is loaded once, keep the exponent in SBUF "
    "between them, and write the product back with one store for every tile of {} columns instead of two"
)


def repeats(one: str, other: str, similarity: float = 0.9) -> bool:
    return PlanText.of("a", one).repeats(PlanText.of("b", other), similarity)


def test_the_same_words_are_the_same_plan():
    assert repeats("Fuse the loops.", "**fuse  THE loops**")
    assert not repeats("Fuse the loops.", "Split the loops.")


def test_nearly_the_same_words_are_the_same_plan_unless_a_number_differs():
    assert repeats(LONG.format(512), LONG.format(512) + " please")
    assert not repeats(LONG.format(512), LONG.format(1024))
    assert not repeats(LONG.format(512), LONG.format(512) + " please", similarity=0.99)
    assert repeats("", "")


def test_a_title_is_the_first_line_that_says_something():
    assert plan_title("\n# **Fuse the loops**\n\nDetails") == "Fuse the loops"
    assert len(plan_title("word " * 100)) == 160
    assert plan_title("\n \n") == ""


class Repetitive(World):
    """A planner with few ideas."""

    ideas = 2

    def answer(self, call: ModelCall) -> ModelReply:
        if call.role != "planner":
            return super().answer(call)
        idea = random.Random(call.seed).randrange(self.ideas)
        return ModelReply(call.call_id, CallOutcome.OK, reply_text=f"Idea {idea}: do it.", cost_usd=0.01)


def by_round(world: World) -> dict[int, list[ModelCall]]:
    rounds: dict[int, list[ModelCall]] = {}
    for call in world.calls:
        if call.role == "planner":
            found = [part for part in call.call_id.split(".") if part.startswith("r") and part[1:].isdigit()]
            rounds.setdefault(int(found[0][1:]) if found else 0, []).append(call)
    return rounds


def test_repeated_plans_are_sampled_again_and_not_carried_out():
    world = Repetitive(bad_kernels=0.0)
    search(world, small(iterations=1, plans_per_candidate=6, plan_resamples=2))
    rows = world.trajectory()["plans"].values()
    carried_out = [row for row in rows if row["repeats_plan_id"] is None]
    assert sorted(str(row["plan_text"]) for row in carried_out) == ["Idea 0: do it.", "Idea 1: do it."]
    first = {row["plan_text"]: row["plan_id"] for row in carried_out}
    assert all(row["repeats_plan_id"] == first[row["plan_text"]] for row in rows if row["repeats_plan_id"])
    assert {number: len(calls) for number, calls in by_round(world).items()} == {0: 6, 1: 4, 2: 4}
    again = by_round(world)[1][0].user_prompt
    assert "Tried already from this kernel" in again
    assert "- Idea 0: do it. (being tried now)" in again
    assert len([call for call in world.calls if call.role == "executor"]) == 2 * 2
    seeds = [call.seed for call in world.calls]
    assert len(set(seeds)) == len(seeds)


def test_what_was_tried_from_a_kernel_is_known_in_later_iterations():
    world = Repetitive(bad_kernels=0.0, factors=(1.3,))
    search(world, small(iterations=2, plans_per_candidate=3, plan_resamples=1, beam_width=1))
    later = [call for call in world.calls if call.iteration == 2 and call.role == "planner"]
    shown = [line for line in later[0].user_prompt.splitlines() if line.startswith("- Idea")]
    assert {line.partition(" (")[0] for line in shown} == {"- Idea 0: do it.", "- Idea 1: do it."}
    # All kernels of this world are 1.3 times slower and so the same: one plan has it, the other only repeats it.
    assert {line.partition(" (")[2] for line in shown} == {
        "correct, 0.769x)",
        "gave a kernel that was known already)",
    }
    assert not any(call.iteration == 2 and call.role == "executor" for call in world.calls)


@pytest.mark.parametrize("order", range(6))
def test_the_order_of_arrival_does_not_matter(order: int):
    settings = small(plans_per_candidate=5, plan_resamples=2)
    straight = Repetitive()
    shuffled = Repetitive(delays=random.Random(order), longest_delay=40)
    straight.ideas = shuffled.ideas = 4
    search(straight, settings)
    search(shuffled, settings)
    assert straight.trajectory() == shuffled.trajectory()


@pytest.mark.parametrize("preset", ["published", "paper"])
def test_the_published_presets_take_plans_as_they_come(preset: str):
    world = Repetitive(bad_kernels=0.0)
    search(world, small(preset, iterations=2, plans_per_candidate=6))
    rows = world.trajectory()["plans"].values()
    assert {row["repeats_plan_id"] for row in rows} == {None}
    assert set(by_round(world)) == {0}
    assert not any("Tried already" in call.user_prompt for call in world.calls)


def test_a_failed_sample_is_no_repetition_and_stops_nobody():
    class Failing(Repetitive):
        def answer(self, call: ModelCall) -> ModelReply:
            if call.role == "planner" and call.sample_index == 0:
                return ModelReply(call.call_id, CallOutcome.ERROR, error_text="down")
            return super().answer(call)

    world = Failing(bad_kernels=0.0)
    search(world, small(iterations=1, plans_per_candidate=4, plan_resamples=1))
    assert len([row for row in world.trajectory()["plans"].values() if row["repeats_plan_id"] is None]) == 2


def test_the_rewriter_reads_which_of_its_plans_were_tried():
    task = ScriptedTask()
    from accelopt_ray.agents.rendering import ShownPlan

    shown = [
        ShownPlan("Plan 0123abcd: fuse-a, fuse-b", "correct", 1.25),
        ShownPlan("Fuse loops", "failed: timeout", 0.0),
    ]
    prompt = PromptLibrary().planner(
        problem=task.reference_source(), kernel=task.baseline_source(), profile=(), tried=shown
    )
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": prompt.system},
        {"role": "user", "content": prompt.user},
    ]
    assert read_request(messages).tried == {"0123abcd"}
    assert dataclasses.asdict(shown[0])["title"] in prompt.user
