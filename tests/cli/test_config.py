"""Defaults give way to the file, the file to the command line, and a mistake is one line that names the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.agents.prices import Price
from accelopt_ray.config import RunConfig, load_config
from accelopt_ray.outcome import UserError
from accelopt_ray.search.settings import SearchSettings

MINIMAL = {"task": "silu", "output": "out"}


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_the_command_line_wins_over_the_file_and_the_file_over_the_preset(tmp_path: Path):
    path = write(tmp_path, "task: silu\npreset: beam-only\nsearch: {beam_width: 3, iterations: 5}\nseed: 7\n")
    config = load_config(path, {"output": "out", "search": {"iterations": 2, "beam_width": None}, "seed": None})
    settings = config.search_settings()
    assert (settings.beam_width, settings.iterations, settings.seed) == (3, 2, 7)
    assert settings.use_memory is False
    assert settings.plans_per_candidate == SearchSettings().plans_per_candidate


def test_a_saved_configuration_loads_as_itself(tmp_path: Path):
    config = load_config(
        None,
        {
            **MINIMAL,
            "shape": {"M": 256},
            "models": {"default": {"base_url": "http://h/v1", "model": "m"}, "executor": None},
            "evaluation": {"timeout_s": 5},
        },
    )
    again = load_config(write(tmp_path, config.to_yaml()), {})
    assert again == config
    assert again.sha256() == config.sha256()


def test_the_hash_ignores_where_the_run_is_written_and_nothing_else():
    config = load_config(None, MINIMAL)
    assert load_config(None, {**MINIMAL, "output": "elsewhere"}).sha256() == config.sha256()
    assert load_config(None, {**MINIMAL, "seed": 1}).sha256() != config.sha256()


def test_roles_fall_back_to_the_default_and_the_fixer_to_the_executor():
    one, other = ({"base_url": "http://h/v1", "model": name} for name in ("m", "x"))
    config = load_config(None, {**MINIMAL, "models": {"default": one, "executor": [other, one]}})
    names = {role: [e.model for e in config.endpoints(role)] for role in ("planner", "executor", "summarizer", "fixer")}
    assert names == {"planner": ["m"], "executor": ["x", "m"], "summarizer": ["m"], "fixer": ["x", "m"]}
    assert load_config(None, MINIMAL).endpoints("planner") == []


def test_an_endpoint_reaches_the_client_as_it_was_configured():
    endpoint = {"base_url": "http://h/v1", "model": "m", "temperature": 0.5, "price": {"prompt": 1, "completion": 2}}
    [configured] = load_config(None, {**MINIMAL, "models": {"default": endpoint}}).endpoints("planner")
    expected = ModelEndpoint("http://h/v1", "m", temperature=0.5, price=Price(1.0, 1.0, 2.0))
    assert configured.model_endpoint() == expected


def test_defaults_of_an_endpoint_are_the_clients_own():
    [configured] = load_config(
        None, {**MINIMAL, "models": {"default": {"base_url": "http://h", "model": "m"}}}
    ).endpoints("planner")
    assert configured.model_endpoint() == ModelEndpoint("http://h", "m")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sede: 1", r"no field sede: did you mean seed\?"),
        ("search: {beam_widht: 2}", r"no field search.beam_widht: did you mean beam_width\?"),
        ("search: {seed: 2}", r"no field search.seed"),
        ("evaluation: {timeout: 2}", r"no field evaluation.timeout: did you mean timeout_s\?"),
        ("models: {planer: {base_url: 'http://h', model: m}}", r"no role 'planer'"),
        ("models: {planner: {base_url: 'http://h', model: m}}", r"no endpoint for executor, summarizer"),
        ("models: {default: {base_url: 'http://h', model: m, temprature: 1}}", r"did you mean temperature\?"),
        ("models: {default: {base_url: 'h', model: m}}", r"models.default.0.base_url is 'h'"),
        ("models: {default: []}", r"default has no endpoint"),
        ("models: {default: {base_url: 'http://h', model: m, price: {promt: 1}}}", r"did you mean prompt\?"),
        ("search: {beam_width: 0}", r"beam_width is 0: give a whole number from 1"),
        ("preset: fastest", r"no preset 'fastest': choose one of"),
        ("slots: 0", r"slots is 0"),
        ("check: lenient", r"check is 'lenient': choose published or strict"),
        ("- a", r"must be a mapping"),
        ("a: [", r"is not YAML"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(tmp_path: Path, text: str, said: str):
    with pytest.raises(UserError, match=said) as caught:
        load_config(write(tmp_path, text), MINIMAL)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_missing_field_are_named(tmp_path: Path):
    with pytest.raises(UserError, match="cannot read the configuration .*absent.yaml"):
        load_config(tmp_path / "absent.yaml", MINIMAL)
    with pytest.raises(UserError, match="task is missing"):
        load_config(None, {"output": "out"})


def test_limits_are_those_of_the_device_protocol():
    config = load_config(None, {**MINIMAL, "evaluation": {"timeout_s": 3, "memory_gib": 0.5, "output_kib": 2}})
    limits = config.evaluation.limits()
    assert (limits.timeout_s, limits.memory_bytes, limits.output_bytes) == (3.0, 2**29, 2048)


def test_a_configuration_cannot_be_changed_after_it_was_checked():
    config = load_config(None, MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
    assert isinstance(config, RunConfig)
