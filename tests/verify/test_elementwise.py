"""What the strict comparison sees that the published one does not: NumPy stand-ins for kernels, honest and not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from accelopt_ray.verify import published
from accelopt_ray.verify.accuracy import Accuracy
from accelopt_ray.verify.checks import Attempt, Trial
from accelopt_ray.verify.perturbation import INFLUENCE, perturb
from accelopt_ray.verify.references import ReferenceCache, ReferenceSet
from accelopt_ray.verify.strict import StrictCheck
from nkibench.distributions import DISTRIBUTIONS
from nkibench.task import Task, list_tasks, load_task

Kernel = Callable[..., np.ndarray]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ReferenceCache:
    return ReferenceCache(tmp_path_factory.mktemp("cache"))


def softmax_task() -> Task:
    return load_task("bmm_softmax", {"B": 1, "M": 256, "N": 1024})


def run(cache: ReferenceCache, task: Task, kernel: Kernel) -> dict[str, str]:
    """Finding by distribution for a NumPy stand-in that takes the reference's inputs; empty where it passes."""
    findings: dict[str, str] = {}
    check, attempts = StrictCheck(), []
    for trial in check.trials(task, (), cache, repeatable=True):
        with cache.use(task, trial.seed, trial.distribution, trial.whole, trial.accuracy) as reference:
            with np.errstate(all="ignore"):
                outputs = kernel(*reference_inputs(task, trial.seed, trial.distribution))
            attempts.append(Attempt(trial, outputs if isinstance(outputs, tuple) else (outputs,), reference))
            before = None if trial.compared_with is None else attempts[trial.compared_with]
            verdict = check.compare(task, attempts[-1], before)
        if verdict.finding is not None:
            findings.setdefault(trial.distribution, verdict.finding.reason)
    return findings


def reference_inputs(task: Task, seed: int, distribution: str) -> list[object]:
    if distribution == INFLUENCE:
        return list(perturb(task.inputs(seed), task.input_declarations or (), seed))
    return list(task.inputs(seed, distribution))


def passes_published(task: Task, kernel: Kernel) -> bool:
    inputs = task.inputs(0)
    with np.errstate(all="ignore"):
        return published.compare([kernel(*inputs)], task.forward(inputs), task.tolerance).passed


def probabilities(lhs: np.ndarray, rhs: np.ndarray, maximum: Callable[[np.ndarray], object]) -> np.ndarray:
    scores = lhs @ rhs
    exponentials = np.exp(scores - maximum(scores))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def honest(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    # Another order of summation and another way to normalise than the reference's.
    halves = lhs[..., ::2] @ rhs[:, ::2] + lhs[..., 1::2] @ rhs[:, 1::2]
    exponentials = np.exp(halves - halves.max(axis=-1, keepdims=True))
    return exponentials * (np.float32(1) / exponentials.sum(axis=-1, keepdims=True))


def no_maximum(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    return probabilities(lhs, rhs, lambda scores: 0)


def maximum_of_the_first_tile(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    return probabilities(lhs, rhs, lambda scores: scores[..., :128].max(axis=-1, keepdims=True))


def dropped_tail(lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    result = honest(lhs, rhs)
    return np.where(result < 1e-6, np.float32(0), result)


def test_an_honest_softmax_passes(cache):
    assert run(cache, softmax_task(), honest) == {}


@pytest.mark.parametrize("seed", [1477161150, 1011564082, 95297909])
def test_an_honest_softmax_passes_where_the_reference_was_lucky(cache, seed):
    """Scores of some ten thousand: their last bits decide the third digit of a few probabilities."""
    task, trial = softmax_task(), Trial(seed, "spikes", accuracy=True)
    with cache.use(task, seed, "spikes", accuracy=True) as reference:
        attempt = Attempt(trial, (honest(*task.inputs(seed, "spikes")),), reference)
        assert StrictCheck().compare(task, attempt, None).finding is None


@pytest.mark.parametrize("kernel", [no_maximum, maximum_of_the_first_tile, dropped_tail])
def test_the_softmaxes_that_fool_the_published_check_fail_the_strict_one(cache, kernel):
    task = softmax_task()
    assert passes_published(task, kernel)
    assert run(cache, task, kernel)


def test_a_dropped_tail_is_seen_with_ordinary_inputs(cache):
    assert run(cache, softmax_task(), dropped_tail)["ordinary"] == "element_error"


@pytest.mark.slow
@pytest.mark.parametrize("name", list_tasks())
def test_every_reference_passes_when_computed_in_double_precision(cache, name):
    task = load_task(name).at_reduced_shape()

    def kernel(*inputs: object) -> tuple[np.ndarray, ...]:
        exact = task.forward([value.astype(np.float64) if isinstance(value, np.ndarray) else value for value in inputs])
        return tuple(output.astype(np.float32) for output in exact)

    assert run(cache, task, kernel) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", list_tasks())
def test_references_stay_finite_under_every_distribution(cache, name):
    """A distribution under which the reference overflows would prove nothing."""
    task = load_task(name).at_reduced_shape()
    for distribution in (*DISTRIBUTIONS, INFLUENCE):
        with cache.use(task, 3, distribution) as reference:
            assert reference.finite, distribution


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def spoil(change: Callable[[np.ndarray, np.ndarray], None]) -> Kernel:
    def kernel(x: np.ndarray) -> np.ndarray:
        result = silu(x)
        change(result, x)
        return result

    return kernel


def damage_one_element(out: np.ndarray, x: np.ndarray) -> None:
    """Twice what an element may be off, where it is of middling size: at the largest, its row shows it as well."""
    column = np.argsort(np.abs(out[5]))[out.shape[1] // 2]
    out[5, column] *= np.float32(1.002)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda out, x: out.__setitem__((5, slice(None)), 0), "row_error"),
        (damage_one_element, "element_error"),
        (lambda out, x: out.__setitem__((5, 7), np.nan), "not_finite"),
        (lambda out, x: out.__setitem__((-1, -1), np.inf), "not_finite"),
        (lambda out, x: out.__imul__(np.float32(1.0001)), "relative_l2"),
    ],
)
def test_small_damage_is_seen_and_named(cache, change, reason):
    findings = run(cache, load_task("silu", {"M": 256, "N": 512}), spoil(change))
    assert findings["ordinary"] == reason


def test_another_type_is_named(cache):
    findings = run(cache, load_task("silu", {"M": 256, "N": 512}), lambda x: silu(x).astype(np.float64))
    assert set(findings.values()) == {"output_dtype"}


def test_an_output_of_known_inputs_is_of_no_use(cache):
    """Constants precomputed from the benchmark's public seed and returned whatever the inputs are."""
    task = load_task("silu", {"M": 256, "N": 512})
    known = silu(task.inputs(0)[0])
    assert run(cache, task, lambda x: known)


def test_inputs_without_influence_are_named(cache, tmp_path):
    """A reference to which a bias adds little: leaving it out stays within every bound but that of the movement."""
    folder = tmp_path / "biased"
    folder.mkdir()
    (folder / "task.yaml").write_text(
        "title: t\nparameters: {M: 128, N: 512}\ntolerance: 2.0e-5\ninputs: {x: {shape: [M, N]}, b: {shape: [M, N]}}\n"
    )
    (folder / "baseline.py").write_text("def kernel(x, b):\n    return x\n")
    (folder / "reference.py").write_text(
        "import numpy as np\n"
        "def get_inputs(M, N):\n"
        "    return [np.random.normal(size=(M, N)).astype(np.float32) for _ in range(2)]\n"
        "def forward(x, b):\n    return np.exp(np.float32(1e-5) * b) * np.ones_like(x)\n"
        "def transform_to_nki_inputs(inputs):\n    return inputs\n"
        "def transform_nki_outputs(out, reference):\n    return [out]\n"
    )
    task = load_task(folder)
    assert passes_published(task, lambda x, b: np.ones_like(x))
    assert run(cache, task, lambda x, b: np.ones_like(x))[INFLUENCE] == "no_influence"
    assert run(cache, task, lambda x, b: np.exp(np.float32(1e-5) * b)) == {}


def test_cancellation_is_known_before_an_element_all_but_vanishes():
    generator = np.random.default_rng(0)
    a, b, c, d = generator.standard_normal((4, 64, 512), dtype=np.float32)
    exact = a.astype(np.float64) * b - c.astype(np.float64) * d
    # Rounding of products near 1, in units of the row; an element of 1e-9 may be off by as much.
    assert 1e-9 < Accuracy.of([a * b - c * d], [exact]).element_of_row < 1e-6


def test_functions_that_do_not_cancel_have_relative_errors_only():
    x = np.random.default_rng(0).standard_normal((64, 512)) * 30
    single = np.exp(x.astype(np.float32) - np.float32(100))
    exact = np.exp(x.astype(np.float32).astype(np.float64) - 100)
    assert Accuracy.of([single], [exact]).element_of_row < 1e-20


def test_the_rounding_of_a_flat_output_is_relative():
    exact = 1 + np.random.default_rng(0).uniform(0, 1e-5, (64, 512))
    assert Accuracy.of([exact.astype(np.float32)], [exact]).element_of_row == 0


def test_sampled_rows_are_compared_in_their_places(tmp_path):
    from accelopt_ray.verify import reference_worker

    generator = np.random.default_rng(1)
    rows = reference_worker.sample_rows((4, 8192, 512), generator)
    assert rows[0] == 0 and rows[-1] == 4 * 8192 - 1
    assert len(np.unique(rows)) == len(rows) < 4 * 8192
    values = generator.standard_normal((4 * 8192, 512), dtype=np.float32).reshape(4, 8192, 512)
    described = _sampled(tmp_path, values)
    check, task = StrictCheck(), load_task("silu", {"M": 256, "N": 512})
    assert check.compare(task, Attempt(Trial(0), (values,), described), None).finding is None
    spoiled = values.copy()
    spoiled[3, 8191, 5] += 1
    finding = check.compare(task, Attempt(Trial(0), (spoiled,), described), None).finding
    assert finding is not None and "[3, 8191, 5]" in finding.text


def _sampled(folder: Path, values: np.ndarray) -> ReferenceSet:
    from accelopt_ray.verify import reference_worker
    from accelopt_ray.verify.references import ReferenceOutput

    rows = reference_worker.sample_rows(values.shape, np.random.default_rng(2))
    np.save(folder / "rows.npy", rows)
    np.save(folder / "values.npy", values.reshape(-1, values.shape[-1])[rows])
    output = ReferenceOutput(folder / "values.npy", values.shape, "float32", 1.0, folder / "rows.npy")
    return ReferenceSet(0, "ordinary", (), (output,), True, 0.0, Accuracy())
