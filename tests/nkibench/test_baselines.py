"""Every baseline, traced and executed by the simulator at its reduced shape, against its reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from accelopt_ray.devices.protocol import TensorSpec
from accelopt_ray.nki_sim.numerics import run_program
from accelopt_ray.nki_sim.program import Program
from accelopt_ray.nki_sim.tracer import trace_kernel
from nkibench.skeleton import write_skeleton
from nkibench.task import Task, list_tasks, load_task


def trace(task: Task) -> Program:
    arguments = [TensorSpec(*spec) if isinstance(spec, tuple) else spec for spec in task.input_specs()]
    return trace_kernel(task.baseline_source(), arguments, entry=task.entry)


def relative_error(task: Task, program: Program, seed: int) -> float:
    inputs = task.inputs(seed)
    reference = task.forward(inputs)
    arrays = [value for value in task.kernel_inputs(inputs) if isinstance(value, np.ndarray)]
    (output,) = task.task_outputs(run_program(program, arrays), reference)
    assert output.dtype == np.float32
    expected = reference[0].astype(np.float64)
    return float(np.linalg.norm((output - expected).ravel()) / np.linalg.norm(expected.ravel()))


@pytest.mark.parametrize("name", list_tasks())
def test_baselines_are_correct_at_the_reduced_shape(name: str) -> None:
    task = load_task(name).at_reduced_shape()
    assert relative_error(task, trace(task), seed=84) < task.tolerance


@pytest.mark.parametrize("name", list_tasks())
def test_baselines_trace_at_the_published_shape(name: str) -> None:
    task = load_task(name)
    program = trace(task)
    assert len(program.outputs) == 1


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("silu", {"M": 128, "N": 1024}),
        ("silu", {"M": 384, "N": 3072}),
        ("adamw", {"M": 5, "N": 1024}),
        ("transpose_matmul", {"M": 1024, "K": 128, "N": 100}),
        ("mamba", {"C": 128, "M": 100, "S": 1}),
        ("rmsnorm_matmul", {"M": 1024, "N": 3072, "K": 1536}),
        ("conv2d", {"B": 1, "CI": 48, "CO": 16, "H": 9, "W": 17, "KH": 2, "KW": 4}),
        ("gqa_full", {"N": 3072, "QH": 8, "KH": 8}),
    ],
)
def test_baselines_take_any_multiple_of_their_tiles(name: str, parameters: dict[str, int]) -> None:
    task = load_task(name, parameters)
    assert relative_error(task, trace(task), seed=0) < task.tolerance


def test_the_skeletons_kernel_is_correct(tmp_path: Path) -> None:
    task = load_task(write_skeleton(tmp_path, "mine")).at_reduced_shape()
    assert relative_error(task, trace(task), seed=0) < task.tolerance
