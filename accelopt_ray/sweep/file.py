"""The sweep file: what to vary, at which scale, on what, and how much it may cost."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from accelopt_ray.config import RunConfig
from accelopt_ray.outcome import UserError
from accelopt_ray.sweep.expansion import Variation, combinations, overlaid, run_config

_NAME = r"^[a-z0-9][a-z0-9-]{0,63}$"
DEFAULT_SCALE = "small"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Budget(_Section):
    """What all runs together may use; nothing is bounded unless named.

    Attributes:
        usd: US dollars for model calls.
        evaluations: Evaluations.
        hours: Wall-clock hours; then no run starts and those that go on are stopped, to be resumed another time.
    """

    usd: float | None = Field(default=None, gt=0.0)
    evaluations: int | None = Field(default=None, ge=1)
    hours: float | None = Field(default=None, gt=0.0)


class Assumptions(_Section):
    """What the plan takes for granted where only a run could tell.

    Attributes:
        call_s: Seconds of one model call.
        evaluation_s: Seconds that one evaluation holds its core or slot.
        prompt_tokens: Tokens of one prompt.
        completion_tokens: Tokens of one reply, reasoning included.
        calls_in_flight: Model calls that the endpoints answer at once.
    """

    call_s: float | None = Field(default=None, gt=0.0)
    evaluation_s: float | None = Field(default=None, gt=0.0)
    prompt_tokens: int = Field(default=8000, ge=0)
    completion_tokens: int = Field(default=2900, ge=0)
    calls_in_flight: int = Field(default=256, ge=1)


class Scale(_Section):
    """One size at which a sweep can be run; what it leaves out is as the file has it.

    Attributes:
        base: Configuration on top of the file's own base.
        grid: Axes that replace the file's of the same name or come on top.
        variants: Variations that replace the file's, all of them.
        repeats: How often each combination is run, each time with the next seed.
        slots: Evaluations at once, of all runs together; None for one for each CPU or NeuronCore that is there, or for
            as many as the runs can use where none is.
        keep_slots_s: Seconds that nothing needs a slot before it is given back, so that its node can go.
        concurrent_runs: Runs that share the slots at any time.
        budget: For all runs together.
        fleet: Number of nodes by EC2 instance type, for the plan's dollars.
        assume: For the plan.
    """

    base: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any] | dict[str, Any]] = Field(default_factory=dict)
    variants: dict[str, dict[str, Any]] | None = None
    repeats: int | None = Field(default=None, ge=1, le=1000)
    slots: int | None = Field(default=None, ge=1, le=100_000)
    keep_slots_s: float | None = Field(default=None, ge=1.0)
    concurrent_runs: int | None = Field(default=None, ge=1, le=1000)
    budget: Budget | None = None
    fleet: dict[str, int] | None = None
    assume: Assumptions | None = None


class SweepFile(_Section):
    """The file as written.

    Attributes:
        name: Names the sweep.
        description: The question that it answers.
        base: What all runs have in common: a run's configuration without ``output``.
        grid: Fields of the configuration, nested ones with dots, each with the list of its values, or with its values
            by label where a value is no plain word. Every combination is run.
        variants: Named changes to the base that go together; each is combined with the whole grid.
        scales: Sizes by name; ``small`` is taken unless another is asked for.
    """

    name: str = Field(pattern=_NAME)
    description: str = ""
    base: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, list[Any] | dict[str, Any]] = Field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    repeats: int = Field(default=1, ge=1, le=1000)
    slots: int | None = Field(default=None, ge=1, le=100_000)
    keep_slots_s: float = Field(default=300.0, ge=1.0)
    concurrent_runs: int = Field(default=4, ge=1, le=1000)
    budget: Budget = Field(default_factory=Budget)
    fleet: dict[str, int] = Field(default_factory=dict)
    assume: Assumptions = Field(default_factory=Assumptions)
    scales: dict[str, Scale] = Field(default_factory=dict)

    @field_validator("fleet")
    @classmethod
    def _whole_nodes(cls, fleet: dict[str, int]) -> dict[str, int]:
        for instance, count in fleet.items():
            if count < 0:
                raise ValueError(f"{count} nodes of {instance} cannot be: give 0 or more")
        return fleet


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        name: Unique in the sweep; the name of its folder.
        config: Its configuration; ``output`` is left to whoever starts it.
        labels: Value, or its label, by field of the grid, besides ``variant`` and ``repeat``.
    """

    name: str
    config: RunConfig
    labels: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Sweep:
    """A sweep at one scale, expanded.

    Attributes:
        name: Names it.
        scale: Name of the scale; empty where the file has none.
        description: The question that it answers.
        runs: In the order of their start.
        slots, keep_slots_s, concurrent_runs, budget, fleet, assume: As in :class:`Scale`.
    """

    name: str
    scale: str
    description: str
    runs: tuple[SweepRun, ...]
    slots: int | None
    keep_slots_s: float
    concurrent_runs: int
    budget: Budget
    fleet: dict[str, int]
    assume: Assumptions

    def sha256(self) -> str:
        """Hash of name, scale and runs: equal for the same work, whatever it runs on."""
        runs = {run.name: run.config.sha256() for run in self.runs}
        return hashlib.sha256(json.dumps([self.name, self.scale, runs], sort_keys=True).encode()).hexdigest()


def load_sweep(path: Path, scale: str | None = None) -> Sweep:
    """Reads a sweep file and expands it.

    Args:
        path: The file.
        scale: One of its scales; ``small``, or the only one, unless named.

    Raises:
        UserError: The file cannot be read, a field is unknown or impossible, the grid is empty, two runs have one
            name, or a run's configuration is wrong; the message names what.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the sweep file {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a mapping of fields to values, not a {type(content).__name__}")
    try:
        file = SweepFile.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: {_first_problem(error)}") from None
    name = _scale_name(path, file, scale)
    return _expanded(path, file, name, file.scales[name] if name else Scale())


def _scale_name(path: Path, file: SweepFile, asked: str | None) -> str:
    if asked is not None and asked not in file.scales:
        known = ", ".join(file.scales) or "none"
        raise UserError(f"{path} has no scale {asked!r}: its scales are {known}")
    if asked is not None or not file.scales:
        return asked or ""
    if DEFAULT_SCALE in file.scales:
        return DEFAULT_SCALE
    if len(file.scales) == 1:
        return next(iter(file.scales))
    raise UserError(f"{path} has the scales {', '.join(file.scales)}: name one with --scale")


def _expanded(path: Path, file: SweepFile, name: str, scale: Scale) -> Sweep:
    base = overlaid(file.base, scale.base)
    if "output" in base:
        raise UserError(f"{path}: base.output cannot be given: each run has its folder in the sweep's --output")
    variants = file.variants if scale.variants is None else scale.variants
    repeats = file.repeats if scale.repeats is None else scale.repeats
    try:
        variations = combinations({**file.grid, **scale.grid}, variants, repeats)
        runs = tuple(_run(base, variation) for variation in variations)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    names = [run.name for run in runs]
    for each in names:
        if names.count(each) > 1:
            raise UserError(f"{path}: two runs are called {each!r}: give the values of the grid distinct labels")
    return Sweep(
        name=file.name,
        scale=name,
        description=file.description,
        runs=runs,
        slots=file.slots if scale.slots is None else scale.slots,
        keep_slots_s=file.keep_slots_s if scale.keep_slots_s is None else scale.keep_slots_s,
        concurrent_runs=file.concurrent_runs if scale.concurrent_runs is None else scale.concurrent_runs,
        budget=file.budget if scale.budget is None else scale.budget,
        fleet=file.fleet if scale.fleet is None else scale.fleet,
        assume=file.assume if scale.assume is None else scale.assume,
    )


def _run(base: dict[str, Any], variation: Variation) -> SweepRun:
    return SweepRun(variation.name, run_config(base, variation), variation.labels)


def _first_problem(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = set(_section(problem["loc"][:-1]).model_fields)
        close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(sorted(known))}"
        return f"there is no field {field}: {hint}"
    if problem["type"] == "missing":
        return f"{field} is missing: give it a value"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{field} is {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _section(location: Sequence[object]) -> type[BaseModel]:
    sections: dict[object, type[BaseModel]] = {"budget": Budget, "assume": Assumptions}
    if not location:
        return SweepFile
    return sections.get(location[-1], Scale if location[0] == "scales" else SweepFile)
