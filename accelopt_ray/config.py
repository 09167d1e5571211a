"""A run's configuration: built-in defaults, then a YAML file, then the command line; checked before anything starts."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator

from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.agents.prices import PriceTable, load_prices
from accelopt_ray.agents.rendering import PromptLibrary
from accelopt_ray.devices.protocol import Limits
from accelopt_ray.model_config import Endpoint, Hosted, PriceList, Section, TokenPrices, filled
from accelopt_ray.outcome import UserError
from accelopt_ray.search.presets import DEFAULT_PRESET, preset_settings
from accelopt_ray.search.settings import SearchSettings
from accelopt_ray.serving.model import HostedModel
from nkibench.task import Task, load_task

ROLES = ("planner", "executor", "summarizer", "fixer")
"""Who asks a model; each may have an endpoint of its own."""

_TOP_LEVEL_SEARCH_FIELDS = frozenset({"preset", "seed", "device", "check"})
"""Search settings that stand at the configuration's top level, since they matter to more than the search."""


class EvaluationLimits(Section):
    """What one stage of one evaluation may use.

    Attributes:
        timeout_s: Wall-clock seconds.
        memory_gib: Memory in GiB.
        output_kib: Text that the kernel may print, in KiB.
    """

    timeout_s: float = Field(default=120.0, gt=0.0, le=86_400.0)
    memory_gib: float = Field(default=8.0, gt=0.0, le=4096.0)
    output_kib: int = Field(default=1024, ge=1)

    def limits(self) -> Limits:
        """The same in the device protocol's terms."""
        return Limits(
            timeout_s=self.timeout_s, memory_bytes=int(self.memory_gib * 2**30), output_bytes=self.output_kib * 1024
        )


class RunConfig(Section):
    """Everything that a run depends on.

    Attributes:
        task: A built-in task's name, a task folder, or ``PATH#task`` in the published layout; several of these with
            commas between them are searched at once.
        shape: Shape parameters that replace the tasks' own; ``TASK.NAME`` means one of several tasks.
        device: Device that evaluates.
        check: Correctness check.
        preset: Search preset that :attr:`search` starts from.
        seed: Root of every random stream.
        output: The run's folder.
        search: Every setting of the search, by its name in :class:`~accelopt_ray.search.settings.SearchSettings`.
        models: Endpoints of each role, which share its calls by their weights; ``default`` stands for the roles that
            are not named. Without any, the offline rewriter is the model.
        hosted: Models that the run brings up for itself, by name. Those that an endpoint names and that are not here
            are presets.
        hosting: How they run: ``serve`` on Ray Serve, scaling with the requests, or ``process`` as ``vllm serve``.
        prices: Price table instead of the package's; a resolved configuration holds the table it used.
        prompts: Folder whose files replace the package's prompts of the same name.
        prompt_generation: Which of the package's sets of prompts is used: one for each generation of the toolchain.
        memory_from: Folder of a run whose last lessons this one starts with. A relative path starts where the folder of
            this run lies, so that in a sweep another run's name is enough.
        replay: Folder of a run whose recorded replies answer every call, in place of any model.
        evaluation: Limits of each evaluation.
        slots: Evaluations at once; None for one for each CPU (simulator) or NeuronCore (device ``neuron``).
        compile_slots: Workers that compile ahead on CPUs of their own, so that a slot only runs; for devices that need
            no core to compile, which are the simulated ones.
        allocate: How several tasks share budgets: ``even`` gives each the same part, ``adaptive`` moves the budget of
            money, or without one that of evaluations, to where it promises most.
    """

    task: str
    shape: dict[str, int] = Field(default_factory=dict)
    device: str = "sim-trn1"
    check: str = "strict"
    preset: str = DEFAULT_PRESET
    seed: int = 0
    output: Path
    search: dict[str, Any] = Field(default_factory=dict)
    models: dict[str, list[Endpoint]] = Field(default_factory=dict)
    hosted: dict[str, Hosted] = Field(default_factory=dict)
    hosting: Literal["serve", "process"] = "serve"
    prices: PriceList | None = None
    prompts: Path | None = None
    prompt_generation: str = "generation_a"
    memory_from: Path | None = None
    replay: Path | None = None
    evaluation: EvaluationLimits = Field(default_factory=EvaluationLimits)
    slots: int | None = Field(default=None, ge=1)
    compile_slots: int = Field(default=0, ge=0)
    allocate: Literal["even", "adaptive"] = "even"

    @field_validator("models", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, models: object) -> object:
        if not isinstance(models, Mapping):
            return models
        return {role: [value] if isinstance(value, Mapping) else value for role, value in models.items()}

    @field_validator("prices", mode="before")
    @classmethod
    def _a_path_is_read(cls, prices: object) -> object:
        return PriceList.read(Path(prices)) if isinstance(prices, (str, Path)) else prices

    @field_validator("models")
    @classmethod
    def _roles_exist(cls, models: dict[str, list[Endpoint]]) -> dict[str, list[Endpoint]]:
        for role, endpoints in models.items():
            if role not in (*ROLES, "default"):
                raise ValueError(f"there is no role {role!r}: name {', '.join(ROLES)} or default")
            if not endpoints:
                raise ValueError(f"{role} has no endpoint: give one, or leave the role out")
        if models and "default" not in models:
            missing = [role for role in ("planner", "executor", "summarizer") if role not in models]
            if missing:
                raise ValueError(f"no endpoint for {', '.join(missing)}: name one or give models.default")
        return models

    @property
    def tasks(self) -> list[str]:
        """Where each task is found; a folder may have commas in its name."""
        if Path(self.task.partition("#")[0]).exists():
            return [self.task]
        return [part.strip() for part in self.task.split(",") if part.strip()]

    def shape_of(self, task_name: str) -> dict[str, int]:
        """Shape parameters that replace one task's own; those given for this task win over those for all."""
        general = {name: value for name, value in self.shape.items() if "." not in name}
        prefix = f"{task_name}."
        own = {key.removeprefix(prefix): value for key, value in self.shape.items() if key.startswith(prefix)}
        return {**general, **own}

    def load_tasks(self) -> list[Task]:
        """Loads the tasks at the run's shapes.

        Raises:
            TaskError: One of them does not exist or is defective, or has no such shape parameter.
            UserError: Two have one name, or a shape parameter names a task that is not among them.
        """
        tasks = [load_task(location) for location in self.tasks]
        names = [task.name for task in tasks]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"two tasks are called {name!r}: name each task once")
        for key in self.shape:
            if "." in key and key.partition(".")[0] not in names:
                raise UserError(f"shape {key!r} names no task of the run: they are {', '.join(names)}")
        return [load_task(location, self.shape_of(name)) for location, name in zip(self.tasks, names, strict=True)]

    def settings_of_each(self, count: int) -> SearchSettings:
        """The settings of each of ``count`` searches that share the run's budgets; time passes for all at once."""
        settings = self.search_settings()
        if count <= 1:
            return settings
        evaluations, cost = settings.max_evaluations, settings.max_cost_usd
        # The budget that moves is shared out round by round, not here.
        adaptive = self.allocate == "adaptive"
        share = None if evaluations is None or (adaptive and cost is None) else max(1, evaluations // count)
        tokens, device_s = settings.max_total_tokens, settings.max_device_s
        return settings.replace(
            max_evaluations=share,
            max_cost_usd=None if cost is None or adaptive else cost / count,
            max_total_tokens=None if tokens is None else max(1, tokens // count),
            max_device_s=None if device_s is None else device_s / count,
        )

    def search_settings(self) -> SearchSettings:
        """The search's settings.

        Raises:
            UserError: A setting is unknown or out of range.
        """
        known = {field.name for field in dataclasses.fields(SearchSettings)} - _TOP_LEVEL_SEARCH_FIELDS
        for name in self.search:
            if name not in known:
                raise UserError(_unknown_field(f"search.{name}", name, known))
        return preset_settings(self.preset, **self.search, seed=self.seed, device=self.device, check=self.check)

    def endpoints(self, role: str) -> list[Endpoint]:
        """Who answers a role; nobody means the offline rewriter. The fixer is the executor unless named."""
        for name in (role, "executor") if role == "fixer" else (role,):
            if name in self.models:
                return self.models[name]
        return self.models.get("default", [])

    def model_endpoints(self, hosted_urls: Mapping[str, Sequence[str]]) -> dict[str, list[ModelEndpoint]]:
        """The endpoints of each role in the model client's terms, given where the hosted models answer."""
        return {
            role: [each.model_endpoint(hosted_urls.get(each.hosted or "", ())) for each in self.endpoints(role)]
            for role in ROLES
        }

    def hosted_models(self) -> list[HostedModel]:
        """The models to bring up: those that some endpoint names.

        Raises:
            UserError: One has neither preset nor source.
        """
        used = {each.hosted for role in ROLES for each in self.endpoints(role) if each.hosted is not None}
        return [self.hosted.get(name, Hosted()).model(name) for name in sorted(used)]

    def prompt_library(self) -> PromptLibrary:
        """The run's prompts.

        Raises:
            UserError: A folder does not exist or a file does not parse.
        """
        return PromptLibrary(self.prompts, self.prompt_generation)

    def price_table(self) -> PriceTable:
        """What tokens cost in this run."""
        return self.prices.table() if self.prices is not None else load_prices()

    def resolved(self) -> RunConfig:
        """The same with everything spelled out that has a default, so that a later change of one changes nothing."""
        settings = dataclasses.asdict(self.search_settings())
        search = {name: value for name, value in settings.items() if name not in _TOP_LEVEL_SEARCH_FIELDS}
        search = {name: str(value) if isinstance(value, str) else value for name, value in search.items()}
        models = filled(self.models, self.hosted)
        prices = self.prices or PriceList.of(load_prices())
        return self.model_copy(update={"search": search, "models": models, "prices": prices})

    def to_json(self) -> str:
        """One line of JSON, keys sorted: what is hashed and stored with the run."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    def sha256(self) -> str:
        """Hash of everything but the folders written and replayed: equal for two runs of the same search."""
        content = self.model_dump(mode="json", exclude={"output", "replay"})
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_yaml(self) -> str:
        """The file that ``--config`` reads."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_config(
    path: Path | None, overrides: Mapping[str, object], defaults: Mapping[str, object] | None = None
) -> RunConfig:
    """Builds a run's configuration.

    Args:
        path: A YAML file, or None.
        overrides: What the command line says, nested like the file; None values are left out.
        defaults: What holds where neither says anything, besides the built-in defaults.

    Returns:
        The resolved configuration.

    Raises:
        UserError: The file cannot be read, or a field is unknown, missing or out of range; the message names it.
    """
    file = _read_yaml(path) if path is not None else {}
    values = _merged(_merged(defaults or {}, file), overrides)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(_first_problem(error, path)) from None
    return config.resolved()


def _read_yaml(path: Path) -> dict[str, object]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the configuration {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a mapping of fields to values, not a {type(content).__name__}")
    return content


def _merged(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Overlays nested mappings; a None on top leaves what is below."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, Mapping):
            result[key] = _merged(below if isinstance(below, Mapping) else {}, value)
        elif value is not None:
            result[key] = value
    return result


def _first_problem(error: ValidationError, path: Path | None) -> str:
    """One sentence for the first of a validation's complaints."""
    problems = error.errors(include_url=False)
    # A misspelt field often makes another one missing; the misspelling is the cause.
    problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    field = ".".join(str(part) for part in problem["loc"])
    place = f"{path}: " if path is not None else ""
    if problem["type"] == "extra_forbidden":
        section = _section(problem["loc"][:-1])
        return place + _unknown_field(field, str(problem["loc"][-1]), set(section.model_fields))
    if problem["type"] == "missing":
        return f"{place}{field} is missing: give it a value"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{place}{field} is {problem['input']!r}: {message[0].lower()}{message[1:]}"


def _section(location: Sequence[object]) -> type[BaseModel]:
    """The part of the configuration at a location, whose fields a mistaken one may have meant."""
    if not location:
        return RunConfig
    if location[0] == "evaluation":
        return EvaluationLimits
    if location[0] == "prices":
        return TokenPrices if "models" in location else PriceList
    if location[0] == "hosted":
        return Hosted
    return TokenPrices if "price" in location else Endpoint


def _unknown_field(field: str, name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(sorted(known))}"
    return f"there is no field {field}: {hint}"
