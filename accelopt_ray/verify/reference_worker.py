"""Computes one cache entry, in a child process: a reference may need gigabytes, and that memory ends with the child."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accelopt_ray.verify.accuracy import Accuracy, as_rows
from accelopt_ray.verify.published import norm

if TYPE_CHECKING:
    from nkibench.reference import Value
    from nkibench.task import Task

META_NAME = "meta.json"
# Outputs beyond this many elements are kept as a sample of their rows, unless the whole is asked for.
SAMPLED_ABOVE_ELEMENTS = 1 << 22
_SAMPLE_ELEMENTS = 1 << 22
_SAMPLE_BLOCK_ROWS = 16
_ACCURACY_MAX_ELEMENTS = 1 << 25
_ROUNDINGS = 2
_FP32_ROUNDING = 2.0**-24


def build(argument: bytes) -> bytes:
    """Writes an entry's files; ``meta.json`` last.

    Args:
        argument: JSON with the task's ``location`` and ``parameters``, ``seed``, ``distribution``, ``whole`` (whether
            outputs are kept whole however large they are), ``sample_seed`` (chooses the rows otherwise),
            ``accuracy`` (whether the reference's own accuracy is wanted) and the ``folder`` to fill.

    Returns:
        JSON: empty, or ``error`` with one line on what is wrong with the task.
    """
    # Imported here: the process that forks this one serves kernels as well; they have no business with references.
    from nkibench.task import TaskError, load_task  # noqa: PLC0415

    request = json.loads(argument)
    folder = Path(request["folder"])
    try:
        task = load_task(request["location"], request["parameters"])
        inputs = draw_inputs(task, request["seed"], request["distribution"])
        kernel_inputs: list[object] = []
        for position, value in enumerate(task.kernel_inputs(inputs)):
            if isinstance(value, np.ndarray):
                np.save(folder / f"input{position}.npy", np.ascontiguousarray(value))
                kernel_inputs.append(f"input{position}.npy")
            else:
                kernel_inputs.append(value)
        started = time.perf_counter()
        with np.errstate(all="ignore"):
            outputs = task.forward(inputs)
        reference_s = time.perf_counter() - started
        accuracy = _accuracy(task, request["seed"], request["distribution"]) if request["accuracy"] else Accuracy()
    except TaskError as error:
        return json.dumps({"error": str(error)}).encode()
    generator = np.random.default_rng(request["sample_seed"])
    described = [
        _save_output(folder, position, output, request["whole"], generator) for position, output in enumerate(outputs)
    ]
    meta = {
        "kernel_inputs": kernel_inputs,
        "outputs": described,
        "finite": all(math.isfinite(output["norm"]) for output in described),
        "reference_s": reference_s,
        "accuracy": vars(accuracy),
    }
    (folder / META_NAME).write_text(json.dumps(meta))
    return b"{}"


def draw_inputs(task: Task, seed: int, distribution: str) -> list[Value]:
    """Draws a task's inputs from one of the benchmark's distributions or the perturbed one of the influence check.

    Raises:
        TaskError: The task's ``get_inputs`` fails.
    """
    from accelopt_ray.verify.perturbation import INFLUENCE, perturb  # noqa: PLC0415 - imports nkibench
    from nkibench.distributions import infer_declarations  # noqa: PLC0415

    if distribution != INFLUENCE:
        return task.inputs(seed, distribution)
    inputs = task.inputs(seed)
    return perturb(inputs, task.input_declarations or infer_declarations(inputs), seed)


def sample_rows(shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Chooses blocks of rows (all axes but the last, flattened), the first and the last block among them."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    blocks = max(1, rows // _SAMPLE_BLOCK_ROWS)
    wanted = min(blocks, max(2, _SAMPLE_ELEMENTS // (columns * _SAMPLE_BLOCK_ROWS)))
    chosen = generator.choice(blocks, size=wanted, replace=False)
    chosen[0] = 0
    chosen[-1] = blocks - 1
    starts = np.unique(chosen).astype(np.int64) * _SAMPLE_BLOCK_ROWS
    indices = (starts[:, None] + np.arange(_SAMPLE_BLOCK_ROWS)[None, :]).reshape(-1)
    return indices[indices < rows]


def _save_output(
    folder: Path, position: int, output: npt.NDArray[Any], whole: bool, generator: np.random.Generator
) -> dict[str, Any]:
    described: dict[str, Any] = {"shape": list(output.shape), "dtype": str(output.dtype), "rows": None}
    kept = output
    if not whole and output.size > SAMPLED_ABOVE_ELEMENTS:
        rows = sample_rows(output.shape, generator)
        kept = as_rows(output)[rows]
        described["rows"] = f"rows{position}.npy"
        np.save(folder / described["rows"], rows)
    described["file"] = f"output{position}.npy"
    described["norm"] = norm(kept)
    np.save(folder / described["file"], np.ascontiguousarray(kept))
    return described


def _accuracy(task: Task, seed: int, distribution: str) -> Accuracy:
    """The reference's accuracy at the task's small shape; a general guess where it has none and is too large itself."""
    smaller = all(value <= task.parameters[name] for name, value in task.reduced.items())
    small = task.at_reduced_shape() if smaller else task
    inputs = draw_inputs(small, seed, distribution)
    with np.errstate(all="ignore"):
        if sum(value.size for value in inputs if isinstance(value, np.ndarray)) > _ACCURACY_MAX_ELEMENTS:
            return Accuracy()
        outputs = small.forward(inputs)
        doubles = [_in_double(value) for value in inputs]
        exact = small.forward(doubles)
        generator = np.random.default_rng([seed, 2])
        rounded = [small.forward([_off_by_rounding(value, generator) for value in doubles]) for _ in range(_ROUNDINGS)]
    if not all(np.isfinite(output).all() for output in itertools.chain(outputs, exact, *rounded)):
        return Accuracy()
    accuracy = Accuracy.of(outputs, exact)
    for others in rounded:
        accuracy = accuracy.or_worse(Accuracy.of(others, exact))
    return accuracy


def _off_by_rounding(value: Value, generator: np.random.Generator) -> Value:
    if not (isinstance(value, np.ndarray) and value.dtype == np.float64):
        return value
    return value * (1.0 + _FP32_ROUNDING * generator.standard_normal(value.shape))


def _in_double(value: Value) -> Value:
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value
