"""The published method, its baselines and our own search, as named settings of one engine.

A preset fixes rules and sizes. It never fixes the correctness check, the device or the seed, so any two presets can be
compared on equal terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accelopt_ray.outcome import UserError
from accelopt_ray.search.settings import MemoryRule, SearchSettings, SelectionRule

DEFAULT_PRESET = "beyond"

_PUBLISHED: Mapping[str, object] = {
    "selection_rule": SelectionRule.PUBLISHED,
    "memory_rule": MemoryRule.PUBLISHED,
    "deduplicate": False,
    "plan_resamples": 0,
    "show_tried_plans": 0,
    "show_percent_of_peak": False,
    "show_bottleneck": False,
}
_PAPER: Mapping[str, object] = {
    **_PUBLISHED,
    "selection_rule": SelectionRule.PAPER,
    "memory_rule": MemoryRule.PAPER,
}

PRESETS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        # What the public code does: no elitism, uniform forgetting, every attempt evaluated.
        "published": _PUBLISHED,
        # What the text says: parents compete with their children, memory is a queue.
        "paper": _PAPER,
        # Ours: the paper's elitist rule, no device time spent on a kernel that has already been evaluated, and no
        # plan carried out twice from one kernel; lessons stay as long as plans that use them succeed; nobody waits for
        # a measurement that only confirms another.
        "beyond": {
            "selection_rule": SelectionRule.PAPER,
            "memory_rule": MemoryRule.WEIGHTED,
            "deduplicate": True,
            "plan_resamples": 2,
            "kernel_resamples": 1,
            "plan_while_remeasuring": True,
            "show_tried_plans": 40,
            "show_percent_of_peak": True,
            "show_bottleneck": True,
        },
        # The paper's ablation without experience memory.
        "beam-only": {**_PAPER, "use_memory": False},
        # The same number of samples an iteration, always from the baseline.
        "repeated-sampling": {
            **_PAPER,
            "selection_rule": SelectionRule.BASELINE,
            "use_memory": False,
            "beam_width": 1,
            "plans_per_candidate": 72,
        },
        # One candidate; its last attempts, with errors and profiles, are fed back instead of summarised lessons.
        "reflexion": {
            **_PAPER,
            "use_memory": False,
            "beam_width": 1,
            "plans_per_candidate": 1,
            "attempts_per_plan": 1,
            "iterations": 64,
            "feedback_attempts": 3,
        },
    }
)


def preset_settings(name: str = DEFAULT_PRESET, **overrides: object) -> SearchSettings:
    """Returns the settings of a preset with the user's own on top.

    Args:
        name: A key of :data:`PRESETS`.
        **overrides: Fields of :class:`~accelopt_ray.search.settings.SearchSettings`; they win over the preset.

    Raises:
        UserError: The preset or a field is unknown, or a value is out of range.
    """
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}: choose one of {', '.join(PRESETS)}")
    return SearchSettings().replace(preset=name, **{**PRESETS[name], **overrides})
