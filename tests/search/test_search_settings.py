"""Settings are checked before anything starts; presets differ in the search alone; streams have names."""

from __future__ import annotations

import pytest

from accelopt_ray.outcome import UserError
from accelopt_ray.search.presets import PRESETS, preset_settings
from accelopt_ray.search.settings import MemoryRule, SearchSettings, SelectionRule
from accelopt_ray.search.streams import stream, stream_seed


def test_the_defaults_are_the_published_sizes() -> None:
    for name in ("published", "paper", "beyond"):
        chosen = preset_settings(name)
        sizes = (chosen.iterations, chosen.beam_width, chosen.plans_per_candidate, chosen.attempts_per_plan)
        assert sizes == (16, 6, 12, 2)
        assert (chosen.positive_threshold, chosen.negative_threshold) == (1.04, 1.15)
        assert (chosen.experiences_per_iteration, chosen.memory_capacity) == (8, 16)


def test_presets_differ_as_they_say() -> None:
    published, paper, beyond = (preset_settings(name) for name in ("published", "paper", "beyond"))
    assert (published.selection_rule, published.memory_rule) == (SelectionRule.PUBLISHED, MemoryRule.PUBLISHED)
    assert (paper.selection_rule, paper.memory_rule) == (SelectionRule.PAPER, MemoryRule.PAPER)
    assert (published.deduplicate, paper.deduplicate, beyond.deduplicate) == (False, False, True)
    for chosen in (published, paper):
        assert not chosen.show_percent_of_peak
        assert not chosen.show_bottleneck
    assert not preset_settings("beam-only").use_memory
    assert preset_settings("reflexion").feedback_attempts > 0


def test_repeated_sampling_draws_as_many_kernels_as_the_method() -> None:
    method, sampling = preset_settings("published"), preset_settings("repeated-sampling")
    kernels = method.beam_width * method.plans_per_candidate * method.attempts_per_plan
    assert sampling.beam_width * sampling.plans_per_candidate * sampling.attempts_per_plan == kernels


def test_no_preset_touches_the_check_the_device_or_the_seed() -> None:
    for name, changes in PRESETS.items():
        assert not {"check", "device", "seed"} & set(changes), name
        assert preset_settings(name, check="strict").check == "strict"


def test_the_users_word_wins_over_the_preset() -> None:
    chosen = preset_settings("published", deduplicate=True, iterations=2)
    assert (chosen.preset, chosen.deduplicate, chosen.iterations) == ("published", True, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("iterations", 0),
        ("iterations", 2.5),
        ("beam_width", True),
        ("plans_per_candidate", -1),
        ("attempts_per_plan", "2"),
        ("positive_threshold", 0.9),
        ("negative_threshold", float("nan")),
        ("experiences_per_iteration", -1),
        ("memory_capacity", None),
        ("seed", -1),
        ("seed", 2**63),
        ("check", "loose"),
        ("selection_rule", "best"),
        ("memory_rule", "lifo"),
        ("target_percent_of_peak", 101.0),
        ("max_evaluations", 0),
        ("max_cost_usd", -1.0),
        ("fix_attempts", 11),
    ],
)
def test_a_value_out_of_range_is_one_line_that_names_the_field(field: str, value: object) -> None:
    with pytest.raises(UserError) as raised:
        preset_settings("paper", **{field: value})
    assert str(raised.value).startswith(field)
    assert "\n" not in str(raised.value)


def test_unknown_names_are_one_line() -> None:
    with pytest.raises(UserError, match="no preset 'best'"):
        preset_settings("best")
    with pytest.raises(UserError, match="no search setting 'beam'"):
        preset_settings("paper", beam=3)


def test_text_becomes_a_rule() -> None:
    assert SearchSettings(selection_rule="published").selection_rule is SelectionRule.PUBLISHED  # type: ignore[arg-type]


def test_streams_are_named() -> None:
    assert stream(1, "memory", 3).random() == stream(1, "memory", 3).random()
    seeds = {
        stream_seed(1, "memory", 3),
        stream_seed(2, "memory", 3),
        stream_seed(1, "memory", 4),
        stream_seed(1, "ab", "c"),
        stream_seed(1, "a", "bc"),
        stream_seed(1, "abc"),
        stream_seed(11, "abc"),
        stream_seed(1, "1abc"),
    }
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_streams_are_the_same_on_every_machine() -> None:
    assert stream_seed(0, "memory", "silu", 1) == 1160222668022613343
