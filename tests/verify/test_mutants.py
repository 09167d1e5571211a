"""``strict`` tells every baseline from what is left when a step is dropped or a constant is changed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import evaluate
from accelopt_ray.evaluation.records import EvaluationJob, TaskRef
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.verify.references import ReferenceCache
from nkibench.task import list_tasks, load_task

COMPUTING = frozenset({"activation", "add", "divide", "max", "maximum", "multiply", "reciprocal", "rsqrt", "sqrt"})
COMPUTING |= {"square", "subtract", "tensor_scalar", "tensor_tensor"}
START_OF_A_MAXIMUM = 1e30  # anything as large does


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Yields what was changed and the kernel without it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value < START_OF_A_MAXIMUM:
            value, node.value = node.value, 2 * node.value
            yield f"line {node.lineno}: {node.value} for {value}", ast.unparse(tree)
            node.value = value
    for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
        if not (isinstance(call.func, ast.Attribute) and call.func.attr in COMPUTING):
            continue
        operands = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg in {"data", "data1"})]
        for operand in [operand for operand in operands if not isinstance(operand, ast.Constant)][:2]:
            replaced = ast.unparse(_Replace(call, operand).visit(ast.parse(source)))
            yield f"line {call.lineno}: {ast.unparse(operand)} for {ast.unparse(call)}", replaced


class _Replace(ast.NodeTransformer):
    """Puts an operand in the place of a call."""

    def __init__(self, call: ast.Call, operand: ast.expr) -> None:
        self.where = (call.lineno, call.col_offset)
        self.operand = operand

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if (node.lineno, node.col_offset) == self.where:
            return self.operand
        self.generic_visit(node)
        return node


QUICK = frozenset({"add_rmsnorm_matmul", "mamba", "rope_single_freq_apply"})
TASKS = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in list_tasks()]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TASKS)
def test_no_step_of_a_baseline_can_be_left_out(tmp_path, name):
    task, cache = load_task(name).at_reduced_shape(), ReferenceCache(tmp_path)
    for what, source in mutants(task.baseline_source()):
        job = EvaluationJob("e", TaskRef(name, tuple(task.parameters.items())), source, "sim-trn1", "strict")
        result = evaluate(job, get_device("sim-trn1"), cache)
        refused = result.outcome not in {EvaluationOutcome.CORRECT, EvaluationOutcome.CRASHED}
        assert refused, f"{what}: {result.outcome} {result.error_text}"
