"""Defaults give way to the file, the file to the command line, and a mistake is one line that names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.agents.gpu_time import GpuTimePrice
from accelopt_ray.agents.prices import Price, load_prices
from accelopt_ray.cli.session import expectation, no_result
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


def hosted_run(**changes: object) -> RunConfig:
    return load_config(None, {**MINIMAL, **changes})


def test_a_hosted_model_is_asked_as_its_maker_recommends_unless_the_endpoint_says_otherwise():
    endpoints = {
        "default": {"hosted": "Qwen3-235B-A22B-Thinking"},
        "executor": {"hosted": "qwen", "temperature": 0.2, "extra_body": {}},
    }
    config = hosted_run(models=endpoints, hosted={"qwen": {"preset": "Qwen3-Coder-30B-A3B", "max_replicas": 3}})
    [planner], [executor] = config.endpoints("planner"), config.endpoints("executor")
    assert (planner.model, planner.temperature, planner.top_p, planner.max_tokens) == (
        "Qwen3-235B-A22B-Thinking",
        0.6,
        0.95,
        65_536,
    )
    assert planner.extra_body["top_k"] == 20
    assert (executor.model, executor.temperature, executor.top_p, executor.extra_body) == ("qwen", 0.2, 0.8, {})
    models = {model.name: model for model in config.hosted_models()}
    assert models["qwen"].source == "Qwen/Qwen3-Coder-30B-A3B-Instruct"
    assert (models["qwen"].gpus, models["Qwen3-235B-A22B-Thinking"].gpus) == (6, 8)
    asked = config.model_endpoints({"qwen": ["http://a/v1", "http://b/v1"]})["executor"][0]
    assert asked.base_urls == ("http://a/v1", "http://b/v1")


def test_a_resolved_hosted_model_loads_as_itself(tmp_path: Path):
    config = hosted_run(models={"default": {"hosted": "gpt-oss-20b"}}, hosted={"gpt-oss-20b": {"gpu_hour_usd": 2.5}})
    again = load_config(write(tmp_path, config.to_yaml()), {})
    assert again == config
    price = again.model_endpoints({})["planner"][0].price
    assert isinstance(price, GpuTimePrice)
    assert (price.gpu_hour_usd, price.gpus) == (2.5, 1)


def test_a_price_file_is_stored_with_the_run_and_holds_from_then_on(tmp_path: Path):
    table = tmp_path / "prices.yaml"
    table.write_text("as_of: 2026-10-01\nmodels: {Big-Model: {prompt: 2, completion: 8}}\n")
    config = hosted_run(prices=str(table))
    table.unlink()
    again = load_config(write(tmp_path, config.to_yaml()), {})
    assert again.price_table().price("big-model") == Price(2.0, 2.0, 8.0)
    assert again.price_table().as_of == "2026-10-01"
    # Without a file the package's own table is what is stored.
    assert hosted_run().prices is not None
    assert hosted_run().price_table() == load_prices()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": {"default": {"hosted": "unheard-of"}}}, r"hosted.unheard-of has no source"),
        (
            {"models": {"default": {"hosted": "m"}}, "hosted": {"m": {"preset": "gpt-oss"}}},
            r"no model preset 'gpt-oss'",
        ),
        ({"models": {"default": {"model": "m"}}}, r"either a base_url or the name of a hosted model"),
        ({"models": {"default": {"base_url": "http://h", "hosted": "m"}}}, r"either a base_url or the name"),
        ({"models": {"default": {"base_url": "http://h"}}}, r"model is missing"),
        ({"models": {"default": {"base_url": "http://h", "model": "m", "replicas": ["b"]}}}, r"'b' is no URL"),
        ({"hosted": {"m": {"min_replicas": 2}}}, r"min_replicas 2 exceeds max_replicas 1"),
        ({"hosted": {"m": {"contxt_tokens": 2}}}, r"did you mean context_tokens\?"),
        ({"prices": "absent.yaml"}, r"cannot read the price table absent.yaml"),
        ({"hosting": "magic"}, r"hosting is 'magic'"),
    ],
)
def test_a_mistake_about_models_is_one_line(changes: dict[str, object], said: str):
    with pytest.raises(UserError, match=said) as caught:
        hosted_run(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "about 12 model calls and 7 evaluations"),
        # Of 12 calls, 8,000 + 2,900 tokens each: 12 x (0.008 x 1 USD + 0.0029 x 10 USD).
        ({"model": "priced"}, "about 12 model calls and 7 evaluations, 0.44 USD at 8,000 + 2,900 tokens a call"),
        ({"model": "priced", "replay": "old"}, "calls and 7 evaluations, all answered from old, nothing is spent"),
        ({"model": "priced", "search": {"max_cost_usd": 0.1}}, "; the budget ends it at 0.10 USD"),
        ({"model": "unheard-of"}, "(no price known, counted as 0: unheard-of)"),
    ],
)
def test_what_a_run_may_cost_is_said_before_it_starts(changes: dict[str, Any], said: str, tmp_path: Path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("as_of: 2026-01-01\nmodels:\n  priced: {prompt: 1, cached: 1, completion: 10}\n")
    sizes = {"iterations": 1, "plans_per_candidate": 3, "attempts_per_plan": 1, "beam_width": 1, "fix_attempts": 1}
    changes = {**changes, "search": {**sizes, **changes.get("search", {})}, "prices": str(prices)}
    if "model" in changes:
        changes["models"] = {"default": {"base_url": "http://h/v1", "model": changes.pop("model")}}
    assert said in expectation(load_config(None, {**MINIMAL, **changes}))


def test_a_baseline_that_fails_at_a_shape_of_ones_own_is_explained_by_it():
    shape = {"M": 256, "N": 512, "K": 512}
    own = load_config(None, {"task": "rmsnorm_matmul", "shape": shape, "output": "run"})
    published = load_config(None, {"task": "rmsnorm_matmul", "output": "run"})
    [task] = own.load_tasks()
    reason = "the baseline kernel is compile_error: output tensor `out` is never written to"
    explained = no_result(own, task, "baseline_failed", reason)
    assert explained.startswith(f"no result for rmsnorm_matmul: {reason}\n")
    assert "M=256 N=512 K=512" in explained and str(task.baseline_path) in explained
    assert no_result(published, published.load_tasks()[0], "baseline_failed", reason).count("\n") == 0
    assert no_result(own, task, "stopped", "the budget is used up").count("\n") == 0
