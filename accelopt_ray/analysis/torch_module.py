"""A PyTorch module around a kernel, for torch-neuronx: the task's layout transforms written as tensor operations.

A task's transforms are NumPy functions. To call the kernel from PyTorch they are found out rather than translated: the
input transform is applied to arrays that number their own elements, and what it does to them is expressed as a reshape
and a permutation, which is then checked element by element. A transform that does more than move elements is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nkibench.task import Task, TaskError
from nkibench.task_file import shape_of


class LayoutError(ValueError):
    """A task's layout transform is not a matter of reshaping and permuting."""


@dataclass(frozen=True)
class Layout:
    """How one of the kernel's arguments comes from the task's inputs.

    Attributes:
        source: Which task input it is made of.
        reshape: Shape to bring that into first; empty for a number, which passes unchanged.
        permutation: Order of the axes then.
    """

    source: int
    reshape: tuple[int, ...]
    permutation: tuple[int, ...]

    def expression(self, name: str, shape: Sequence[int]) -> str:
        """Writes it as PyTorch, applied to a tensor of a name and shape."""
        text = name
        if self.reshape and self.reshape != tuple(shape):
            text += f".reshape({', '.join(map(str, self.reshape))})"
        if self.permutation != tuple(range(len(self.permutation))):
            text += f".permute({', '.join(map(str, self.permutation))}).contiguous()"
        return text


def input_layouts(task: Task) -> list[Layout]:
    """Finds out how the kernel's arguments come from the task's inputs.

    Raises:
        LayoutError: It takes more than moving elements, or the task does not declare its inputs.
    """
    shapes = _input_shapes(task)
    probes: list[npt.NDArray[np.int64] | float] = []
    first = 1
    for shape in shapes:
        if shape is None:
            probes.append(-float(len(probes) + 1))
            continue
        size = int(np.prod(shape))
        probes.append(np.arange(first, first + size, dtype=np.int64).reshape(shape))
        first += size
    try:
        arguments = task.kernel_inputs(probes)
    except TaskError as error:
        raise LayoutError(str(error)) from error
    return [_layout(argument, probes) for argument in arguments]


def output_shapes(task: Task) -> list[tuple[int, ...]]:
    """Returns the shapes of the task's outputs, into which the kernel's are reshaped.

    Raises:
        LayoutError: The output transform does more than that, or the task does not declare its outputs.
    """
    if task.output_shapes is None:
        raise LayoutError(f"task '{task.name}' does not declare its outputs")
    shapes = [shape_of(shape, task.parameters) for shape in task.output_shapes]
    results = [np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape) for shape in shapes]
    try:
        outputs = task.task_outputs([result.reshape(-1) for result in results], results)
    except Exception as error:  # the transform is the task's own code and may raise anything
        raise LayoutError(f"the output transform of task '{task.name}' needs the kernel's own shapes") from error
    if len(outputs) != len(results) or not all(map(np.array_equal, outputs, results)):
        raise LayoutError(f"the output transform of task '{task.name}' does more than reshape")
    return shapes


def torch_module(task: Task, kernel_module: str = "kernel") -> str:
    """Writes the module's Python text.

    Args:
        task: The task at the shape that the kernel was made for.
        kernel_module: Name of the Python file beside it that holds the kernel.

    Raises:
        LayoutError: The task's layout cannot be expressed.
    """
    layouts, shapes, returned = input_layouts(task), _input_shapes(task), output_shapes(task)
    names = [declaration.name for declaration in task.input_declarations or ()]
    arguments = []
    for layout in layouts:
        shape = shapes[layout.source]
        arguments.append(names[layout.source] if shape is None else layout.expression(names[layout.source], shape))
    described = [f"{name} {'a number' if shape is None else shape}" for name, shape in zip(names, shapes, strict=True)]
    results = [f"outputs[{index}].reshape({', '.join(map(str, shape))})" for index, shape in enumerate(returned)]
    class_name = "".join(part.capitalize() for part in task.name.split("_"))
    types = [
        f"{name}: {'float' if shape is None else 'torch.Tensor'}" for name, shape in zip(names, shapes, strict=True)
    ]
    result_type = "torch.Tensor" if len(returned) == 1 else f"tuple[{', '.join(['torch.Tensor'] * len(returned))}]"
    calls = "".join(f"            {argument},\n" for argument in arguments)
    return f'''"""The task {task.name} ({task.shape_text}) as a PyTorch module that calls the NKI kernel beside it.

Use it on a Trainium machine with torch-neuronx, on tensors of the XLA device, or trace it with torch_neuronx.trace.
"""

from __future__ import annotations

import torch
from {kernel_module} import {task.entry}


class {class_name}(torch.nn.Module):
    """{task.title or task.name}.

    Inputs: {"; ".join(described)}; fp32. The kernel is made for these shapes.
    """

    def forward(self, {", ".join(types)}) -> {result_type}:
        result = {task.entry}(
{calls}        )
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        return {results[0] if len(results) == 1 else "(" + ", ".join(results) + ")"}
'''


def _input_shapes(task: Task) -> list[tuple[int, ...] | None]:
    """Shapes of the task's inputs, None for numbers."""
    if task.input_declarations is None:
        raise LayoutError(f"task '{task.name}' does not declare its inputs")
    return [
        None if declaration.shape is None else tuple(shape_of(declaration.shape, task.parameters))
        for declaration in task.input_declarations
    ]


def _layout(argument: object, probes: Sequence[object]) -> Layout:
    if not isinstance(argument, np.ndarray):
        for index, probe in enumerate(probes):
            if not isinstance(probe, np.ndarray) and probe == argument:
                return Layout(index, (), ())
        raise LayoutError("a number among the kernel's arguments is not one of the task's inputs")
    if argument.size == 0:
        raise LayoutError("one of the kernel's arguments is empty")
    corner = int(argument.flat[0])
    for index, probe in enumerate(probes):
        if isinstance(probe, np.ndarray) and probe.flat[0] <= corner <= probe.flat[-1]:
            return _arrangement(index, argument, probe)
    raise LayoutError("one of the kernel's arguments is not made of the task's inputs alone")


def _arrangement(index: int, argument: npt.NDArray[np.int64], probe: npt.NDArray[np.int64]) -> Layout:
    if probe.size != argument.size:
        raise LayoutError("one of the kernel's arguments does not hold all elements of a task input")
    if np.array_equal(probe.reshape(argument.shape), argument):
        return Layout(index, argument.shape, tuple(range(argument.ndim)))
    steps = [
        int(np.take(argument, 1, axis).flat[0]) - int(argument.flat[0]) if size > 1 else 0
        for axis, size in enumerate(argument.shape)
    ]
    # Axes in the order in which the input's elements lie: the one with the longest step is the outermost.
    outermost_first = sorted(range(argument.ndim), key=lambda axis: (-steps[axis], axis))
    reshape = tuple(argument.shape[axis] for axis in outermost_first)
    permutation = tuple(int(place) for place in np.argsort(outermost_first))
    if not np.array_equal(probe.reshape(reshape).transpose(permutation), argument):
        raise LayoutError("the task's layout transform does more than reshape and permute")
    return Layout(index, reshape, permutation)
