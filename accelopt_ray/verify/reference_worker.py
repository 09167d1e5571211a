"""Computes cache entries, in a child process: a reference may need gigabytes, and that memory ends with the child."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from accelopt_ray.verify.accuracy import Accuracy, as_rows
from accelopt_ray.verify.published import norm

if TYPE_CHECKING:
    from nkibench.reference import Value
    from nkibench.task import Task

META_NAME = "meta.json"
# Outputs beyond this many elements are kept as a sample of their rows, unless the whole is asked for.
SAMPLE_ELEMENTS = 1 << 21
_ACCURACY_MAX_ELEMENTS = 1 << 25
_ROUNDINGS = 2
_FP32_ROUNDING = 2.0**-24


def build_inputs(argument: bytes) -> bytes:
    """Draws a seed's ordinary inputs and writes an entry with them; ``meta.json`` last.

    Arrays are kept in the kernel's layout, and in the reference's as well where that is more than another shape.

    Args:
        argument: JSON with the task's ``location`` and ``parameters``, the ``seed`` and the ``folder`` to fill.

    Returns:
        JSON: empty, or ``error`` with one line on what is wrong with the task.
    """
    return _answer(_build_inputs, argument)


def build_outputs(argument: bytes) -> bytes:
    """Computes the reference outputs for one distribution and writes an entry with them; ``meta.json`` last.

    Args:
        argument: JSON with the task's ``location`` and ``parameters``, ``seed``, ``distribution``, the folder of the
            seed's ``inputs``, ``whole`` (whether outputs are kept whole however large they are), ``sample_seed``
            (chooses the rows otherwise), ``accuracy`` (whether the reference's own accuracy is wanted) and the
            ``folder`` to fill.

    Returns:
        As :func:`build_inputs`.
    """
    return _answer(_build_outputs, argument)


def derive_inputs(argument: bytes) -> bytes:
    """Writes the kernel's inputs of another distribution, derived from a seed's ordinary ones.

    Args:
        argument: JSON with the task's ``location`` and ``parameters``, ``seed``, ``distribution``, the folder of the
            seed's ``inputs`` and the ``folder`` to fill.

    Returns:
        JSON: the ``kernel_inputs``, files in the folder and numbers; or ``error``.
    """
    return _answer(_derive_inputs, argument)


def draw_inputs(task: Task, seed: int, distribution: str) -> list[Value]:
    """Draws a task's inputs from one of the benchmark's distributions or the perturbed one of the influence check.

    Raises:
        TaskError: The task's ``get_inputs`` fails.
    """
    return _vary(task, task.inputs(seed), seed, distribution)


def _answer(work: Callable[[Task, dict[str, Any]], dict[str, Any]], argument: bytes) -> bytes:
    # Imported here: the process that forks this one serves kernels as well; they have no business with references.
    from nkibench.task import TaskError, load_task  # noqa: PLC0415

    request = json.loads(argument)
    try:
        answer = work(load_task(request["location"], request["parameters"]), request)
    except TaskError as error:
        answer = {"error": str(error)}
    return json.dumps(answer).encode()


def _build_inputs(task: Task, request: dict[str, Any]) -> dict[str, Any]:
    folder = Path(request["folder"])
    inputs = task.inputs(request["seed"])
    kernel_inputs = task.kernel_inputs(inputs)
    meta = {
        "kernel_inputs": _save_values(folder, "input", kernel_inputs),
        "inputs": [_describe(folder, position, value, kernel_inputs) for position, value in enumerate(inputs)],
    }
    (folder / META_NAME).write_text(json.dumps(meta))
    return {}


def _build_outputs(task: Task, request: dict[str, Any]) -> dict[str, Any]:
    folder, seed, distribution = Path(request["folder"]), request["seed"], request["distribution"]
    inputs = _vary(task, _load_inputs(Path(request["inputs"])), seed, distribution)
    started = time.perf_counter()
    with np.errstate(all="ignore"):
        outputs = task.forward(inputs)
    reference_s = time.perf_counter() - started
    accuracy = _accuracy(task, seed, distribution) if request["accuracy"] else Accuracy()
    generator = np.random.default_rng(request["sample_seed"])
    described = [
        _save_output(folder, position, output, request["whole"], generator) for position, output in enumerate(outputs)
    ]
    meta = {
        "outputs": described,
        "finite": all(math.isfinite(output["norm"]) for output in described),
        "reference_s": reference_s,
        "accuracy": vars(accuracy),
    }
    (folder / META_NAME).write_text(json.dumps(meta))
    return {}


def _derive_inputs(task: Task, request: dict[str, Any]) -> dict[str, Any]:
    # Mapped, so that what is not changed is copied once; changes stay private to this process.
    inputs = _load_inputs(Path(request["inputs"]), mmap_mode="c")
    inputs = _vary(task, inputs, request["seed"], request["distribution"])
    return {"kernel_inputs": _save_values(Path(request["folder"]), "input", task.kernel_inputs(inputs))}


def _vary(task: Task, inputs: list[Value], seed: int, distribution: str) -> list[Value]:
    from accelopt_ray.verify.perturbation import INFLUENCE, perturb  # noqa: PLC0415 - imports nkibench
    from nkibench.distributions import apply, infer_declarations  # noqa: PLC0415

    declarations = task.input_declarations or infer_declarations(inputs)
    if distribution == INFLUENCE:
        return perturb(inputs, declarations, seed)
    return apply(distribution, inputs, declarations, seed)


def _save_values(folder: Path, name: str, values: Sequence[Value]) -> list[object]:
    described: list[object] = []
    for position, value in enumerate(values):
        if isinstance(value, np.ndarray):
            np.save(folder / f"{name}{position}.npy", np.asarray(value, order="C"))
            described.append(f"{name}{position}.npy")
        else:
            described.append(value)
    return described


def _describe(folder: Path, position: int, value: Value, kernel_inputs: Sequence[Value]) -> object:
    """Says where a reference input is kept: as it is, or in the file of the kernel's input that shares its memory."""
    if not isinstance(value, np.ndarray):
        return value
    for other, kernel_input in enumerate(kernel_inputs):
        if isinstance(kernel_input, np.ndarray) and _same_memory(value, kernel_input):
            return {"file": f"input{other}.npy", "shape": list(value.shape)}
    (name,) = _save_values(folder, f"reference{position}_", [value])
    return {"file": name, "shape": list(value.shape)}


def _same_memory(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return (
        one.dtype == other.dtype
        and one.size == other.size
        and one.flags.c_contiguous
        and other.flags.c_contiguous
        and one.ctypes.data == other.ctypes.data
    )


def _load_inputs(folder: Path, mmap_mode: Literal["c"] | None = None) -> list[Value]:
    meta = json.loads((folder / META_NAME).read_text())
    return [
        np.asarray(np.load(folder / value["file"], mmap_mode=mmap_mode)).reshape(value["shape"])
        if isinstance(value, dict)
        else value
        for value in meta["inputs"]
    ]


def sample_rows(shape: tuple[int, ...], generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Chooses rows (all axes but the last, flattened): one in each of equal strata, and the first and the last.

    Strata are at most as long as a tile in the benchmark's tasks, so no tile of an output is out of sight.
    """
    rows, columns = math.prod(shape[:-1]), shape[-1]
    wanted = min(rows, max(2, SAMPLE_ELEMENTS // columns))
    edges = np.linspace(0, rows, wanted + 1).astype(np.int64)
    chosen = generator.integers(edges[:-1], edges[1:])
    return np.unique(np.concatenate(([0], chosen, [rows - 1])))


def _save_output(
    folder: Path, position: int, output: npt.NDArray[Any], whole: bool, generator: np.random.Generator
) -> dict[str, Any]:
    described: dict[str, Any] = {"shape": list(output.shape), "dtype": str(output.dtype), "rows": None}
    kept = output
    if not whole and output.size > SAMPLE_ELEMENTS:
        rows = sample_rows(output.shape, generator)
        kept = as_rows(output)[rows]
        described["rows"] = f"rows{position}.npy"
        np.save(folder / described["rows"], rows)
    described["file"] = f"output{position}.npy"
    described["norm"] = norm(kept)
    np.save(folder / described["file"], np.asarray(kept, order="C"))
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
