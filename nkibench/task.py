"""A benchmark task: a NumPy reference, a baseline kernel, and what is declared about them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Union

import numpy as np

from nkibench import distributions
from nkibench.expression import ExpressionError
from nkibench.published import (
    SUMMARY_NAME,
    PublishedCase,
    find_published,
    list_published,
    published_content,
)
from nkibench.reference import Array, OutputMismatch, Reference, Value, load_reference
from nkibench.roofline import Counts
from nkibench.source import function_names, read_text
from nkibench.task_file import (
    FILE_NAME,
    TASKS_FOLDER,
    Dimensions,
    InputDeclaration,
    TaskError,
    TaskFile,
    builtin_names,
    counts_of,
    read_task_file,
    shape_of,
)

__all__ = ["InputSpec", "OutputMismatch", "Task", "TaskError", "list_tasks", "load_suite", "load_task"]

REFERENCE_NAME = "reference.py"
BASELINE_NAME = "baseline.py"

# Shape and dtype name of an array argument, or the number itself.
InputSpec = Union[tuple[tuple[int, ...], str], float, int]


@dataclass(frozen=True)
class Task:
    """One task at one shape.

    Attributes:
        name: Short name; unique among the built-in tasks.
        location: What :func:`load_task` found it by: a name, a folder, or ``PATH#task``.
        folder: Where its files are.
        title: One line.
        description: What it computes, for prompts and listings.
        parameters: Values of the shape symbols.
        reduced: Smaller values of some of them, for quick runs.
        tolerance: Bound of the relative L2 error, ``|out - ref| < tolerance * |ref|``.
        strict_tolerance: The same under a strict check; smaller where a term of the formula is within ``tolerance``.
        entry: Name of the kernel function.
        in_average: Whether it counts in the benchmark's average.
        roofline: Expressions of the unavoidable work over the parameters; None when not known.
        input_declarations: What is declared about the reference inputs; None when nothing is.
        output_shapes: Declared shapes of the reference outputs; None when not declared.
        reference_path: The NumPy reference.
        baseline_path: The kernel a search starts from.
    """

    name: str
    location: str
    folder: Path
    title: str
    description: str
    parameters: Mapping[str, int]
    reduced: Mapping[str, int]
    tolerance: float
    strict_tolerance: float
    entry: str
    in_average: bool
    roofline: Mapping[str, str] | None
    input_declarations: tuple[InputDeclaration, ...] | None
    output_shapes: tuple[Dimensions, ...] | None
    reference_path: Path
    baseline_path: Path

    @property
    def counts(self) -> Counts | None:
        """The roofline's counts at this shape, or None when the task declares none."""
        return None if self.roofline is None else counts_of(self.roofline, self.parameters)

    @property
    def shape_text(self) -> str:
        """The parameters as one string, ``M=4096 N=7168``."""
        return " ".join(f"{name}={value}" for name, value in self.parameters.items())

    def with_parameters(self, **overrides: int) -> Task:
        """Returns the task at another shape.

        Raises:
            TaskError: A parameter is unknown or not a positive whole number, or the reference fixes its shapes.
        """
        if not overrides:
            return self
        for name, value in overrides.items():
            if name not in self.parameters:
                known = ", ".join(self.parameters) or "none"
                raise TaskError(f"task '{self.name}' has no parameter '{name}' (its parameters: {known})")
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise TaskError(f"parameter {name} of task '{self.name}' must be a positive whole number, not {value}")
        if not self._reference().takes_parameters():
            raise TaskError(f"{self.reference_path}: get_inputs takes no parameters, so its shapes cannot be changed")
        return replace(self, parameters={**self.parameters, **overrides})

    def at_reduced_shape(self) -> Task:
        """Returns the task at its declared small shape, or itself when it declares none."""
        return self.with_parameters(**self.reduced)

    def baseline_source(self) -> str:
        """Returns the text of the baseline kernel."""
        return read_text(self.baseline_path)

    def reference_source(self) -> str:
        """Returns the text of the reference, headed by the shape it is used at."""
        source = read_text(self.reference_path)
        return f"# Shapes: {', '.join(f'{k} = {v}' for k, v in self.parameters.items())}\n{source.lstrip()}"

    def inputs(self, seed: int, distribution: str = distributions.ORDINARY) -> list[Value]:
        """Draws reference inputs.

        Args:
            seed: Seeds NumPy's global generator for ``get_inputs``; its state is restored afterwards.
            distribution: One of :data:`nkibench.distributions.DISTRIBUTIONS`.

        Returns:
            Arrays and numbers in the order of ``forward``'s arguments.

        Raises:
            TaskError: ``get_inputs`` fails or returns something else.
        """
        values = self._reference().inputs(seed, self.parameters)
        if distribution == distributions.ORDINARY:
            return values
        declarations = self.input_declarations or distributions.infer_declarations(values)
        return distributions.apply(distribution, values, declarations, seed)

    def forward(self, inputs: Sequence[Value]) -> tuple[Array, ...]:
        """Computes the reference outputs, in fp32.

        Raises:
            TaskError: ``forward`` fails or returns something other than arrays.
        """
        return self._reference().forward(inputs)

    def kernel_inputs(self, inputs: Sequence[Value]) -> list[Value]:
        """Brings reference inputs into the layout of the kernel's arguments."""
        return self._reference().kernel_inputs(inputs)

    def task_outputs(self, kernel_outputs: Sequence[Array], reference: Sequence[Array]) -> list[Array]:
        """Brings the kernel's outputs into the reference's layout.

        Raises:
            OutputMismatch: They do not fit in number or shape.
        """
        return self._reference().task_outputs(kernel_outputs, reference)

    def input_specs(self) -> tuple[InputSpec, ...]:
        """Returns shape and dtype of the kernel's array arguments, and its number arguments as they are.

        With declared inputs nothing of full size is allocated, as long as the layout transform only reshapes.
        """
        return _input_specs(self.reference_path, self._declared_shapes(), tuple(sorted(self.parameters.items())))

    def check(self) -> None:
        """Runs the reference at the reduced shape and compares it with what is declared.

        Raises:
            TaskError: A function raises, the reference is not finite, changes from call to call, modifies its inputs,
                or disagrees with the declared inputs or outputs.
        """
        small = self.at_reduced_shape()
        inputs = small.inputs(seed=0)
        small._check_inputs(inputs)
        before = [value.copy() if isinstance(value, np.ndarray) else value for value in inputs]
        outputs = small.forward(inputs)
        if any(not np.array_equal(value, copy, equal_nan=True) for value, copy in zip(inputs, before, strict=True)):
            raise TaskError(f"{self.reference_path}: forward modifies its inputs")
        small._check_outputs(outputs)
        again = small.forward(inputs)
        if len(again) != len(outputs) or any(not np.array_equal(a, b) for a, b in zip(outputs, again, strict=True)):
            raise TaskError(f"{self.reference_path}: forward returns something else when called again")
        small.kernel_inputs(inputs)

    def _check_inputs(self, inputs: Sequence[Value]) -> None:
        for value in inputs:
            if isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value).all():
                raise TaskError(f"{self.reference_path}: get_inputs returns values that are not finite")
        declared = self._declared_shapes()
        if declared is None or self.input_declarations is None:
            return
        if len(inputs) != len(declared):
            raise TaskError(
                f"{self.folder / FILE_NAME}: 'inputs' declares {len(declared)}, get_inputs returns {len(inputs)}"
            )
        for declaration, spec, value in zip(self.input_declarations, declared, inputs, strict=True):
            found: InputSpec = (value.shape, str(value.dtype)) if isinstance(value, np.ndarray) else value
            if found != spec:
                raise TaskError(
                    f"{self.folder / FILE_NAME}: 'inputs.{declaration.name}' declares {_spec_text(spec)}, "
                    f"get_inputs returns {_spec_text(found)}"
                )
            if declaration.nonnegative and isinstance(value, np.ndarray) and np.min(value) < 0:
                raise TaskError(f"{self.reference_path}: '{declaration.name}' is declared nonnegative and is not")

    def _check_outputs(self, outputs: Sequence[Array]) -> None:
        if self.output_shapes is not None:
            declared = [shape_of(shape, self.parameters) for shape in self.output_shapes]
            if len(declared) != len(outputs):
                raise TaskError(
                    f"{self.reference_path}: forward returns {len(outputs)} outputs, "
                    f"{FILE_NAME} declares {len(declared)}"
                )
            for shape, output in zip(declared, outputs, strict=True):
                if output.shape != shape:
                    raise TaskError(
                        f"{self.reference_path}: forward returns shape {output.shape}, {FILE_NAME} declares {shape}"
                    )
        for output in outputs:
            if output.dtype.kind != "f" or not output.size:
                raise TaskError(f"{self.reference_path}: forward must return non-empty floating-point arrays")
            if not np.isfinite(output).all():
                raise TaskError(f"{self.reference_path}: forward returns NaN or infinity for ordinary inputs")

    def _declared_shapes(self) -> tuple[InputSpec, ...] | None:
        if self.input_declarations is None:
            return None
        specs: list[InputSpec] = []
        for declaration in self.input_declarations:
            if declaration.shape is None:
                specs.append(declaration.value if declaration.value is not None else 0.0)
                continue
            try:
                shape = shape_of(declaration.shape, self.parameters)
            except ExpressionError as error:
                raise TaskError(f"{self.folder / FILE_NAME}: 'inputs.{declaration.name}.shape': {error}") from error
            specs.append((shape, np.dtype(declaration.dtype).name))
        return tuple(specs)

    def _reference(self) -> Reference:
        return load_reference(self.reference_path)


def list_tasks() -> list[str]:
    """Returns the names of the built-in tasks, sorted."""
    return builtin_names()


def load_task(location: str | Path, parameters: Mapping[str, int] | None = None) -> Task:
    """Loads a task.

    Args:
        location: Name of a built-in task, a folder with ``task.yaml``, ``reference.py`` and ``baseline.py``, or
            ``PATH#task`` for a task of a folder in the published layout.
        parameters: Shape parameters that replace those of the task file.

    Raises:
        TaskError: Nothing is there, or something about it is wrong; one line that names the file.
    """
    text = str(location)
    if "#" in text:
        task = _published_task(find_published(text), location=text)
    elif text in list_tasks():
        task = _task_from_folder(TASKS_FOLDER / text, location=text)
    elif Path(text).is_dir():
        task = _task_from_folder(Path(text).resolve(), location=str(Path(text).resolve()))
    else:
        close = difflib.get_close_matches(text, list_tasks(), n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known tasks: {', '.join(list_tasks())}"
        raise TaskError(f"no task and no task folder '{text}'; {hint}")
    return task.with_parameters(**(parameters or {}))


def load_suite(location: str | Path) -> list[Task]:
    """Loads every task of a folder in the published layout.

    Raises:
        TaskError: The summary or one of the files it names cannot be used.
    """
    return [_published_task(case, f"{location}#{case.name}") for case in list_published(location)]


def _published_task(case: PublishedCase, location: str) -> Task:
    return _build(
        published_content(case),
        name=case.name,
        location=location,
        reference_path=case.reference_path,
        baseline_path=case.kernel_path,
    )


def _task_from_folder(folder: Path, location: str) -> Task:
    """Loads the task whose three files lie in ``folder``."""
    if not (folder / FILE_NAME).is_file() and (folder / SUMMARY_NAME).is_file():
        raise TaskError(f"{folder}: is a suite in the published layout; name one of its tasks as '{folder}#TASK'")
    content = read_task_file(folder / FILE_NAME)
    return _build(
        content,
        name=folder.name,
        location=location,
        reference_path=folder / REFERENCE_NAME,
        baseline_path=folder / BASELINE_NAME,
    )


def _build(content: TaskFile, name: str, location: str, reference_path: Path, baseline_path: Path) -> Task:
    """Builds a task from a validated task file and checks that its two Python files can be used.

    Raises:
        TaskError: The reference does not load or takes other parameters, or the baseline lacks its entry.
    """
    reference = load_reference(reference_path)
    task = Task(
        name=name,
        location=location,
        folder=reference_path.parent,
        title=content.title,
        description=content.description,
        parameters=content.parameters,
        reduced=content.reduced,
        tolerance=content.tolerance,
        strict_tolerance=content.strict_tolerance,
        entry=content.entry,
        in_average=content.in_average,
        roofline=content.roofline,
        input_declarations=content.inputs,
        output_shapes=content.outputs,
        reference_path=reference_path,
        baseline_path=baseline_path,
    )
    _check_signature(reference, content.parameters)
    functions = function_names(baseline_path)
    if content.entry not in functions:
        found = ", ".join(functions) or "no function"
        raise TaskError(f"{baseline_path}: does not define the entry '{content.entry}' (found: {found})")
    return task


def _check_signature(reference: Reference, parameters: Mapping[str, int]) -> None:
    if not reference.takes_parameters():
        return
    wanted = set(reference.parameter_names())
    if wanted != set(parameters):
        raise TaskError(
            f"{reference.path}: get_inputs takes ({', '.join(sorted(wanted))}), "
            f"{FILE_NAME} declares the parameters ({', '.join(sorted(parameters))})"
        )


@lru_cache(maxsize=128)
def _input_specs(
    reference_path: Path, declared: tuple[InputSpec, ...] | None, parameters: tuple[tuple[str, int], ...]
) -> tuple[InputSpec, ...]:
    reference = load_reference(reference_path)
    values: list[Value]
    if declared is None:
        values = reference.inputs(0, dict(parameters))
    else:
        # Arrays that repeat one zero: they cost no memory, and reshaping them costs none either.
        values = [
            np.broadcast_to(np.zeros((), dtype=spec[1]), spec[0]) if isinstance(spec, tuple) else spec
            for spec in declared
        ]
    return tuple(
        (value.shape, str(value.dtype)) if isinstance(value, np.ndarray) else value
        for value in reference.kernel_inputs(values)
    )


def _spec_text(spec: InputSpec) -> str:
    return f"{spec[1]}{list(spec[0])}" if isinstance(spec, tuple) else f"the number {spec:g}"
