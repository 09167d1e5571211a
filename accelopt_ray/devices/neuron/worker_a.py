"""What the generation-A device does inside child processes: ``neuronxcc.nki``, compile and run in one.

``nki.baremetal`` compiles a kernel and runs it on the core, saving the compiled kernel (NEFF) and an execution trace
(NTFF). Its documentation asks for the name ``file.neff`` when a trace is saved; so every run has a folder of its own.
All functions run the candidate's code: call them in a confined child that has the toolchain.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelopt_ray.devices.messages import pack, unpack
from accelopt_ray.devices.neuron.kernel_file import KernelFailure, describe, import_kernel, load_inputs, save_outputs
from accelopt_ray.outcome import EvaluationOutcome

NEFF_NAME = "file.neff"
NTFF_NAME = "profile.ntff"
COMPILE_OPTIONS = "--disable-dge --logical-nc-config=1"
"""As in the published evaluation: descriptors are made by the compiler, one physical core is one logical core."""


def run(argument: bytes) -> bytes:
    """Runs a kernel once; its outputs are written to the folder named in the request."""
    request, source = unpack(argument)
    started = time.perf_counter()
    try:
        kernel = import_kernel(source.decode(), request["entry"])
        outputs = save_outputs(_run_once(kernel, load_inputs(request["inputs"]), Path("run")), Path(request["folder"]))
    except KernelFailure as failure:
        return pack(failure.header())
    return pack({"run_s": time.perf_counter() - started, "outputs": outputs})


def run_round(argument: bytes) -> bytes:
    """Runs a kernel several times; compiled kernel and trace of each run stay in folders below the one named."""
    request, source = unpack(argument)
    try:
        kernel = import_kernel(source.decode(), request["entry"])
        inputs = load_inputs(request["inputs"])
        for index in range(request["runs"]):
            _run_once(kernel, inputs, Path(request["folder"]) / f"run{index}")
    except KernelFailure as failure:
        return pack(failure.header())
    return pack({})


def _run_once(kernel: Callable[..., Any], inputs: list[Any], folder: Path) -> Any:
    from neuronxcc import nki  # noqa: PLC0415 - the module exists where this device does

    folder.mkdir(parents=True)
    before = Path.cwd()
    os.chdir(folder)
    try:
        runner = nki.baremetal(
            kernel, save_neff_name=NEFF_NAME, save_trace_name=NTFF_NAME, additional_compile_opt=COMPILE_OPTIONS
        )
        return runner(*inputs)
    except MemoryError:
        raise
    except BaseException as error:  # compiler and runtime raise many types; which of the two shows in what is saved
        compiled = Path(NEFF_NAME).exists()
        outcome = EvaluationOutcome.RUNTIME_ERROR if compiled else EvaluationOutcome.COMPILE_ERROR
        raise KernelFailure(outcome, describe(error)) from None
    finally:
        os.chdir(before)
