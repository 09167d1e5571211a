"""``task.yaml``: what a task declares about itself, read and validated."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from nkibench.expression import ExpressionError, evaluate
from nkibench.roofline import Counts

FILE_NAME = "task.yaml"
TASKS_FOLDER = Path(__file__).parent / "tasks"
MAX_TOLERANCE = 0.1
DEFAULT_SCALE = 10.0

_REQUIRED = ("title", "parameters", "tolerance")
_OPTIONAL = ("description", "reduced", "strict_tolerance", "entry", "in_average", "roofline", "inputs", "outputs")
_ROOFLINE = ("vector_flops", "matmul_flops", "elements")
_INPUT = ("shape", "dtype", "value", "values", "scale")

Dimension = str | int
Dimensions = tuple[Dimension, ...]


class TaskError(ValueError):
    """A defect of a task: one line that names the file and what to mend."""


@dataclass(frozen=True)
class InputDeclaration:
    """What is known about one reference input, beyond what a sample of it shows.

    Attributes:
        name: The reference's name for it.
        shape: One expression over the parameters per dimension; None for a scalar.
        dtype: NumPy dtype name.
        value: The scalar's value; None for an array.
        nonnegative: Whether the mathematics needs it to stay >= 0.
        scale: By how much a stricter check may scale it so that the reference keeps its accuracy; 1 leaves it alone.
    """

    name: str
    shape: Dimensions | None
    dtype: str = "float32"
    value: float | None = None
    nonnegative: bool = False
    scale: float = DEFAULT_SCALE


@dataclass(frozen=True)
class TaskFile:
    """The validated content of a task file. Fields as in :class:`nkibench.task.Task`."""

    title: str
    description: str
    parameters: Mapping[str, int]
    reduced: Mapping[str, int]
    tolerance: float
    strict_tolerance: float
    entry: str
    in_average: bool
    roofline: Mapping[str, str] | None
    inputs: tuple[InputDeclaration, ...] | None
    outputs: tuple[Dimensions, ...] | None


def builtin_names() -> list[str]:
    """Returns the names of the built-in tasks, sorted."""
    return sorted(path.parent.name for path in TASKS_FOLDER.glob(f"*/{FILE_NAME}"))


def read_task_file(path: Path) -> TaskFile:
    """Reads and validates a task file.

    Raises:
        TaskError: It cannot be read, is not YAML, or a field is missing, unknown or out of range.
    """
    return _Reader(path).read()


def counts_of(roofline: Mapping[str, str], parameters: Mapping[str, int]) -> Counts:
    """Evaluates roofline expressions.

    Raises:
        ExpressionError: An expression is not arithmetic over the parameters, or negative.
    """
    values = {}
    for name in _ROOFLINE:
        values[name] = float(evaluate(roofline[name], parameters))
        if values[name] < 0:
            raise ExpressionError(f"{name} is negative: {values[name]:g}")
    return Counts(**values)


def shape_of(shape: Dimensions, parameters: Mapping[str, int]) -> tuple[int, ...]:
    """Evaluates a shape.

    Raises:
        ExpressionError: A dimension is not a positive whole number.
    """
    sizes = []
    for dimension in shape:
        size = evaluate(dimension, parameters)
        if not isinstance(size, int) or size < 1:
            raise ExpressionError(f"dimension '{dimension}' is {size:g}, not a positive whole number")
        sizes.append(size)
    return tuple(sizes)


class _Reader:
    """Validates one file; every message names it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _fail(self, message: str) -> TaskError:
        return TaskError(f"{self._path}: {message}")

    def read(self) -> TaskFile:
        data = self._load()
        self._check_keys("the file", data, _REQUIRED + _OPTIONAL)
        for key in _REQUIRED:
            if key not in data:
                raise self._fail(f"field '{key}' is missing")
        parameters = self._parameters("parameters", data["parameters"])
        reduced = self._parameters("reduced", data.get("reduced", {}))
        unknown = sorted(set(reduced) - set(parameters))
        if unknown:
            raise self._fail(f"'reduced' names '{unknown[0]}', which is not among 'parameters'")
        outputs = self._outputs(data.get("outputs"), parameters)
        tolerance = self._tolerance("tolerance", data["tolerance"], MAX_TOLERANCE)
        return TaskFile(
            title=self._text("title", data["title"]),
            description=self._text("description", data.get("description", "")),
            parameters=parameters,
            reduced=reduced,
            tolerance=tolerance,
            strict_tolerance=self._tolerance("strict_tolerance", data.get("strict_tolerance", tolerance), tolerance),
            entry=self._entry(data.get("entry", "kernel")),
            in_average=self._flag("in_average", data.get("in_average", False)),
            roofline=self._roofline(data.get("roofline"), parameters),
            inputs=self._inputs(data.get("inputs"), parameters),
            outputs=outputs,
        )

    def _load(self) -> dict[str, Any]:
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise self._fail("file is missing") from None
        except (OSError, UnicodeDecodeError) as error:
            raise self._fail(f"cannot be read ({error})") from error
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f" at line {mark.line + 1}" if mark is not None else ""
            raise self._fail(f"is not valid YAML{where}") from error
        if not isinstance(data, dict):
            raise self._fail("must be a mapping of fields, starting with 'title: ...'")
        return data

    def _check_keys(self, where: str, data: Mapping[Any, Any], known: tuple[str, ...]) -> None:
        for key in data:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean '{close[0]}'?" if close else f"known fields: {', '.join(known)}"
                raise self._fail(f"unknown field '{key}' in {where}; {hint}")

    def _mapping(self, field: str, value: Any) -> Mapping[Any, Any]:
        if not isinstance(value, dict):
            raise self._fail(f"'{field}' must be a mapping, not {type(value).__name__}")
        return value

    def _text(self, field: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self._fail(f"'{field}' must be text, not {type(value).__name__}")
        return value.strip()

    def _flag(self, field: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self._fail(f"'{field}' must be true or false, not '{value}'")
        return value

    def _number(self, field: str, value: Any) -> float:
        # YAML 1.1 reads "1e-5" (without a dot) as text, so text that spells a number counts as one.
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise self._fail(f"'{field}' must be a number, not '{value}'")
        return number

    def _parameters(self, field: str, value: Any) -> Mapping[str, int]:
        parameters: dict[str, int] = {}
        for name, size in self._mapping(field, value).items():
            if not (isinstance(name, str) and name.isidentifier()):
                raise self._fail(f"'{field}' names '{name}', which is not a Python name")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise self._fail(f"'{field}.{name}' must be a positive whole number, not '{size}'")
            parameters[name] = size
        return parameters

    def _tolerance(self, field: str, value: Any, largest: float) -> float:
        tolerance = self._number(field, value)
        if not 0.0 < tolerance <= largest:
            raise self._fail(f"'{field}' must be above 0 and at most {largest:g}, not {tolerance:g}")
        return tolerance

    def _entry(self, value: Any) -> str:
        if not (isinstance(value, str) and value.isidentifier()):
            raise self._fail(f"'entry' must be the name of the kernel function, not '{value}'")
        return value

    def _roofline(self, value: Any, parameters: Mapping[str, int]) -> Mapping[str, str] | None:
        if value is None:
            return None
        data = self._mapping("roofline", value)
        self._check_keys("'roofline'", data, _ROOFLINE)
        for name in _ROOFLINE:
            if name not in data:
                raise self._fail(f"field 'roofline.{name}' is missing")
            if isinstance(data[name], bool) or not isinstance(data[name], (str, int, float)):
                raise self._fail(f"'roofline.{name}' must be an expression such as 2*M*N, not '{data[name]}'")
        roofline = {name: str(data[name]) for name in _ROOFLINE}
        try:
            counts_of(roofline, parameters)
        except ExpressionError as error:
            raise self._fail(f"'roofline': {error}") from error
        return roofline

    def _shape(self, field: str, value: Any, parameters: Mapping[str, int]) -> Dimensions:
        if not isinstance(value, list) or any(isinstance(d, bool) or not isinstance(d, (str, int)) for d in value):
            raise self._fail(f"'{field}' must be a list of dimensions such as [M, N], not '{value}'")
        shape = tuple(value)
        try:
            shape_of(shape, parameters)
        except ExpressionError as error:
            raise self._fail(f"'{field}': {error}") from error
        return shape

    def _inputs(self, value: Any, parameters: Mapping[str, int]) -> tuple[InputDeclaration, ...] | None:
        if value is None:
            return None
        return tuple(self._input(str(name), item, parameters) for name, item in self._mapping("inputs", value).items())

    def _input(self, name: str, value: Any, parameters: Mapping[str, int]) -> InputDeclaration:
        field = f"inputs.{name}"
        data = self._mapping(field, value)
        self._check_keys(f"'{field}'", data, _INPUT)
        if ("shape" in data) == ("value" in data):
            raise self._fail(f"'{field}' needs either a 'shape' (an array) or a 'value' (a number)")
        if "value" in data:
            number = self._number(f"{field}.value", data["value"])
            return InputDeclaration(name=name, shape=None, value=number, scale=1.0)
        dtype = self._text(f"{field}.dtype", data.get("dtype", "float32"))
        try:
            np.dtype(dtype)
        except TypeError:
            raise self._fail(f"'{field}.dtype' is '{dtype}', which NumPy does not know") from None
        values = data.get("values", "any")
        if values not in ("any", "nonnegative"):
            raise self._fail(f"'{field}.values' must be 'any' or 'nonnegative', not '{values}'")
        scale = self._number(f"{field}.scale", data.get("scale", DEFAULT_SCALE))
        if scale < 1.0:
            raise self._fail(f"'{field}.scale' must be at least 1, not {scale:g}")
        return InputDeclaration(
            name=name,
            shape=self._shape(f"{field}.shape", data["shape"], parameters),
            dtype=dtype,
            nonnegative=values == "nonnegative",
            scale=scale,
        )

    def _outputs(self, value: Any, parameters: Mapping[str, int]) -> tuple[Dimensions, ...] | None:
        if value is None:
            return None
        outputs = self._mapping("outputs", value)
        if not outputs:
            raise self._fail("'outputs' must declare at least one output")
        return tuple(self._shape(f"outputs.{name}", shape, parameters) for name, shape in outputs.items())
