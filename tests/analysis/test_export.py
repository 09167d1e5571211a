"""Export: what leaves the trajectory can be used on its own, and layouts are the task's own, element by element."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from accelopt_ray.analysis import Trajectory
from accelopt_ray.analysis.export import export, slow_fast_pairs
from accelopt_ray.analysis.torch_module import LayoutError, input_layouts, torch_module
from accelopt_ray.outcome import UserError
from accelopt_ray.trajectory import text_sha256
from nkibench.skeleton import write_skeleton
from nkibench.task import list_tasks, load_task


def test_the_kernel_comes_with_its_provenance(run: Trajectory, tmp_path: Path):
    (exported,) = export(run, tmp_path / "out")
    best = run.lineage()[-1]
    kernel = (exported.folder / "kernel.py").read_text()
    header, source = kernel.split("\n\n", 1)
    assert all(line.startswith("#") for line in header.splitlines())
    assert "simulated" in header
    assert text_sha256(source) == best.source_sha256
    provenance = json.loads((exported.folder / "provenance.json").read_text())
    assert provenance["candidate_id"] == best.candidate_id
    assert provenance["check"]["outcome"] == "correct"
    assert provenance["simulated"] is True
    assert provenance["profile"]["total_time"] == pytest.approx(best.latency_ms / 1e3)
    assert [step["candidate_id"] for step in provenance["lineage"]] == [step.candidate_id for step in run.lineage()]
    assert provenance["run"]["config"]["task"] == "silu"


def test_pairs_are_a_data_set_of_slow_and_fast_texts(run: Trajectory, tmp_path: Path):
    export(run, tmp_path / "out")
    lines = (tmp_path / "out" / "pairs.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    entered = run.memory_items[run.memory_items["evicted_iteration"].isna()]
    assert len(pairs) == len(entered) == len(list(slow_fast_pairs(run)))
    for pair in pairs:
        assert pair["slow_source"] != pair["fast_source"]
        assert pair["simulated"] is True
        assert pair["plan"]


def test_a_sweep_gives_the_fastest_kernel_of_each_task(sweep: Trajectory, tmp_path: Path):
    (exported,) = export(sweep, tmp_path / "out")
    assert exported.speedup == pytest.approx(sweep.summary()["speedup"].max())


def test_a_full_folder_is_refused(run: Trajectory, tmp_path: Path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UserError, match="choose a new folder with --to"):
        export(run, tmp_path)


class Tensor:
    """As much of a tensor as the module uses, around an array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def reshape(self, *shape: int) -> Tensor:
        return Tensor(self.array.reshape(shape))

    def permute(self, *axes: int) -> Tensor:
        return Tensor(self.array.transpose(axes))

    def contiguous(self) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array))


@pytest.mark.parametrize("name", list_tasks())
def test_the_module_hands_the_kernel_what_the_task_would(name: str, monkeypatch: pytest.MonkeyPatch):
    task = load_task(name).at_reduced_shape()
    inputs = task.inputs(seed=0)
    expected = task.kernel_inputs(inputs)
    outputs = task.forward(inputs)
    seen: list[object] = []

    def kernel(*arguments: object) -> object:
        seen.extend(arguments)
        results = tuple(Tensor(output.reshape(-1)) for output in outputs)
        return results if len(results) > 1 else results[0]

    torch = types.ModuleType("torch")
    torch.nn = types.SimpleNamespace(Module=object)  # type: ignore[attr-defined]
    torch.Tensor = Tensor  # type: ignore[attr-defined]
    beside = types.ModuleType("kernel")
    setattr(beside, task.entry, kernel)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "kernel", beside)
    namespace: dict[str, object] = {}
    exec(compile(torch_module(task), name, "exec"), namespace)
    module = namespace["".join(part.capitalize() for part in name.split("_"))]()  # type: ignore[operator]
    result = module.forward(*[Tensor(value) if isinstance(value, np.ndarray) else value for value in inputs])
    for argument, wanted in zip(seen, expected, strict=True):
        if isinstance(argument, Tensor):
            assert np.array_equal(argument.array, wanted)
        else:
            assert argument == wanted
    results = result if isinstance(result, tuple) else (result,)
    for found, output in zip(results, outputs, strict=True):
        assert np.array_equal(found.array, output)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [2 * inputs[0]]", "not made of the task's inputs|more than reshape"),
        ("return [inputs[0][:64]]", "does not hold all elements"),
        ("return [inputs[0][::-1]]", "more than reshape|not made of"),
    ],
)
def test_a_transform_that_computes_is_refused(tmp_path: Path, body: str, said: str):
    folder = write_skeleton(tmp_path, "mine")
    reference = folder / "reference.py"
    text = reference.read_text()
    head = text.index("def transform_to_nki_inputs")
    tail = text.index("def transform_nki_outputs")
    reference.write_text(f"{text[:head]}def transform_to_nki_inputs(inputs):\n    {body}\n\n\n{text[tail:]}")
    with pytest.raises(LayoutError, match=said):
        input_layouts(load_task(folder).at_reduced_shape())
