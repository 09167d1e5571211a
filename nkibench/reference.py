"""The Python file that defines a task's mathematics: loading it and calling its four functions."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from nkibench.task_file import TaskError

Array = npt.NDArray[Any]
Value = Union[Array, float, int]

FUNCTIONS = ("get_inputs", "forward", "transform_to_nki_inputs", "transform_nki_outputs")

# NumPy's global generator, which get_inputs draws from, belongs to the whole process.
_GLOBAL_GENERATOR_LOCK = threading.Lock()


class OutputMismatch(Exception):
    """A kernel's outputs cannot be brought into the reference's layout: the kernel's fault, not the task's."""


@dataclass(frozen=True)
class Reference:
    """The four functions of one reference file; every fault of theirs becomes a :class:`TaskError`.

    Attributes:
        path: The file.
        functions: The functions by their published names.
    """

    path: Path
    functions: Mapping[str, Callable[..., Any]]

    def takes_parameters(self) -> bool:
        """Whether ``get_inputs`` takes the shape parameters (the published files fix them as constants)."""
        return bool(self.parameter_names())

    def parameter_names(self) -> tuple[str, ...]:
        """Names of ``get_inputs``' parameters."""
        return tuple(inspect.signature(self.functions["get_inputs"]).parameters)

    def inputs(self, seed: int, parameters: Mapping[str, int]) -> list[Value]:
        """Draws the reference inputs with NumPy's global generator seeded, and restores its state.

        Args:
            seed: Seed of the generator.
            parameters: Shape parameters, passed by keyword where the file takes them.
        """
        arguments = parameters if self.takes_parameters() else {}
        with _GLOBAL_GENERATOR_LOCK:
            state = np.random.get_state()
            np.random.seed(seed)
            try:
                values = self._call("get_inputs", **arguments)
            finally:
                np.random.set_state(state)
        return self._values("get_inputs", values)

    def forward(self, inputs: Sequence[Value]) -> tuple[Array, ...]:
        """Computes the reference outputs, always as a tuple."""
        result = self._call("forward", *inputs)
        outputs = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        for output in outputs:
            if not isinstance(output, np.ndarray):
                raise TaskError(f"{self.path}: forward must return NumPy arrays, not {type(output).__name__}")
        return outputs

    def kernel_inputs(self, inputs: Sequence[Value]) -> list[Value]:
        """Brings reference inputs into the kernel's layout."""
        return self._values("transform_to_nki_inputs", self._call("transform_to_nki_inputs", list(inputs)))

    def task_outputs(self, kernel_outputs: Sequence[Array], reference: Sequence[Array]) -> list[Array]:
        """Brings kernel outputs into the reference's layout.

        Raises:
            OutputMismatch: They do not fit, in number or in shape.
        """
        # The published functions are written for a bare array where there is one output.
        result = kernel_outputs[0] if len(kernel_outputs) == 1 else tuple(kernel_outputs)
        expected = reference[0] if len(reference) == 1 else tuple(reference)
        try:
            outputs = self.functions["transform_nki_outputs"](result, expected)
        except Exception as error:
            shapes = ", ".join(str(output.shape) for output in kernel_outputs)
            raise OutputMismatch(f"kernel outputs of shape {shapes} do not fit the reference: {error}") from error
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        if len(outputs) != len(reference):
            raise OutputMismatch(f"the kernel returns {len(outputs)} outputs, the reference {len(reference)}")
        return [np.asarray(output) for output in outputs]

    def _call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        try:
            return self.functions[name](*arguments, **keywords)
        except Exception as error:
            raise TaskError(f"{self.path}: {name} raised {_one_line(error)}") from error

    def _values(self, name: str, values: Any) -> list[Value]:
        if not isinstance(values, (list, tuple)) or not values:
            raise TaskError(f"{self.path}: {name} must return a non-empty list, not {type(values).__name__}")
        for value in values:
            if not isinstance(value, (np.ndarray, np.number, float, int)):
                raise TaskError(f"{self.path}: {name} must return arrays and numbers, not {type(value).__name__}")
        return [value.item() if isinstance(value, np.number) else value for value in values]


def load_reference(path: Path) -> Reference:
    """Imports a reference file under a private module name.

    Raises:
        TaskError: It is missing, does not import, or lacks one of the four functions.
    """
    try:
        modified_ns = path.stat().st_mtime_ns
    except OSError:
        raise TaskError(f"{path}: file is missing") from None
    return _load(path, modified_ns)


@lru_cache(maxsize=64)
def _load(path: Path, modified_ns: int) -> Reference:
    """Loads a file; ``modified_ns`` makes an edited file a new entry of the cache."""
    module = types.ModuleType(f"nkibench_reference_{abs(hash((path, modified_ns))):x}")
    module.__file__ = str(path)
    try:
        source = path.read_text(encoding="utf-8")
        exec(compile(source, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise TaskError(f"{path}: does not import: {_one_line(error)}") from error
    functions = {}
    for name in FUNCTIONS:
        function = getattr(module, name, None)
        if not callable(function):
            raise TaskError(f"{path}: function '{name}' is missing")
        functions[name] = function
    return Reference(path=path, functions=functions)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
