"""How a sweep's budget is shared: no run's part is another's, and nothing is left over in vain."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.budget import SweepBudget, bounded
from accelopt_ray.sweep.file import Budget, Sweep, load_sweep
from accelopt_ray.sweep.folder import Grant, RunState, RunStatus, TaskOutcome

PRICED = {"base_url": "http://host/v1", "model": "m", "price": {"prompt": 1.0, "completion": 1.0}}


def _sweep(folder: Path, **content: Any) -> Sweep:
    path = folder / "sweep.yaml"
    base = {"task": "silu", "models": {"default": PRICED}}
    grid = {"search.beam_width": [1, 2, 8]}
    path.write_text(yaml.safe_dump({"name": "x", "base": base, "grid": grid, **content}), "utf-8")
    return load_sweep(path)


@functools.cache
def _unbounded() -> Sweep:
    with tempfile.TemporaryDirectory() as name:
        return _sweep(Path(name))


def _used(name: str, usd: float, evaluations: int, grant: Grant) -> RunState:
    outcome = TaskOutcome("silu", "completed", "", 1.0, 1.0, True, evaluations, 9, usd, 100)
    return RunState(name, name, RunStatus.FINISHED, outcomes=(outcome,), grant=grant)


@given(
    st.floats(0.01, 1e6),
    st.integers(3, 10**7),
    st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
    st.integers(1, 3),
)
def test_no_more_is_granted_than_is_there_and_what_is_left_goes_on(
    usd: float, evaluations: int, shares_used: list[float], at_once: int
) -> None:
    sweep = dataclasses.replace(_unbounded(), budget=Budget(usd=usd, evaluations=evaluations))
    budget, states = SweepBudget(sweep), dict[str, RunState | None]()
    going_on: list[str] = []
    used_usd, used_evaluations = 0.0, 0

    def end_first() -> None:
        nonlocal used_usd, used_evaluations
        ended = going_on.pop(0)
        state = states[ended]
        assert state is not None and state.grant.usd is not None and state.grant.evaluations is not None
        share = shares_used.pop()
        took_usd, took = state.grant.usd * share, max(1, int(state.grant.evaluations * share))
        used_usd, used_evaluations = used_usd + took_usd, used_evaluations + took
        states[ended] = _used(ended, took_usd, took, state.grant)

    for run in sweep.runs:
        if len(going_on) == at_once:
            end_first()
        granted = budget.grant(run.name, states)
        states[run.name] = RunState(run.name, run.name, RunStatus.RUNNING, grant=granted)
        going_on.append(run.name)
    grants = [state.grant for name in going_on if (state := states[name]) is not None]
    # The last run has begun: what is not used is granted to those that go on, to the last evaluation but rounding.
    granted_usd = sum(each.usd or 0.0 for each in grants)
    granted_evaluations = sum(each.evaluations or 0 for each in grants)
    assert used_usd + granted_usd <= usd * (1 + 1e-9)
    assert used_evaluations + granted_evaluations <= evaluations
    if at_once == 1:
        assert used_usd + granted_usd == pytest.approx(usd)
        assert used_evaluations + granted_evaluations == evaluations


def test_parts_are_in_proportion_to_what_runs_are_expected_to_take(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path, budget={"usd": 10.0})
    budget, states = SweepBudget(sweep), dict[str, RunState | None]()
    for run in sweep.runs:
        states[run.name] = RunState(run.name, "", RunStatus.RUNNING, grant=budget.grant(run.name, states))
    parts = [state.grant.usd or 0.0 for state in states.values() if state]
    assert sum(parts) == pytest.approx(10.0)
    assert parts == sorted(parts) and parts[0] < parts[2] / 4


def test_a_run_that_is_taken_up_again_gets_no_less_and_more_of_a_raised_budget(tmp_path: Path) -> None:
    sweep = _sweep(tmp_path, budget={"usd": 10.0, "evaluations": 100})
    first = sweep.runs[0].name
    granted = SweepBudget(sweep).grant(first, {})
    stopped: dict[str, RunState | None] = {first: RunState(first, "", RunStatus.STOPPED, grant=granted)}
    assert SweepBudget(sweep).grant(first, stopped) == granted
    raised = SweepBudget(_sweep(tmp_path, budget={"usd": 20.0, "evaluations": 100})).grant(first, stopped)
    assert raised == Grant(pytest.approx(2 * (granted.usd or 0.0)), granted.evaluations)
    lowered = SweepBudget(_sweep(tmp_path, budget={"usd": 1.0, "evaluations": 100})).grant(first, stopped)
    assert lowered == granted


def test_a_budget_below_one_evaluation_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="less than one for each of the 3 runs"):
        SweepBudget(_sweep(tmp_path, budget={"evaluations": 2}))


def test_a_lower_bound_of_ones_own_stays_and_the_identity_does_not_depend_on_the_budget(tmp_path: Path) -> None:
    base = {"task": "silu", "search": {"max_evaluations": 3}}
    sweep = _sweep(tmp_path, base=base, budget={"evaluations": 4000, "usd": 9})
    run = sweep.runs[0]
    bounds = bounded(run.config, SweepBudget(sweep).grant(run.name, {})).search_settings()
    assert (bounds.max_evaluations, bounds.max_cost_usd) == (3, 3.0)
    assert sweep.sha256() == _sweep(tmp_path, base=base).sha256()
    unbounded = _sweep(tmp_path)
    run = unbounded.runs[0]
    assert bounded(run.config, SweepBudget(unbounded).grant(run.name, {})) == run.config
