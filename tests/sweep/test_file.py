"""Sweep files: what they expand to, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.expansion import combinations, overlaid
from accelopt_ray.sweep.file import Sweep, load_sweep
from nkibench.task import list_tasks

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").glob("*.yaml"))
ABLATIONS = {
    "repeated-sampling", "beam-only", "beam-and-memory", "memory-sizes", "planner-swap", "executor-swap",
    "executor-ensemble", "reflexion", "beam-sizes", "cost-benefit", "fast-at-p", "traffic-efficiency",
}  # fmt: skip


def _load(tmp_path: Path, content: dict[str, Any], scale: str | None = None) -> Sweep:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return load_sweep(path, scale)


def test_every_combination_is_one_run_with_a_telling_name(tmp_path: Path) -> None:
    sweep = _load(
        tmp_path,
        {
            "name": "x",
            "base": {"task": "silu", "search": {"iterations": 2}},
            "grid": {"preset": ["paper", "beyond"], "search.beam_width": [1, 6]},
            "repeats": 2,
        },
    )
    assert [run.name for run in sweep.runs][:3] == [
        "paper-beam_width1-r0", "paper-beam_width1-r1", "paper-beam_width6-r0"
    ]  # fmt: skip
    assert len({run.name for run in sweep.runs}) == len(sweep.runs) == 8
    last = sweep.runs[-1]
    assert (last.config.preset, last.config.search["beam_width"], last.config.seed) == ("beyond", 6, 1)
    assert last.config.search["iterations"] == 2
    assert dict(last.labels) == {"preset": "beyond", "search.beam_width": "6", "repeat": "1"}


def test_variants_go_with_the_whole_grid(tmp_path: Path) -> None:
    sweep = _load(
        tmp_path,
        {
            "name": "x",
            "variants": {"small": {"task": "silu", "shape": {"M": 256}}, "other": {"task": "lora"}},
            "grid": {"seed": [3, 4]},
        },
    )
    assert [run.name for run in sweep.runs] == ["small-seed3", "small-seed4", "other-seed3", "other-seed4"]
    assert sweep.runs[0].config.shape == {"M": 256}
    assert sweep.runs[2].config.shape == {}


def test_a_scale_lies_on_top_of_the_file(tmp_path: Path) -> None:
    content = {
        "name": "x",
        "base": {"task": "silu", "search": {"iterations": 5}},
        "grid": {"seed": [0, 1, 2]},
        "scales": {
            "small": {"base": {"search": {"beam_width": 1}}, "grid": {"seed": [7]}},
            "full": {"base": {"device": "neuron"}, "slots": 320},
        },
    }
    small, full = _load(tmp_path, content), _load(tmp_path, content, "full")
    assert (small.scale, len(small.runs), small.slots) == ("small", 1, None)
    assert (small.runs[0].config.search["iterations"], small.runs[0].config.search["beam_width"]) == (5, 1)
    assert (full.scale, len(full.runs), full.slots, full.runs[0].config.device) == ("full", 3, 320, "neuron")
    assert small.sha256() != full.sha256()


def test_models_of_a_role_are_varied_by_label(tmp_path: Path) -> None:
    endpoint = {"base_url": "http://host:8000/v1", "model": "a"}
    content = {
        "name": "x",
        "base": {"task": "silu", "models": {"default": endpoint}},
        "grid": {"models.executor": {"model-a": endpoint, "model-b": {**endpoint, "model": "b"}}},
    }
    sweep = _load(tmp_path, content)
    assert [run.name for run in sweep.runs] == ["model-a", "model-b"]
    assert sweep.runs[1].config.endpoints("executor")[0].model == "b"
    assert sweep.runs[1].config.endpoints("planner")[0].model == "a"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"gird": {"seed": [0]}}, "there is no field gird: did you mean grid?"),
        ({"budget": {"dollars": 3}}, "there is no field budget.dollars"),
        ({"grid": {"seed": []}}, "grid.seed has no values"),
        ({"grid": {}}, "neither grid nor variants"),
        ({"grid": {"seed": [1, 1]}}, "two runs are called 'seed1'"),
        ({"grid": {"search.beam_widht": [1]}}, "did you mean beam_width?"),
        ({"grid": {"search.beam_width": [0]}}, "run beam_width0: beam_width"),
        ({"grid": {"preset": ["papre"]}}, "there is no preset 'papre'"),
        ({"grid": {"models": [{"default": {}}]}}, "give a mapping from labels"),
        ({"repeats": 0}, "repeats is 0"),
        ({"name": "No Name"}, "name is 'No Name'"),
        ({"name": None}, "name is None"),
        ({"base": {"task": "silu", "output": "here"}}, "base.output cannot be given"),
        ({"base": {}}, "task is missing"),
        ({"grid": {"seed": list(range(500)), "search.iterations": list(range(1, 500))}}, "249500 runs"),
        ({"fleet": {"trn1.32xlarge": -1}}, "cannot be"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    good = {"name": "x", "base": {"task": "silu"}, "grid": {"seed": [0, 1]}}
    assert len(_load(tmp_path, good).runs) == 2
    with pytest.raises(UserError) as caught:
        _load(tmp_path, {**good, **change})
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1", "- 1", ""])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        load_sweep(path)
    with pytest.raises(UserError, match="cannot read"):
        load_sweep(tmp_path / "missing.yaml")


def test_a_scale_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    content = {"name": "x", "base": {"task": "silu"}, "grid": {"seed": [0]}, "scales": {"a": {}, "b": {}}}
    with pytest.raises(UserError, match="scales are a, b"):
        _load(tmp_path, content, "c")
    with pytest.raises(UserError, match="name one with --scale"):
        _load(tmp_path, content)


@given(
    st.dictionaries(
        st.sampled_from(["seed", "search.iterations", "preset"]), st.lists(st.integers(1, 99), min_size=1, unique=True)
    ),
    st.lists(st.sampled_from(["a", "b", "c"]), unique=True),
    st.integers(1, 3),
)
def test_the_number_of_runs_is_the_product_and_names_are_unique(
    grid: dict[str, list[int]], variants: list[str], repeats: int
) -> None:
    if not grid and not variants:
        return
    found = combinations(grid, {name: {} for name in variants}, repeats)
    expected = max(1, len(variants)) * repeats
    for values in grid.values():
        expected *= len(values)
    assert len(found) == expected
    assert len({each.name for each in found}) == expected


_NESTED = st.recursive(
    st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=8
)
_MAPPINGS = st.dictionaries(st.sampled_from("abc"), _NESTED, max_size=3)


@given(_MAPPINGS, _MAPPINGS)
def test_overlaying_twice_changes_nothing_more(base: dict[str, Any], over: dict[str, Any]) -> None:
    once = overlaid(base, over)
    assert overlaid(once, over) == once
    assert overlaid(base, {}) == base
    assert set(once) == set(base) | set(over)


def test_every_ablation_has_its_file() -> None:
    assert {path.stem for path in EXPERIMENTS} >= ABLATIONS


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_runs_small_offline_and_full_on_named_models_and_devices(path: Path) -> None:
    small, full = load_sweep(path, "small"), load_sweep(path, "full")
    assert small.name == path.stem
    assert all(run.config.device.startswith("sim-") and not run.config.models for run in small.runs)
    assert sum(run.config.search_settings().iterations for run in small.runs) <= 100
    assert all(run.config.device == "neuron" and run.config.models for run in full.runs)
    assert full.budget.usd
    assert full.fleet
    assert {run.config.task for run in (*small.runs, *full.runs)} <= set(list_tasks())
    for run in small.runs:
        run.config.load_tasks()
