"""``strict`` accepts no kernel that fools a check, names what it found, and accepts the honest ones."""

from __future__ import annotations

import itertools

import pytest
from verify.kernels import CHEATS, COMPENSATED, HONEST, POSING, SHAPES, Cheat

from accelopt_ray.devices.protocol import Limits
from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import evaluate
from accelopt_ray.evaluation.records import EvaluationJob, EvaluationResult, TaskRef
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.rewrite.planner import options_for, rank
from accelopt_ray.verify.references import ReferenceCache
from nkibench.task import list_tasks, load_task


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ReferenceCache:
    return ReferenceCache(tmp_path_factory.mktemp("cache"))


def judge(cache: ReferenceCache, task: str, source: str, shape: dict[str, int], check: str = "strict", **more: object):
    job = EvaluationJob("e", TaskRef(task, tuple(shape.items())), source, "sim-trn1", check, **more)  # type: ignore[arg-type]
    return evaluate(job, get_device("sim-trn1"), cache)


def explain(result: EvaluationResult) -> str:
    return f"{result.outcome} {result.reason}: {result.error_text} {result.check_details.get('trials')}"


@pytest.mark.parametrize("task", sorted(HONEST))
def test_honest_kernels_pass(cache, task):
    result = judge(cache, task, HONEST[task], SHAPES[task])
    assert result.outcome is EvaluationOutcome.CORRECT, explain(result)
    assert result.precision_tier == "fp32"


@pytest.mark.parametrize("cheat", CHEATS, ids=[cheat.name for cheat in CHEATS])
def test_no_cheat_passes(cache, cheat: Cheat):
    result = judge(cache, cheat.task, cheat.source, SHAPES[cheat.task])
    assert result.outcome is cheat.outcome, explain(result)
    assert result.reason.startswith(cheat.reason), explain(result)
    assert cheat.text in result.error_text, explain(result)
    assert result.error_text


def test_some_cheats_pass_the_published_check(cache):
    """The reason for the strict one; if this fails, the published check is not the published one any more."""
    fooled = {"no maximum", "maximum of the first tile", "dropped tail", "no weight decay", "no epsilon"}
    for cheat in CHEATS:
        if cheat.name in fooled:
            result = judge(cache, cheat.task, cheat.source, SHAPES[cheat.task], check="published")
            assert result.outcome is EvaluationOutcome.CORRECT, cheat.name


def test_precision_is_a_policy(cache):
    shape = SHAPES["bmm_softmax"]
    result = judge(cache, "bmm_softmax", COMPENSATED, shape)
    assert result.outcome is EvaluationOutcome.PRECISION_VIOLATION, explain(result)
    assert (result.reason, result.precision_tier) == ("precision:compensated", "compensated")
    result = judge(cache, "bmm_softmax", POSING, shape, precision="compensated")
    assert (result.outcome, result.precision_tier) == (EvaluationOutcome.PRECISION_VIOLATION, "reduced")
    allowed = judge(cache, "bmm_softmax", COMPENSATED, shape, check="strict", precision="compensated")
    # Allowed by policy; what it computes is then judged like anyone's.
    assert allowed.outcome in (EvaluationOutcome.CORRECT, EvaluationOutcome.INCORRECT), explain(allowed)
    assert allowed.precision_tier == "compensated"


def test_there_are_many_cheats():
    assert len({cheat.name for cheat in CHEATS}) == len(CHEATS) >= 25


@pytest.mark.slow
@pytest.mark.parametrize("name", list_tasks())
def test_baselines_pass(cache, name):
    task = load_task(name).at_reduced_shape()
    result = judge(cache, name, task.baseline_source(), dict(task.parameters))
    assert result.outcome is EvaluationOutcome.CORRECT, explain(result)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list_tasks())
def test_baselines_pass_at_full_shape(cache, name):
    result = judge(cache, name, load_task(name).baseline_source(), {}, limits=Limits(timeout_s=900.0))
    assert result.outcome is EvaluationOutcome.CORRECT, explain(result)


def rewrites(name: str, count: int = 4) -> list[str]:
    """What the offline rewriter makes of a baseline: by its two most promising plans, and so on from the first."""
    found: list[str] = []
    source = load_task(name).baseline_source()
    while len(found) < count:
        options = rank(options_for(source), {}, ())
        if not options:
            break
        found += [option.source for option in options[:2] if option.source not in found]
        if options[0].source == source:
            break
        source = options[0].source
    return found[:count]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list_tasks())
def test_baselines_and_their_rewrites_pass_for_any_seed(cache, name):
    task = load_task(name).at_reduced_shape()
    others = itertools.cycle(rewrites(name) or [task.baseline_source()])
    for seed, other in zip(range(20), others, strict=False):
        for source in (task.baseline_source(), other):
            result = judge(cache, name, source, dict(task.parameters), seeds=(2000 + seed,))
            assert result.outcome is EvaluationOutcome.CORRECT, f"{explain(result)}\n{source}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list_tasks())
def test_an_honest_rewrite_passes_at_full_shape(cache, name):
    for source in rewrites(name, 1):
        result = judge(cache, name, source, {}, limits=Limits(timeout_s=900.0))
        assert result.outcome is EvaluationOutcome.CORRECT, explain(result)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("task", sorted(HONEST))
def test_honest_kernels_pass_for_any_seed(cache, task):
    for seed in range(20):
        result = judge(cache, task, HONEST[task], SHAPES[task], seeds=(1000 + seed,))
        assert result.outcome is EvaluationOutcome.CORRECT, explain(result)
