"""A candidate's kernel file inside its child process: brought into being, imported, and blamed for what it raises.

NKI reads the source of a kernel function from its file, so the text has to lie in one.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from accelopt_ray.outcome import EvaluationOutcome

FILENAME = "kernel_file.py"
_MODULE_NAME = "nki_kernel_file"
_MAX_CHARACTERS = 4000
# What NumPy's file format cannot name comes back as raw bytes of this size.
_RAW_TYPES = {name: getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3", "float8_e5m2")}


class KernelFailure(Exception):
    """The kernel failed; the outcome is typed and the text is for its author."""

    def __init__(self, outcome: EvaluationOutcome, text: str) -> None:
        super().__init__(text)
        self.outcome = outcome

    def header(self) -> dict[str, object]:
        """The failure as a message's header."""
        return {"outcome": str(self.outcome), "message": str(self)}


def import_kernel(source: str, entry: str) -> Callable[..., Any]:
    """Writes the kernel file into the current folder, imports it and returns its entry function.

    Raises:
        KernelFailure: It cannot be imported or lacks the function.
    """
    path = Path(FILENAME).absolute()
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_NAME] = module
    try:
        spec.loader.exec_module(module)
    except MemoryError:
        raise
    except BaseException as error:  # a kernel file may raise anything; it is always the file's failure
        raise KernelFailure(EvaluationOutcome.COMPILE_ERROR, describe(error)) from None
    kernel = getattr(module, entry, None)
    if kernel is None and entry == "kernel":
        kernel = getattr(module, "optimized_kernel", None)
    if not callable(kernel):
        text = f"the kernel file defines no function '{entry}'"
        raise KernelFailure(EvaluationOutcome.COMPILE_ERROR, text)
    return kernel  # type: ignore[no-any-return]


def describe(error: BaseException) -> str:
    """Words an exception with the kernel file's own frames; not the harness's above nor the compiler's below."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if os.path.basename(frame.filename) == FILENAME
    ]
    lines = traceback.format_list(frames[-3:]) + traceback.format_exception_only(type(error), error)
    return "".join(lines)[-_MAX_CHARACTERS:]


def load_inputs(values: list[Any]) -> list[Any]:
    """Loads kernel arguments: ``[path, dtype name]`` pairs as arrays, numbers as they are."""
    return [_load(*value) if isinstance(value, list) else value for value in values]


def save_outputs(result: Any, folder: Path) -> list[list[object]]:
    """Saves what a kernel returned as ``output0.npy`` and so on; types that files cannot name are saved as float32.

    Returns:
        Shape and type name of each output.

    Raises:
        KernelFailure: It returned something else than arrays.
    """
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    described: list[list[object]] = []
    for position, value in enumerate(outputs):
        if value is None or not hasattr(value, "shape"):
            text = f"the kernel returned a value of type '{type(value).__name__}' where a tensor is expected"
            raise KernelFailure(EvaluationOutcome.RUNTIME_ERROR, text)
        array = np.asarray(value)
        described.append([list(array.shape), array.dtype.name])
        np.save(folder / f"output{position}.npy", array.astype(np.float32) if array.dtype.kind == "V" else array)
    return described


def empty_inputs(values: list[Any]) -> list[Any]:
    """Makes kernel arguments for a compilation: ``[shape, dtype name]`` pairs as ones, numbers as they are."""
    return [np.ones(value[0], numpy_type(value[1])) if isinstance(value, list) else value for value in values]


def parameter_names(kernel: Callable[..., Any]) -> list[str]:
    """Names of a kernel's positional parameters, decorated or not.

    Raises:
        KernelFailure: They cannot be told.
    """
    function = getattr(kernel, "func", getattr(kernel, "function", kernel))
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        text = "the kernel's parameters cannot be told: decorate a plain function with nki.jit"
        raise KernelFailure(EvaluationOutcome.UNSUPPORTED, text) from None


def numpy_type(name: str) -> np.dtype[Any]:
    """The NumPy type of that name, those of ml_dtypes included."""
    dtype: np.dtype[Any] = np.dtype(_RAW_TYPES.get(name, name))
    return dtype


def _load(path: str, dtype: str) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.load(path)
    return array.view(numpy_type(dtype)) if array.dtype.kind == "V" else array
