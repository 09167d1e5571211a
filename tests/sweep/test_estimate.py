"""What a sweep is expected to take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accelopt_ray.config import RunConfig, load_config
from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.demand import most_evaluations_at_once, run_demand
from accelopt_ray.sweep.estimate import estimate
from accelopt_ray.sweep.file import Sweep, load_sweep


def _config(preset: str = "paper", device: str = "sim-trn1", task: str = "silu", **search: Any) -> RunConfig:
    return load_config(None, {"task": task, "preset": preset, "device": device, "output": "x", "search": search})


def _sweep(tmp_path: Path, **content: Any) -> Sweep:
    path = tmp_path / "sweep.yaml"
    path.write_text(
        yaml.safe_dump({"name": "x", "base": {"task": "silu"}, "grid": {"seed": [0, 1, 2, 3]}, **content}), "utf-8"
    )
    return load_sweep(path)


def test_the_published_sizes_ask_for_the_published_numbers() -> None:
    demand = run_demand(_config(iterations=1))
    assert (demand.planner_calls, demand.executor_calls, demand.evaluations) == (12, 24, 25)
    two = run_demand(_config(iterations=2))
    assert (two.executor_calls - demand.executor_calls, two.evaluations_at_once) == (144, 144)
    assert run_demand(_config()).executor_calls == 24 + 15 * 144


def test_real_devices_measure_parents_again_and_simulators_do_not() -> None:
    assert run_demand(_config(device="neuron")).evaluations == run_demand(_config()).evaluations + 15 * 6


def test_without_memory_there_is_nothing_to_summarise() -> None:
    assert run_demand(_config("beam-only")).summarizer_calls == 0
    assert run_demand(_config(plans_per_candidate=2, iterations=1)).summarizer_calls == 2


def test_two_tasks_ask_for_twice_as_much() -> None:
    one, two = run_demand(_config()), run_demand(_config(task="silu,lora"))
    assert (two.calls, two.evaluations) == (2 * one.calls, 2 * one.evaluations)


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 200))
def test_a_budget_of_evaluations_bounds_the_demand(
    iterations: int, beam: int, plans: int, attempts: int, budget: int
) -> None:
    sizes = {
        "iterations": iterations, "beam_width": beam, "plans_per_candidate": plans, "attempts_per_plan": attempts
    }  # fmt: skip
    free, bounded = run_demand(_config(**sizes)), run_demand(_config(**sizes, max_evaluations=budget))
    assert bounded.evaluations == min(free.evaluations, budget)
    assert bounded.calls <= free.calls


def test_more_slots_never_take_longer_and_the_bottleneck_moves(tmp_path: Path) -> None:
    assume = {"call_s": 1.0, "evaluation_s": 100.0}
    hours = []
    for slots in (1, 8, 64, 4096):
        found = estimate(_sweep(tmp_path, slots=slots, assume=assume), 2)
        hours.append(found.hours)
        assert 0.0 < found.slot_utilisation <= 1.0
    assert hours == sorted(hours, reverse=True)
    assert estimate(_sweep(tmp_path, slots=1, assume=assume), 2).bottleneck == "profilers"
    assert estimate(_sweep(tmp_path, slots=4096, assume=assume), 2).bottleneck.startswith("the chain")


def test_dollars_are_tokens_times_prices_plus_node_hours(tmp_path: Path) -> None:
    endpoint = {"base_url": "http://host/v1", "model": "m", "price": {"prompt": 1.0, "completion": 10.0}}
    sweep = _sweep(
        tmp_path,
        base={"task": "silu", "preset": "beam-only", "models": {"default": endpoint}},
        assume={"prompt_tokens": 1000, "completion_tokens": 100, "evaluation_s": 3600, "call_s": 0.001},
        slots=1,
        fleet={"trn1.2xlarge": 2, "trn2.48xlarge": 1},
    )
    found = estimate(sweep, 1)
    assert found.model_usd == pytest.approx(found.demand.calls * (1000 * 1.0 + 100 * 10.0) / 1e6)
    assert found.hours == pytest.approx(found.demand.evaluations)
    assert found.fleet_usd == pytest.approx(found.hours * 2 * 1.34375)
    assert found.unpriced == ("trn2.48xlarge",)


def test_a_model_without_a_price_is_told(tmp_path: Path) -> None:
    endpoint = {"base_url": "http://host/v1", "model": "nobody-knows-it"}
    found = estimate(_sweep(tmp_path, base={"task": "silu", "models": {"default": endpoint}}), 2)
    assert found.unpriced == ("nobody-knows-it",)


def test_a_fleet_of_unknown_instances_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"trn9\.huge"):
        estimate(_sweep(tmp_path, fleet={"trn9.huge": 1}), 2)


def test_evaluations_at_once_are_those_of_concurrent_runs_within_the_slots(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path, concurrent_runs=3)
    assert most_evaluations_at_once(sweep, ["sim-trn1", "sim-trn2"]) == 3 * 144
    assert most_evaluations_at_once(sweep, ["neuron"]) == 0
    assert most_evaluations_at_once(_sweep(tmp_path, concurrent_runs=3, slots=10), ["sim-trn1"]) == 10


def test_the_command_shows_runs_and_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from accelopt_ray.cli import main

    _sweep(tmp_path, description="Which seed is best?", budget={"usd": 5})
    with pytest.raises(SystemExit) as done:
        main(["sweep", "plan", str(tmp_path / "sweep.yaml")])
    output = capsys.readouterr().out
    assert done.value.code == 0
    assert "4 runs, 4 at once" in output
    assert "Which seed is best?" in output
    assert "budget      usd 5" in output
