"""Whole searches in memory: what is asked, evaluated and recorded, in any order of arrival, killed and resumed."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_world import KilledError, ScriptedTask, World, cost_of, kernel_source

from accelopt_ray.agents.rendering import PromptLibrary
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult, TaskRef
from accelopt_ray.outcome import CallOutcome, EvaluationOutcome
from accelopt_ray.search.history import History
from accelopt_ray.search.loop import run_search
from accelopt_ray.search.presets import PRESETS, preset_settings
from accelopt_ray.search.result import SearchResult, SearchStatus
from accelopt_ray.search.services import ModelCall, ModelReply
from accelopt_ray.search.settings import SearchSettings

SMALL: dict[str, Any] = {"iterations": 3, "beam_width": 2, "plans_per_candidate": 3, "attempts_per_plan": 2, "seed": 7}
PROMPTS = PromptLibrary()


def small(preset: str = "beyond", **changes: Any) -> SearchSettings:
    return preset_settings(preset, **{**SMALL, **changes})


def search(world: World, chosen: SearchSettings, history: History | None = None, **options: Any) -> SearchResult:
    return asyncio.run(run_search(chosen, ScriptedTask(), world, prompts=PROMPTS, history=history, **options))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_runs_and_finds_something_faster(preset: str) -> None:
    world = World()
    result = search(world, small(preset, iterations=4))
    assert result.status is SearchStatus.COMPLETED
    assert result.iterations == 4
    assert result.best is not None
    assert result.speedup == pytest.approx(100.0 / result.best.latency_ms)
    assert result.speedup > 1.0
    rows = world.trajectory()
    correct = [row for row in rows["evaluations"].values() if row["outcome"] == "correct"]
    assert result.best.latency_ms == min(float(str(row["latency_ms"])) for row in correct)
    assert result.model_calls == len(world.calls)
    assert result.evaluations == len(world.jobs)
    assert result.cost_usd == pytest.approx(0.01 * len(world.calls))
    assert set(rows["iterations"]) == {f"toy:{number}" for number in range(5)}


def test_the_numbers_of_calls_are_the_methods() -> None:
    """The first iteration has one candidate, later ones B; each gets N plans and each plan K attempts."""
    world = World(bad_kernels=0.0)
    search(world, small("paper", use_memory=False))
    roles = Counter((call.iteration, call.role) for call in world.calls)
    assert roles == {
        (1, "planner"): 3,
        (1, "executor"): 6,
        (2, "planner"): 6,
        (2, "executor"): 12,
        (3, "planner"): 6,
        (3, "executor"): 12,
    }
    assert len(world.jobs) == 1 + 6 + 12 + 12


def test_ids_derive_from_positions() -> None:
    world = World(bad_kernels=0.0)
    search(world, small("paper"))
    assert {"toy.i1.c0.p2.planner", "toy.i2.c1.p2.a1.executor", "toy.i1.m0.summarizer"} <= set(world.replies)
    assert {"toy.i0.c0", "toy.i1.c0.p0.a0", "toy.i3.c1.p2.a1"} <= set(world.results)
    assert "toy.i2.c1.p2" in world.rows["plans"]
    seeds = [call.seed for call in world.calls]
    assert len(set(seeds)) == len(seeds)


def test_prompts_carry_the_parent_the_plan_and_the_lessons() -> None:
    world = World()
    search(world, small("paper"))
    by_id = {call.call_id: call for call in world.calls}
    planner = by_id["toy.i1.c0.p0.planner"]
    assert "latency: 100" in planner.user_prompt
    assert kernel_source(100.0) in planner.user_prompt
    assert "percent of what" not in planner.user_prompt
    assert world.replies[planner.call_id].reply_text in by_id["toy.i1.c0.p0.a0.executor"].user_prompt
    shown = world.trajectory()["memory_items"]
    lessons = [row for row in shown.values() if row["iteration"] == 1 and row["summary_text"]]
    later = by_id["toy.i2.c0.p0.planner"].system_prompt
    assert lessons
    assert all(str(row["title"]) in later for row in lessons)
    assert "Experience" not in planner.system_prompt
    plan = world.rows["plans"]["toy.i2.c0.p0"]
    assert set(plan["memory_item_ids"]) == {row["item_id"] for row in lessons}  # type: ignore[arg-type]


def test_rows_have_exactly_the_columns_of_the_schema() -> None:
    schema = pytest.importorskip("accelopt_ray.trajectory.schema")
    world = World(failures=0.1)
    search(world, small(fix_attempts=1))
    for table, rows in world.rows.items():
        columns = {column.name for column in schema.TABLES[table].columns} - {"run_id", "schema_version"}
        for row in rows.values():
            assert set(row) == columns, table
        schema.TABLES[table].arrow([{**row, "run_id": "r", "schema_version": 1} for row in rows.values()])


@settings(max_examples=15)
@given(
    order=st.integers(0, 2**32),
    preset=st.sampled_from(["beyond", "published", "paper"]),
    fixes=st.integers(0, 1),
    failures=st.sampled_from([0.0, 0.3]),
)
def test_the_order_of_arrival_never_matters(order: int, preset: str, fixes: int, failures: float) -> None:
    chosen = small(preset, fix_attempts=fixes)
    straight = World(failures=failures)
    shuffled = World(failures=failures, delays=random.Random(order), longest_delay=40)
    first, second = search(straight, chosen), search(shuffled, chosen)
    assert straight.trajectory() == shuffled.trajectory()
    assert first.best == second.best
    assert (first.evaluations, first.model_calls) == (second.evaluations, second.model_calls)
    assert sorted(straight.replies) == sorted(shuffled.replies)


@settings(max_examples=15)
@given(data=st.data(), preset=st.sampled_from(["beyond", "published"]))
def test_a_killed_search_resumes_to_the_same_end(data: st.DataObject, preset: str) -> None:
    chosen = small(preset, fix_attempts=1)
    undisturbed = World(longest_delay=20, failures=0.1, simulated=False, noise=0.05)
    expected = search(undisturbed, chosen)
    # World's assertions see to it that nothing is asked, evaluated or recorded twice, across all the kills.
    world = World(longest_delay=20, failures=0.1, simulated=False, noise=0.05)
    for _ in range(data.draw(st.integers(1, 3))):
        world.dies_after = data.draw(st.integers(0, 250))
        world.delays = random.Random(data.draw(st.integers(0, 1000)))
        try:
            search(world, chosen, world.history())
        except KilledError:
            continue
        break
    world.dies_after = None
    resumed = search(world, chosen, world.history())
    assert world.trajectory() == undisturbed.trajectory()
    assert resumed == expected


def test_a_finished_search_replays_from_its_history_alone() -> None:
    world = World()
    expected = search(world, small())

    class Nobody:
        async def complete(self, call: ModelCall) -> ModelReply:
            raise AssertionError(f"asked for {call.call_id}")

        async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
            raise AssertionError(f"asked for {job.evaluation_id}")

        async def record(self, table: str, rows: object) -> None:
            raise AssertionError(f"recorded in {table}")

        def progress(self, event: str, **values: object) -> None: ...

    replayed = asyncio.run(run_search(small(), ScriptedTask(), Nobody(), history=world.history()))
    assert replayed == expected


def test_duplicates_are_evaluated_once_and_name_the_first() -> None:
    world = World(factors=(0.9,), bad_kernels=0.0)
    search(world, small(iterations=2))
    evaluations = world.trajectory()["evaluations"]
    first_iteration = [row for row in evaluations.values() if row["iteration"] == 1]
    owner = next(row for row in first_iteration if row["outcome"] == "correct")
    assert owner["candidate_id"] == "toy.i1.c0.p0.a0"
    duplicates = [row for row in first_iteration if row["outcome"] == "duplicate"]
    assert len(duplicates) == 5
    assert {row["answered_from"] for row in duplicates} == {owner["evaluation_id"]}
    assert all(row["latency_ms"] is None and row["source_sha256"] is not None for row in duplicates)
    # 100 and 90 are known; of the second iteration 81 is new, from the better parent alone.
    assert sorted(cost_of(job.source) for job in world.jobs) == [81.0, 90.0, 100.0]


def test_without_deduplication_every_copy_is_evaluated() -> None:
    world = World(factors=(0.9,), bad_kernels=0.0)
    search(world, small("published", iterations=1))
    assert len(world.jobs) == 7


def test_a_copy_of_the_baseline_is_a_duplicate_of_it() -> None:
    world = World(factors=(1.0,), bad_kernels=0.0)
    result = search(world, small(iterations=1))
    assert len(world.jobs) == 1
    rows = world.trajectory()["evaluations"]
    assert {row["answered_from"] for key, row in rows.items() if key != "toy.i0.c0"} == {"toy.i0.c0"}
    assert result.speedup == 1.0


def test_the_published_rule_can_lose_the_best_but_the_result_keeps_it() -> None:
    class Diverging(World):
        def answer(self, call: ModelCall) -> ModelReply:
            if call.role == "executor":
                cost = 50.0 if call.iteration == 1 else 80.0
                return ModelReply(call.call_id, CallOutcome.OK, reply_text=f"```\n{kernel_source(cost)}```")
            return super().answer(call)

    lost = search(Diverging(), small("published", iterations=2))
    assert [candidate.latency_ms for candidate in lost.beam] == [80.0, 80.0]
    kept = search(Diverging(), small("paper", iterations=2))
    assert kept.beam[0].latency_ms == 50.0
    assert lost.best is not None
    assert lost.best.latency_ms == 50.0


def test_the_baseline_fails() -> None:
    class Broken(World):
        def measure(self, job: EvaluationJob) -> EvaluationResult:
            return EvaluationResult(job.evaluation_id, EvaluationOutcome.COMPILE_ERROR, error_text="boom")

    world = Broken()
    result = search(world, small())
    assert result.status is SearchStatus.BASELINE_FAILED
    assert "compile_error: boom" in result.reason
    assert result.best is None
    assert world.calls == []
    assert world.trajectory()["evaluations"]["toy.i0.c0"]["outcome"] == "compile_error"


def test_a_dead_model_ends_the_search_after_two_iterations() -> None:
    world = World(failures=1.0)
    result = search(world, small(iterations=9))
    assert result.status is SearchStatus.NO_MODEL_REPLY
    assert result.iterations == 2
    assert [candidate.candidate_id for candidate in result.beam] == ["toy.i0.c0"]
    assert len(world.named("warning")) == 2
    assert len(world.named("call_failed")) == 6
    assert result.speedup == 1.0


def test_one_silent_iteration_keeps_the_beam_and_goes_on() -> None:
    class Flaky(World):
        def answer(self, call: ModelCall) -> ModelReply:
            if call.iteration == 2:
                return ModelReply(call.call_id, CallOutcome.ERROR, error_text="down")
            return super().answer(call)

    for preset in ("published", "paper"):
        world = Flaky(bad_kernels=0.0)
        result = search(world, small(preset))
        assert result.status is SearchStatus.COMPLETED
        beams = {key: row["beam_candidate_ids"] for key, row in world.rows["iterations"].items()}
        assert beams["toy:2"] == beams["toy:1"]


def test_failed_executor_calls_are_rows() -> None:
    class Half(World):
        def answer(self, call: ModelCall) -> ModelReply:
            if call.role == "executor" and call.sample_index == 0:
                return ModelReply(call.call_id, CallOutcome.ERROR, error_text="status 500")
            return super().answer(call)

    world = Half(bad_kernels=0.0)
    result = search(world, small(iterations=1))
    row = world.trajectory()["evaluations"]["toy.i1.c0.p0.a0"]
    assert (row["outcome"], row["reason"], row["error_text"]) == ("no_code", "call_error", "status 500")
    assert (row["latency_ms"], row["source_sha256"], row["call_id"]) == (None, None, "toy.i1.c0.p0.a0.executor")
    assert result.evaluations == len(world.jobs)


def test_a_truncated_reply_with_a_whole_kernel_counts() -> None:
    class Chatty(World):
        def answer(self, call: ModelCall) -> ModelReply:
            return dataclasses.replace(super().answer(call), outcome=CallOutcome.TRUNCATED, finish_reason="length")

    assert search(Chatty(bad_kernels=0.0), small()).speedup > 1.0


class TestMeasuringParentsAgain:
    def test_measured_latencies_are_measured_again_and_predictions_are_not(self) -> None:
        measured = World(simulated=False, bad_kernels=0.0)
        search(measured, small("paper"))
        again = {key for key in measured.results if key.endswith(".parent")}
        assert again == {"toy.i2.c0.parent", "toy.i2.c1.parent", "toy.i3.c0.parent", "toy.i3.c1.parent"}
        predicted = World(simulated=True, bad_kernels=0.0)
        search(predicted, small("paper"))
        assert not any(key.endswith(".parent") for key in predicted.results)
        asked_not_to = World(simulated=False, bad_kernels=0.0)
        search(asked_not_to, small("paper", remeasure_parents=False))
        assert not any(key.endswith(".parent") for key in asked_not_to.results)

    def test_speedups_are_against_the_parents_latest_latency(self) -> None:
        class Drifting(World):
            """Everything takes twice as long from the second iteration on."""

            def measure(self, job: EvaluationJob) -> EvaluationResult:
                result = super().measure(job)
                slow = 1.0 if ".i0." in job.evaluation_id or ".i1." in job.evaluation_id else 2.0
                return dataclasses.replace(result, latency_ms=(result.latency_ms or 0.0) * slow)

        world = Drifting(simulated=False, bad_kernels=0.0, factors=(0.5,))
        search(world, small("paper", iterations=2))
        rows = world.trajectory()["evaluations"]
        row = rows["toy.i2.c0.p0.a0"]
        assert row["parent_latency_ms"] == 100.0
        assert row["speedup_vs_parent"] == 2.0
        assert row["speedup_vs_baseline"] == 2.0
        again = rows["toy.i2.c0.parent"]
        assert (again["candidate_id"], again["parent_candidate_id"]) == (row["parent_candidate_id"], "toy.i0.c0")

    def test_a_failed_measurement_keeps_the_parent_and_its_children(self) -> None:
        class Hiccup(World):
            def measure(self, job: EvaluationJob) -> EvaluationResult:
                if job.evaluation_id.endswith(".parent"):
                    return EvaluationResult(job.evaluation_id, EvaluationOutcome.TIMEOUT)
                return super().measure(job)

        world = Hiccup(simulated=False, bad_kernels=0.0)
        result = search(world, small("paper"))
        assert result.status is SearchStatus.COMPLETED
        assert len([call for call in world.calls if call.iteration == 3 and call.role == "planner"]) == 6
        assert world.trajectory()["evaluations"]["toy.i2.c0.parent"]["outcome"] == "timeout"
        assert len(world.named("warning")) == 4


class TestFixer:
    def test_a_failing_kernel_goes_back_with_its_error(self) -> None:
        class Fixable(World):
            def answer(self, call: ModelCall) -> ModelReply:
                if call.role == "executor":
                    return ModelReply(call.call_id, CallOutcome.OK, reply_text=f"```\n{kernel_source(0.0)}```")
                if call.role == "fixer":
                    assert "boom" in call.user_prompt
                    text = f"```\n{kernel_source(60.0 + call.seed % 7)}```"
                    return ModelReply(call.call_id, CallOutcome.OK, reply_text=text)
                return super().answer(call)

        world = Fixable()
        result = search(world, small("paper", iterations=1, fix_attempts=2))
        assert result.speedup > 1.4
        assert result.best is not None
        assert result.best.candidate_id.endswith(".f1")
        rows = world.trajectory()["evaluations"]
        assert rows["toy.i1.c0.p0.a0"]["outcome"] == "compile_error"
        assert rows["toy.i1.c0.p0.a0.f1"]["call_id"] == "toy.i1.c0.p0.a0.f1.fixer"
        assert "toy.i1.c0.p0.a0.f2" not in rows

    def test_it_is_not_asked_when_off(self) -> None:
        world = World(bad_kernels=1.0)
        search(world, small("paper"))
        assert {call.role for call in world.calls} == {"planner", "executor"}


class TestStopping:
    def test_no_improvement(self) -> None:
        result = search(World(factors=(1.2,)), small(iterations=9, stop_after_no_improvement=2))
        assert (result.status, result.iterations) == (SearchStatus.STOPPED, 2)
        assert result.reason == "no improvement for 2 iterations"

    def test_percent_of_peak(self) -> None:
        result = search(World(factors=(0.5,), bad_kernels=0.0), small(iterations=9, target_percent_of_peak=20.0))
        assert (result.status, result.iterations) == (SearchStatus.STOPPED, 1)

    @pytest.mark.parametrize("limit", [1, 2, 5, 10])
    def test_evaluations_are_never_exceeded(self, limit: int) -> None:
        world = World(bad_kernels=0.0, longest_delay=9)
        result = search(world, small("published", max_evaluations=limit))
        assert len(world.jobs) <= limit
        assert result.status is SearchStatus.STOPPED
        assert result.evaluations == len(world.jobs)

    def test_what_is_paid_for_is_still_evaluated(self) -> None:
        world = World(bad_kernels=0.0, longest_delay=9)
        result = search(world, small("published", max_cost_usd=0.08))
        assert result.status is SearchStatus.STOPPED
        executors = [call for call in world.calls if call.role == "executor"]
        assert executors
        assert len(world.jobs) == 1 + len(executors)
        assert result.best is not None
        assert result.speedup > 1.0

    def test_a_stop_file(self, tmp_path: Path) -> None:
        (tmp_path / "stop").touch()
        world = World()
        result = search(world, small(stop_file=str(tmp_path / "stop")))
        assert result.status is SearchStatus.STOPPED
        assert world.calls == []
        assert result.best is not None

    def test_wall_time(self) -> None:
        result = search(World(), small(max_wall_s=0.0))
        assert (result.status, result.iterations) == (SearchStatus.STOPPED, 0)


def test_repeated_sampling_always_starts_from_the_baseline() -> None:
    world = World()
    search(world, small("repeated-sampling"))
    parents = {row["parent_candidate_id"] for row in world.trajectory()["plans"].values()}
    assert parents == {"toy.i0.c0"}


def test_reflexion_is_shown_its_last_attempts() -> None:
    world = World(bad_kernels=0.0)
    search(world, small("reflexion", iterations=5, plans_per_candidate=1, attempts_per_plan=1, beam_width=1))
    prompts = {call.call_id: call.user_prompt for call in world.calls}
    assert "Earlier attempts" not in prompts["toy.i1.c0.p0.planner"]
    last = prompts["toy.i5.c0.p0.planner"]
    assert last.count("followed this plan") == 3
    assert world.replies["toy.i4.c0.p0.planner"].reply_text in last
    assert world.replies["toy.i1.c0.p0.planner"].reply_text not in last


def test_memory_rows_enter_and_leave() -> None:
    world = World(bad_kernels=0.0)
    result = search(world, small("paper", iterations=5, memory_capacity=3))
    rows = world.trajectory()["memory_items"]
    entered = {row["item_id"] for key, row in rows.items() if key.endswith(":entered")}
    evicted = {row["item_id"] for key, row in rows.items() if key.endswith(":evicted")}
    assert len(result.memory) == 3
    assert evicted
    assert evicted < entered
    assert {item.item_id for item in result.memory} == entered - evicted
    assert all(float(str(row["speedup"])) > 1.0 for row in rows.values())


def test_a_failing_service_ends_the_search_and_leaves_nothing_running() -> None:
    class Failing(World):
        async def evaluate(self, job: EvaluationJob) -> EvaluationResult:
            if len(self.jobs) == 4:
                raise RuntimeError("the cluster is gone")
            return await super().evaluate(job)

    async def run() -> set[asyncio.Task[Any]]:
        with pytest.raises(RuntimeError, match="the cluster is gone"):
            await run_search(small(), ScriptedTask(), Failing(longest_delay=5))
        await asyncio.sleep(0)  # what was cancelled ends in the loop's next turn
        return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]

    assert asyncio.run(run()) == set()


def test_jobs_name_the_task_as_told() -> None:
    world = World()
    search(world, small(iterations=1, check="strict"), task_ref=TaskRef("/a/folder", (("M", 128),)))
    assert {job.task for job in world.jobs} == {TaskRef("/a/folder", (("M", 128),))}
    assert {job.check for job in world.jobs} == {"strict"}


def test_progress_events() -> None:
    world = World()
    result = search(world, small())
    names = [name for name, _ in world.events]
    assert names[:3] == ["search_started", "baseline", "best"]
    assert names[-1] == "search_ended"
    assert names.count("iteration_started") == names.count("iteration_ended") == 3
    assert names.count("evaluated") == len(world.rows["evaluations"]) - 1
    assert world.named("search_ended")[0]["speedup"] == result.speedup
    assert world.named("best")[-1]["source"] == (result.best.source.text if result.best else None)
