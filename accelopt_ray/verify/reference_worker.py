"""Computes one cache entry, in a child process: a reference may need gigabytes, and that memory ends with the child."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from accelopt_ray.verify.published import norm

META_NAME = "meta.json"


def build(argument: bytes) -> bytes:
    """Writes an entry's files; ``meta.json`` last.

    Args:
        argument: JSON with the task's ``location`` and ``parameters``, ``seed``, ``distribution`` and the ``folder`` to
            fill.

    Returns:
        JSON: empty, or ``error`` with one line on what is wrong with the task.
    """
    # Imported here: the process that forks this one serves kernels as well; they have no business with references.
    from nkibench.task import TaskError, load_task  # noqa: PLC0415

    request = json.loads(argument)
    folder = Path(request["folder"])
    try:
        task = load_task(request["location"], request["parameters"])
        inputs = task.inputs(request["seed"], request["distribution"])
        kernel_inputs: list[object] = []
        for position, value in enumerate(task.kernel_inputs(inputs)):
            if isinstance(value, np.ndarray):
                np.save(folder / f"input{position}.npy", np.ascontiguousarray(value))
                kernel_inputs.append(f"input{position}.npy")
            else:
                kernel_inputs.append(value)
        started = time.perf_counter()
        with np.errstate(all="ignore"):
            outputs = task.forward(inputs)
        reference_s = time.perf_counter() - started
    except TaskError as error:
        return json.dumps({"error": str(error)}).encode()
    names, norms = [], []
    for position, output in enumerate(outputs):
        np.save(folder / f"output{position}.npy", np.ascontiguousarray(output))
        names.append(f"output{position}.npy")
        norms.append(norm(output))
    meta = {
        "kernel_inputs": kernel_inputs,
        "outputs": names,
        "output_norms": norms,
        "finite": bool(np.isfinite(norms).all()),
        "reference_s": reference_s,
    }
    (folder / META_NAME).write_text(json.dumps(meta))
    return b"{}"
