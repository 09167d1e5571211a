"""From axes and variants to runs: every combination, each with a name that says what it is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelopt_ray.config import RunConfig, load_config
from accelopt_ray.outcome import UserError

MOST_RUNS = 100_000

_SPEAKS_FOR_ITSELF = frozenset({"task", "preset", "device", "check"})
"""Fields whose value alone is enough in a run's name."""

_UNSET_OUTPUT = "unset"


@dataclass(frozen=True)
class Variation:
    """One combination.

    Attributes:
        name: Of its run.
        changes: To the base configuration, nested like it.
        labels: Label of each value by field.
        repeat: Number of the repetition, from 0; added to the seed.
    """

    name: str
    changes: Mapping[str, Any]
    labels: tuple[tuple[str, str], ...]
    repeat: int


def combinations(
    grid: Mapping[str, Sequence[Any] | Mapping[str, Any]], variants: Mapping[str, Mapping[str, Any]], repeats: int
) -> list[Variation]:
    """Returns every variant with every combination of the grid, repeated.

    Args:
        grid: Values by field, or values by label by field.
        variants: Changes by name.
        repeats: Repetitions of each.

    Raises:
        UserError: Nothing is varied, an axis is empty, a value needs a label, or there are too many runs.
    """
    if not grid and not variants:
        raise UserError("neither grid nor variants say what to vary: name at least one")
    axes = [[(field, label, value) for label, value in _labelled(field, values)] for field, values in grid.items()]
    count = repeats * max(1, len(variants))
    for axis in axes:
        count *= len(axis)
    if count > MOST_RUNS:
        raise UserError(f"the grid has {count} runs, above {MOST_RUNS}: leave values out")
    found = []
    for variant, changes in variants.items() or [("", {})]:
        for point in itertools.product(*axes):
            nested: dict[str, Any] = dict(changes)
            for field, _, value in point:
                nested = overlaid(nested, _nested(field, value))
            for repeat in range(repeats):
                parts = [variant, *(_part(field, label) for field, label, _ in point)]
                parts += [f"r{repeat}"] if repeats > 1 else []
                labels = [("variant", variant)] if variant else []
                labels += [(field, label) for field, label, _ in point]
                labels += [("repeat", str(repeat))] if repeats > 1 else []
                found.append(Variation("-".join(filter(None, parts)), nested, tuple(labels), repeat))
    return found


def run_config(base: Mapping[str, Any], variation: Variation) -> RunConfig:
    """The configuration of one combination.

    Raises:
        UserError: A field is unknown or out of range; the message names the run.
    """
    try:
        config = load_config(None, variation.changes, {**base, "output": _UNSET_OUTPUT})
        if variation.repeat:
            config = config.model_copy(update={"seed": config.seed + variation.repeat})
        config.search_settings()
    except UserError as error:
        raise UserError(f"run {variation.name}: {error}") from None
    return config


def overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lays nested mappings over one another; what is no mapping replaces what is below."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = overlaid(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def _labelled(field: str, values: Sequence[Any] | Mapping[str, Any]) -> list[tuple[str, Any]]:
    if not values:
        raise UserError(f"grid.{field} has no values: give some, or leave it out")
    if isinstance(values, Mapping):
        return [(_clean(field, str(label)), value) for label, value in values.items()]
    for value in values:
        if not isinstance(value, (str, int, float)):
            raise UserError(f"grid.{field} has the value {value!r}, which is no plain word: give a mapping from labels")
    return [(_clean(field, _value_label(field, value)), value) for value in values]


def _value_label(field: str, value: object) -> str:
    """A task may be a path; its name is enough."""
    text = str(value)
    return Path(text.rpartition("#")[2]).name if field == "task" else text.lower() if isinstance(value, bool) else text


def _clean(field: str, label: str) -> str:
    clean = re.sub(r"[^A-Za-z0-9_.]+", "-", label).strip("-.")
    if not clean:
        raise UserError(f"grid.{field} has the label {label!r}: give one with letters or digits")
    return clean


def _part(field: str, label: str) -> str:
    last = field.rpartition(".")[2]
    return label if field in _SPEAKS_FOR_ITSELF or field.startswith("models") else f"{last}{label}"


def _nested(field: str, value: Any) -> dict[str, Any]:
    for part in reversed(field.split(".")):
        value = {part: value}
    result: dict[str, Any] = value
    return result
