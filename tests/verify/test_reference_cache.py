"""The cache of reference data under concurrent use, eviction and defective tasks."""

from __future__ import annotations

import json
import math
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from accelopt_ray.outcome import UserError
from accelopt_ray.verify import reference_worker
from accelopt_ray.verify import references as module
from accelopt_ray.verify.references import DEFAULT_CAP_BYTES, ReferenceCache
from accelopt_ray.verify.strict import StrictCheck
from nkibench.task import Task, list_tasks, load_task
from nkibench.task_file import shape_of

SHAPE = {"M": 256, "N": 512}


@pytest.fixture
def task() -> Task:
    return load_task("silu", SHAPE)


@pytest.fixture
def cache(tmp_path: Path) -> ReferenceCache:
    return ReferenceCache(tmp_path / "cache")


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    built: list[str] = []
    original = module.run_child

    def counting(task, limits):
        built.append(task.target.partition(":")[2])
        return original(task, limits)

    monkeypatch.setattr(module, "run_child", counting)
    return built


def test_an_entry_holds_what_the_task_computes(task, cache):
    inputs = task.inputs(21)
    expected = task.forward(inputs)
    with cache.use(task, 21) as entry:
        arrays = [output.values() for output in entry.outputs]
        kernel_inputs = [np.load(path) for path in entry.kernel_inputs]
        norms = [output.norm for output in entry.outputs]
        assert entry.finite
    assert all(np.array_equal(a, b) for a, b in zip(arrays, expected, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(kernel_inputs, task.kernel_inputs(inputs), strict=True))
    assert norms == pytest.approx([np.linalg.norm(output.astype(np.float64)) for output in expected])


def test_an_entry_is_built_once_and_told_apart_by_everything_it_depends_on(task, cache, monkeypatch):
    built = count_builds(monkeypatch)
    for _ in range(2):
        with cache.use(task, 0):
            pass
    assert built == ["build_inputs", "build_outputs"]
    for other, seed, distribution in [
        (task, 1, "ordinary"),
        (task, 0, "scaled"),
        (task.with_parameters(M=128), 0, "ordinary"),
    ]:
        with cache.use(other, seed, distribution):
            pass
    assert (built.count("build_inputs"), built.count("build_outputs")) == (3, 4)


@pytest.mark.parametrize("name", ["silu", "conv2d", "adamw"])
def test_the_inputs_of_other_distributions_are_derived_and_not_kept(cache, name):
    """Whatever the kernel's layout: as it is, another shape, or in another order."""
    task = load_task(name).at_reduced_shape()
    with cache.use(task, 7):
        kept = cache.size_bytes()
    for distribution in ("scaled", "spikes"):
        expected = task.kernel_inputs(task.inputs(7, distribution))
        with cache.use(task, 7, distribution, whole=False) as entry:
            arrays = [np.load(path) for path in entry.kernel_inputs]
            assert all(np.array_equal(a, b) and a.shape == b.shape for a, b in zip(arrays, expected, strict=True))
            folders = {path.parent for path in entry.kernel_inputs}
        assert not any(folder.exists() for folder in folders)
    outputs = sum(output.nbytes for output in task.forward(task.inputs(7)))
    assert cache.size_bytes() - kept < 2 * outputs + (1 << 16)


def test_numbers_among_the_inputs_stay_numbers(cache, tmp_path):
    folder = tmp_path / "task"
    shutil.copytree(load_task("silu").folder, folder)
    (folder / "task.yaml").write_text("title: t\nparameters: {M: 128, N: 512}\ntolerance: 2.0e-5\n")
    (folder / "reference.py").write_text(
        "import numpy as np\n"
        "def get_inputs(M, N):\n    return [np.random.normal(size=(M, N)).astype(np.float32), 2.5]\n"
        "def forward(x, factor):\n    return x * np.float32(factor)\n"
        "def transform_to_nki_inputs(inputs):\n    return inputs[::-1]\n"
        "def transform_nki_outputs(out, reference):\n    return [out]\n"
    )
    task = load_task(folder)
    for distribution in ("ordinary", "scaled", "influence"):
        with cache.use(task, 0, distribution) as entry:
            factor, path = entry.kernel_inputs
            assert factor == 2.5
            (values,) = [output.values() for output in entry.outputs]
            assert np.array_equal(values, np.load(path) * np.float32(2.5))


def test_a_changed_reference_is_another_entry(task, cache, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(task.folder, folder)
    with cache.use(load_task(folder, SHAPE), 0) as entry:
        before = np.array(entry.outputs[0].values())
    path = folder / "reference.py"
    path.write_text(
        path.read_text().replace("def forward(", "def old_forward(") + "\ndef forward(x):\n    return x * 2\n"
    )
    with cache.use(load_task(folder, SHAPE), 0) as entry:
        assert not np.array_equal(entry.outputs[0].values(), before)


def test_concurrent_users_build_an_entry_once(task, cache, monkeypatch):
    built = count_builds(monkeypatch)
    seen: list[float] = []

    def use() -> None:
        with ReferenceCache(cache.folder).use(task, 5) as entry:
            seen.append(float(entry.outputs[0].values().sum()))

    threads = [threading.Thread(target=use) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == ["build_inputs", "build_outputs"]
    assert len(seen) == 6 and len(set(seen)) == 1


def test_large_outputs_are_sampled_in_every_tile(cache):
    large = load_task("silu", {"M": 1024, "N": 8192})

    def rows(seed: int, distribution: str) -> list[int]:
        with cache.use(large, seed, distribution, whole=False) as entry:
            (output,) = entry.outputs
            assert output.values().shape == (len(output.rows()), 8192)
            return output.rows().tolist()

    chosen = rows(1, "ordinary")
    assert {0, 1023} <= set(chosen) and len(chosen) <= 258
    assert {row // 128 for row in chosen} == set(range(8))
    assert rows(1, "ordinary") == chosen
    assert rows(1, "scaled") != chosen and rows(2, "ordinary") != chosen
    with cache.use(large, 1) as whole:
        assert whole.outputs[0].rows() is None


@pytest.mark.parametrize("name", list_tasks())
def test_no_tile_of_the_benchmarks_outputs_is_out_of_sight(name):
    task = load_task(name)
    for shape in task.output_shapes or ():
        full = shape_of(shape, task.parameters)
        rows = reference_worker.sample_rows(full, np.random.default_rng(0))
        assert np.diff(rows).max() <= 256 and {0, math.prod(full[:-1]) - 1} <= set(rows.tolist())
        assert set((rows // 128).tolist()) == set(range(-(-math.prod(full[:-1]) // 128)))


def test_the_strict_references_of_the_whole_benchmark_fit_into_the_cache(cache):
    """By their shapes; what is evicted between two tasks would be computed again, which takes minutes."""
    size_bytes = 0
    for task in map(load_task, list_tasks()):
        size_bytes += sum(4 * math.prod(spec[0]) for spec in task.input_specs() if isinstance(spec, tuple))
        outputs = [math.prod(shape_of(shape, task.parameters)) for shape in task.output_shapes or ()]
        for trial in StrictCheck().trials(task, (), cache, repeatable=True):
            kept = [size if trial.whole else min(size, reference_worker.SAMPLE_ELEMENTS) for size in outputs]
            size_bytes += sum(4 * count for count in kept)
    assert 5 << 30 < size_bytes < 0.9 * DEFAULT_CAP_BYTES


def test_the_least_recently_used_entries_go_first_and_none_in_use(task, cache):
    with cache.use(task, 0):
        pass
    small = ReferenceCache(cache.folder, cap_bytes=int(cache.size_bytes() * 2.5))
    with small.use(task, 1) as held:
        with small.use(task, 2):
            pass  # seed 0 goes
        with small.use(task, 3):
            pass  # seed 1 would be next, but it is in use
        assert small.size_bytes() <= small.cap_bytes
        assert held.outputs[0].path.exists()
        assert all(path.exists() for path in held.kernel_inputs)
    names = {path.parent for path in (cache.folder / "references").glob("*/meta.json")}
    assert held.outputs[0].path.parent in names and len(names) == 4


def test_a_reference_that_fails_is_the_users_mistake_in_one_line(task, cache, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(task.folder, folder)
    path = folder / "reference.py"
    path.write_text(path.read_text() + "\ndef forward(x):\n    raise RuntimeError('told to')\n")
    with pytest.raises(UserError) as caught, cache.use(load_task(folder, SHAPE), 0):
        pass
    message = str(caught.value)
    assert "reference.py" in message and "told to" in message and "\n" not in message
    # The inputs are all right; nothing half done is left beside them.
    (entry,) = (cache.folder / "references").iterdir()
    assert "inputs" in json.loads((entry / "meta.json").read_text())


def test_a_cache_folder_that_cannot_be_written_is_the_users_mistake(task, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="ACCELOPT_RAY_CACHE"), ReferenceCache(tmp_path / "file").use(task, 0):
        pass
