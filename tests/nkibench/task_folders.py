"""Small task folders for tests, written with one part replaced."""

from __future__ import annotations

from pathlib import Path

TASK_YAML = """\
title: Doubled
parameters: {M: 128, N: 64}
reduced: {M: 8}
tolerance: 1e-5
roofline: {vector_flops: M*N, matmul_flops: 0, elements: 2*M*N}
inputs:
  x: {shape: [M, N]}
outputs:
  y: [M, N]
"""

REFERENCE = """\
import numpy as np


def get_inputs(M, N):
    return [np.random.normal(0, 1, size=(M, N)).astype(np.float32)]


def forward(x):
    return 2 * x


def transform_to_nki_inputs(inputs):
    return inputs


def transform_nki_outputs(kernel_result, reference):
    return [kernel_result.reshape(reference.shape)]
"""

BASELINE = """\
import neuronxcc.nki as nki


@nki.jit
def kernel(x):
    return x
"""


def write_task(
    folder: Path, yaml: str = TASK_YAML, reference: str | None = REFERENCE, baseline: str | None = BASELINE
) -> Path:
    """Writes a task; a file given as None is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.yaml").write_text(yaml, encoding="utf-8")
    if reference is not None:
        (folder / "reference.py").write_text(reference, encoding="utf-8")
    if baseline is not None:
        (folder / "baseline.py").write_text(baseline, encoding="utf-8")
    return folder
