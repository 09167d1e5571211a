"""Plans for the benchmark's own kernels, at reduced shapes: what they lead to computes the same."""

from __future__ import annotations

import numpy as np
import pytest

from accelopt_ray.devices.protocol import TensorSpec
from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import evaluate
from accelopt_ray.evaluation.records import EvaluationJob, TaskRef
from accelopt_ray.nki_sim.numerics.execute import run_program
from accelopt_ray.nki_sim.tracer import trace_kernel
from accelopt_ray.rewrite.planner import options_for
from accelopt_ray.verify.references import ReferenceCache
from nkibench.task import Task, list_tasks, load_task

#: Nothing in this kernel is repeated, cut off or computed in more instructions than it takes.
NOTHING_TO_DO = frozenset({"bmm", "conv2d"})


def _outputs(task: Task, source: str) -> list[np.ndarray]:
    specs = [TensorSpec(*spec) if isinstance(spec, tuple) else spec for spec in task.input_specs()]
    return run_program(trace_kernel(source, specs, entry=task.entry), task.kernel_inputs(task.inputs(0)))


@pytest.mark.parametrize("name", [task for task in list_tasks() if task not in NOTHING_TO_DO])
def test_all_rewrites_at_once_keep_the_result(name: str) -> None:
    task = load_task(name).at_reduced_shape()
    option = options_for(task.baseline_source())[0]
    expected, actual = _outputs(task, task.baseline_source()), _outputs(task, option.source)
    for one, other in zip(expected, actual, strict=True):
        distance = np.linalg.norm((other - one).astype(np.float64)) / np.linalg.norm(one.astype(np.float64))
        assert distance < task.tolerance, [step.text() for step in option.steps]


@pytest.mark.slow
@pytest.mark.parametrize("name", [task for task in list_tasks() if task not in NOTHING_TO_DO])
def test_every_plan_passes_the_strict_check(name: str) -> None:
    task, references = load_task(name).at_reduced_shape(), ReferenceCache()
    reference = TaskRef(name, tuple(task.parameters.items()))
    for option in options_for(task.baseline_source()):
        job = EvaluationJob(option.tag, reference, option.source, "sim-trn1", "strict")
        result = evaluate(job, get_device("sim-trn1"), references)
        assert result.correct, (result.outcome, result.error_text, [step.text() for step in option.steps])
