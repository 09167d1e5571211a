"""Joins: what each answers, checked against a run small enough to work out by hand, and as laws on generated ones."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelopt_ray.analysis import Trajectory, load
from accelopt_ray.analysis.comparison import bootstrap_interval, compare, configuration_groups
from accelopt_ray.analysis.lineage import plan_title
from accelopt_ray.analysis.live import snapshot
from accelopt_ray.analysis.memory_use import memory_size
from accelopt_ray.analysis.outcomes import failures
from accelopt_ray.analysis.plan_categories import plan_category
from accelopt_ray.analysis.progress import best_so_far
from accelopt_ray.analysis.utilisation import stays, utilisation
from accelopt_ray.outcome import UserError
from accelopt_ray.trajectory import TrajectoryWriter, text_sha256

START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def at(second: float) -> datetime:
    return START + timedelta(seconds=second)


def attempt(name: str, parent: str | None, iteration: int, second: float, **values: object) -> dict[str, object]:
    row: dict[str, object] = {
        "task": "t",
        "iteration": iteration,
        "evaluation_id": name,
        "candidate_id": name,
        "parent_candidate_id": parent,
        "plan_id": f"{name}.plan" if parent else None,
        "call_id": f"{name}.executor" if parent else None,
        "source_sha256": text_sha256(name),
        "outcome": "correct",
        "baseline_latency_ms": 8.0,
        "simulated": False,
        "answered_from": "",
        "core": "0",
        "run_s": 2.0,
        "compile_s": 1.0,
        "ended_at": at(second),
    }
    return {**row, **values}


@pytest.fixture
def small(tmp_path: Path) -> Trajectory:
    """base (8 ms) -> a (4 ms, plan with no memory) -> b (2 ms, plan that saw one item); a wrong kernel is 'fastest'."""
    writer = TrajectoryWriter(tmp_path / "trajectory", "r")
    writer.write("runs", [{"created_at": START, "seed": 3, "config_json": '{"search": {"iterations": 3}}'}])
    writer.write(
        "evaluations",
        [
            attempt("base", None, 0, 10, latency_ms=8.0, percent_of_peak=10.0),
            attempt("a", "base", 1, 20, latency_ms=4.0, speedup_vs_parent=2.0, percent_of_peak=20.0),
            attempt("wrong", "base", 1, 30, latency_ms=0.1, outcome="incorrect", error_text="off by 3\nmore"),
            attempt("same", "base", 1, 31, outcome="duplicate", answered_from="a"),
            attempt("b", "a", 2, 40, latency_ms=2.0, speedup_vs_parent=2.0, percent_of_peak=40.0),
        ],
    )
    names = ("base", "a", "b", "wrong")
    writer.write("sources", [{"task": "t", "source": name} for name in names])
    plans = [("a.plan", "base", []), ("wrong.plan", "base", []), ("b.plan", "a", ["m0"])]
    writer.write(
        "plans",
        [
            {"task": "t", "plan_id": plan, "parent_candidate_id": parent, "plan_text": plan, "memory_item_ids": shown}
            for plan, parent, shown in plans
        ],
    )
    calls = [("a", 12, 5.0, 0.5), ("wrong", 12, 10.0, 0.25), ("b", 32, 1.0, 1.0), ("late", 60, 5.0, 8.0)]
    writer.write(
        "llm_calls",
        [
            {
                "task": "t",
                "iteration": 1,
                "call_id": f"{name}.executor",
                "role": "executor",
                "model": "m",
                "outcome": "ok",
                "started_at": at(start),
                "latency_s": seconds,
                "cost_usd": usd,
                "price_known": True,
                "prompt_tokens": 10,
                "completion_tokens": 1,
            }
            for name, start, seconds, usd in calls
        ],
    )
    item = {"task": "t", "iteration": 1, "item_id": "m0", "kind": "positive"}
    pair = {"slow_candidate_id": "base", "fast_candidate_id": "a", "speedup": 2.0}
    writer.write("memory_items", [{**item, **pair}, {**item, **pair, "evicted_iteration": 2}])
    writer.write("iterations", [{"task": "t", "iteration": number} for number in range(3)])
    beams = [(0, "base", 8.0), (1, "a", 4.0), (1, "base", 8.0), (2, "b", 2.0)]
    selections = [
        {"task": "t", "iteration": iteration, "rank": rank, "candidate_id": name, "latency_ms": latency}
        for rank, (iteration, name, latency) in enumerate(beams)
    ]
    writer.write("selections", selections)
    return load(tmp_path)


def test_best_so_far_never_counts_a_wrong_kernel(small: Trajectory):
    points = small.best_by_cost()
    assert points["best_speedup"].tolist() == [1.0, 2.0, 2.0, 2.0, 4.0]
    assert points["evaluations"].tolist() == [0, 1, 2, 2, 3]
    assert points["improved"].tolist() == [True, True, False, False, True]
    assert points["best_percent_of_peak"].tolist() == [10.0, 20.0, 20.0, 20.0, 40.0]


def test_best_so_far_is_the_same_from_all_columns_and_from_those_it_needs(small: Trajectory):
    alone = load(small.location_of("r")).best_so_far()
    assert len(small.evaluations) == 5
    pd.testing.assert_frame_equal(alone, small.best_so_far())


def test_money_counts_once_the_call_has_ended(small: Trajectory):
    assert small.best_by_cost()["cost_usd"].tolist() == [0.0, 0.5, 0.75, 0.75, 1.75]
    assert small.best_by_cost()["tokens"].tolist() == [0, 11, 22, 22, 33]


def test_lineage_goes_from_the_baseline_to_the_best_with_plans_and_diffs(small: Trajectory):
    steps = small.lineage()
    assert [step.candidate_id for step in steps] == ["base", "a", "b"]
    assert [step.plan_text for step in steps] == ["", "a.plan", "b.plan"]
    assert steps[-1].speedup_vs_baseline == 4.0
    assert steps[-1].speedup_vs_parent == 2.0
    assert steps[1].diff == "--- base\n+++ a\n@@ -1 +1 @@\n-base\n+a"


def test_the_summary_tells_before_after_and_cost(small: Trajectory):
    (row,) = small.summary().to_dict(orient="records")
    assert (row["baseline_latency_ms"], row["best_latency_ms"], row["speedup"]) == (8.0, 2.0, 4.0)
    assert (row["evaluations"], row["evaluations_run"], row["correct"], row["duplicates"]) == (5, 4, 3, 1)
    assert (row["cost_usd"], row["tokens"], row["calls"]) == (9.75, 44, 4)
    assert row["wall_s"] == 30.0


def test_memory_use_tells_what_planners_were_shown(small: Trajectory):
    use = small.memory_use().set_index("candidate_id")
    assert use["memory_items"].to_dict() == {"a": 0, "wrong": 0, "same": 0, "b": 1}
    size = memory_size(small.memory_items, small.iterations).set_index("iteration")
    assert size["positive"].tolist() == [0, 1, 0]


def test_progress_gives_the_beams_spread(small: Trajectory):
    progress = small.progress().set_index("iteration")
    assert progress.loc[1, ["best_speedup", "beam_best_speedup", "beam_worst_speedup"]].tolist() == [2.0, 2.0, 1.0]


def test_failures_are_grouped_by_their_first_line(small: Trajectory):
    (row,) = failures(small.evaluations).to_dict(orient="records")
    assert (row["outcome"], row["message"], row["count"], row["example_text"]) == (
        "incorrect",
        "off by 3",
        1,
        "off by 3\nmore",
    )


def test_outcomes_add_up_to_all_evaluations(run: Trajectory):
    outcomes = run.outcomes()
    assert outcomes["count"].sum() == len(run.evaluations)
    assert set(outcomes[outcomes["iteration"].gt(0)]["model"]) == {"generated"}


def test_costs_add_up_to_all_calls(run: Trajectory):
    costs = run.costs()
    assert costs["calls"].sum() == len(run.llm_calls)
    assert costs["cost_usd"].sum() == pytest.approx(run.llm_calls["cost_usd"].sum())


def test_the_frontier_is_rising_and_nothing_beats_it(sweep: Trajectory):
    points, frontier = sweep.best_by_cost(), sweep.frontier()
    assert frontier["best_speedup"].is_monotonic_increasing
    assert frontier["cost_usd"].is_monotonic_increasing
    for row in frontier.itertuples():
        cheaper = points[points["cost_usd"].lt(row.cost_usd)]
        assert not cheaper["best_speedup"].ge(row.best_speedup).any()
    assert frontier["best_speedup"].max() == points["best_speedup"].max()


def test_profiles_measure_traffic_against_what_the_task_needs(run: Trajectory):
    profiles = run.profiles().set_index("kernel")
    counts = profiles["minimum_hbm_bytes"]
    assert counts["best"] == 4 * 2 * 4096 * 7168  # silu reads and writes every element once
    hbm = profiles.loc["baseline", "hbm_read_bytes"] + profiles.loc["baseline", "hbm_write_bytes"]
    assert profiles.loc["baseline", "traffic_efficiency"] == pytest.approx(counts["baseline"] / hbm)


def test_utilisation_integrates_to_the_busy_seconds(small: Trajectory):
    slices = utilisation(small.evaluations, small.llm_calls, bins=37)
    width = slices["elapsed_s"].diff().iloc[1]
    assert (slices["running"] * width).sum() == pytest.approx(4 * 2.0)
    assert (slices["compiling"] * width).sum() == pytest.approx(4 * 1.0)
    assert (slices["calling"] * width).sum() == pytest.approx(21.0)


def test_runs_that_share_a_core_share_a_slot(small: Trajectory):
    shared = pd.concat([small.evaluations, small.evaluations.assign(run_id="other")])
    assert utilisation(shared, small.llm_calls)["slots"].unique() == [1]
    apart = pd.concat([small.evaluations, small.evaluations.assign(run_id="other", core="1")])
    assert utilisation(apart, small.llm_calls)["slots"].unique() == [2]


def test_a_kernel_that_was_checked_in_two_stages_was_on_a_slot_twice(small: Trajectory, tmp_path: Path):
    first = {"core": "0", "outcome": "correct", "answered_from": "", "compile_s": 1.0, "run_s": 2.0}
    rest = {**first, "compile_s": 0.5, "run_s": 9.0}
    rows = [("a", first, 20), ("a.rest", rest, 35), ("b", {**first, "answered_from": "store:x"}, 38)]
    writer = TrajectoryWriter(tmp_path / "trajectory", "r")
    writer.write(
        "results",
        [
            {"evaluation_id": name, "result_json": json.dumps(content), "ended_at": at(second)}
            for name, content, second in rows
        ],
    )
    both = load(tmp_path)
    busy = stays(both.evaluations, both.results)
    assert list(busy["run_s"]) == [2.0, 9.0, 2.0]
    slices = utilisation(busy, both.llm_calls.iloc[:0], bins=37)
    width = slices["elapsed_s"].diff().iloc[1]
    assert (slices["running"] * width).sum() == pytest.approx(11.0)
    assert (slices["compiling"] * width).sum() == pytest.approx(1.5)
    assert slices["running"].max() <= slices["slots"].iloc[0] == 1
    assert stays(small.evaluations, both.results.iloc[:0]).equals(small.evaluations[busy.columns])


def test_a_snapshot_tells_queue_beam_and_failures(small: Trajectory):
    now = snapshot(small, "r")
    assert now.best is not None
    assert (now.best.candidate_id, now.best.speedup) == ("b", 4.0)
    assert [each.candidate_id for each in now.beam] == ["b"]
    assert now.waiting == 1  # the call 'late' has written a kernel that nobody has evaluated
    assert now.failures == ["wrong: incorrect off by 3"]
    assert (now.iterations_done, now.iterations_planned) == (2, 3)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["x", "y"]), st.sampled_from(["correct", "incorrect"]), st.floats(0.1, 10.0)),
        min_size=1,
        max_size=30,
    )
)
def test_best_so_far_is_the_running_minimum_of_each_search(rows: list[tuple[str, str, float]]):
    frame = pd.DataFrame(
        {
            "run_id": [run for run, _, _ in rows],
            "task": "t",
            "iteration": 1,
            "outcome": [outcome for _, outcome, _ in rows],
            "latency_ms": [latency for _, _, latency in rows],
            "baseline_latency_ms": 1.0,
            "percent_of_peak": np.nan,
            "simulated": False,
            "answered_from": "",
            "ended_at": pd.date_range(START, periods=len(rows), freq="s"),
        }
    )
    points = best_so_far(frame)
    for run_id, part in frame.groupby("run_id"):
        valid = part["latency_ms"].where(part["outcome"].eq("correct"))
        expected = valid.cummin().ffill()
        found = points[points["run_id"].eq(run_id)]["best_latency_ms"]
        assert np.array_equal(found.to_numpy(), expected.to_numpy(), equal_nan=True)


@settings(max_examples=30)
@given(st.lists(st.floats(0.5, 5.0), min_size=2, max_size=8))
def test_a_bootstrap_interval_holds_its_mean_and_stays_within_the_values(values: list[float]):
    low, high = bootstrap_interval(np.array(values), geometric=True, resamples=500)
    mean = float(np.exp(np.log(values).mean()))
    assert min(values) - 1e-9 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= max(values) + 1e-9


def test_one_seed_has_no_interval():
    assert all(np.isnan(bootstrap_interval(np.array([1.3]))))


def test_configurations_are_told_apart_by_what_differs(sweep: Trajectory):
    groups = configuration_groups(sweep)
    assert set(groups.values()) == {"preset=paper", "preset=published"}
    assert set(configuration_groups(sweep, "seed").values()) == {"seed=0", "seed=1", "seed=2"}
    with pytest.raises(UserError, match=r"did you mean search\.beam_width"):
        configuration_groups(sweep, "beam_width")


def test_a_comparison_is_of_geometric_means_over_seeds(sweep: Trajectory):
    table = compare(sweep, configuration_groups(sweep)).set_index("group")
    summary = sweep.summary()
    paper = summary[summary["run_id"].str.startswith("paper")]["speedup"]
    row = table.loc["preset=paper"]
    assert row["speedup"] == pytest.approx(np.exp(np.log(paper).mean()))
    assert row["replicates"] == 3
    assert paper.min() <= row["speedup_low"] <= row["speedup"] <= row["speedup_high"] <= paper.max()
    reached = compare(sweep, configuration_groups(sweep), reach=99.0).set_index("group")
    assert reached["reached"].eq(0.0).all()
    assert reached["evaluations_to_reach"].isna().all()


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("One step:\n\nStream wider tiles. Problem: narrow.", "Stream wider tiles"),
        ("## Plan:\n1. **Fuse the multiply.**\nMore", "Fuse the multiply"),
        (
            "Plan 0e84: tensor-scalar-reduce\n\nOne step:\n\nTake the row sum along. Problem: two.",
            "Take the row sum along",
        ),
        ("", ""),
    ],
)
def test_a_plans_title_is_its_first_telling_sentence(text: str, title: str):
    assert plan_title(text) == title


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("Hoist the load of gamma out of the loop over rows.", "hoist out of loop"),
        ("Keep the weights resident in SBUF.", "keep in SBUF"),
        ("Stream wider tiles.", "tile shape"),
        ("Do nothing in particular.", "other"),
    ],
)
def test_plans_are_sorted_by_their_words(text: str, category: str):
    assert plan_category(text) == category
