"""What the generation-B device does inside child processes: the module ``nki``, then a runner of compiled kernels.

Calling an ``nki.jit`` kernel with arrays compiles it and runs it; with ``NKI_ARTIFACTS_DIR`` set before ``nki`` is
imported, the compiled kernel stays there as ``kernel.neff``, even if the run fails. From then on the kernel's own
Python is not needed: ``nrtpy`` and nkipy's ``spike``, whose interfaces agree, load the file, run and time it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelopt_ray.devices.messages import pack, unpack
from accelopt_ray.devices.neuron.kernel_file import (
    KernelFailure,
    describe,
    empty_inputs,
    import_kernel,
    load_inputs,
    numpy_type,
    parameter_names,
    save_outputs,
)
from accelopt_ray.outcome import EvaluationOutcome

NEFF_NAME = "kernel.neff"
NTFF_NAME = "profile.ntff"
_CLASSES = {"nrtpy": ("NrtpyModel", "NrtpyTensor"), "spike": ("SpikeModel", "SpikeTensor")}


def compile_kernel(argument: bytes) -> bytes:
    """Compiles a kernel; the compiled kernel comes back with what it takes and returns.

    Runs the candidate's code: call it in a confined child that has the toolchain.
    """
    request, source = unpack(argument)
    neff = Path(request["artifacts"]) / NEFF_NAME
    inputs = empty_inputs(request["inputs"])
    result, trouble = None, ""
    try:
        kernel = import_kernel(source.decode(), request["entry"])
        names = parameter_names(kernel)[: len(inputs)]
        try:
            result = kernel(*inputs)
        except MemoryError:
            raise
        except BaseException as error:  # compiler and runtime raise many types; the saved file tells which it was
            trouble = describe(error)
    except KernelFailure as failure:
        return pack(failure.header())
    if not neff.exists():
        text = trouble or f"the compiler left no {NEFF_NAME}"
        return pack(KernelFailure(EvaluationOutcome.COMPILE_ERROR, text).header())
    if trouble:
        return pack(KernelFailure(EvaluationOutcome.RUNTIME_ERROR, trouble).header())
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    dtypes = [np.asarray(output).dtype.name for output in outputs]
    tensors = [name for name, value in zip(names, inputs, strict=True) if isinstance(value, np.ndarray)]
    return pack({"names": tensors, "dtypes": dtypes}, neff.read_bytes())


def run(argument: bytes) -> bytes:
    """Runs a compiled kernel once; its outputs are written to the folder named in the request."""
    request, neff = unpack(argument)
    started = time.perf_counter()
    try:
        model, tensors = _load(request, neff)
        outputs = _call(lambda: model(inputs=tensors))
        arrays = [
            _typed(output.numpy(), dtype) for output, dtype in zip(outputs.values(), request["dtypes"], strict=True)
        ]
        saved = save_outputs(arrays, Path(request["folder"]))
    except KernelFailure as failure:
        return pack(failure.header())
    return pack({"run_s": time.perf_counter() - started, "outputs": saved})


def run_round(argument: bytes) -> bytes:
    """Times a compiled kernel on the device and traces one more run; the trace goes to the folder named."""
    request, neff = unpack(argument)
    try:
        model, tensors = _load(request, neff)
        timing = _call(
            lambda: model.benchmark(
                inputs=tensors, warmup_iter=request["warmup_runs"], benchmark_iter=request["timed_runs"], mode="device"
            )
        )
        folder = Path(request["folder"])
        (folder / NEFF_NAME).write_bytes(neff)
        _call(lambda: model(inputs=tensors, save_trace=True, ntff_name=str(folder / NTFF_NAME)))
    except KernelFailure as failure:
        return pack(failure.header())
    return pack({"durations_ms": [float(value) for value in timing.durations_ms]})


def _load(request: Mapping[str, Any], neff: bytes) -> tuple[Any, dict[str, Any]]:
    runner = importlib.import_module(request["runner"])
    model_class, tensor_class = (getattr(runner, name) for name in _CLASSES[request["runner"]])
    path = Path(NEFF_NAME).absolute()
    path.write_bytes(neff)
    arrays = [value for value in load_inputs(request["inputs"]) if isinstance(value, np.ndarray)]
    model = _call(lambda: model_class.load_from_neff(path))
    expected = list(model.input_tensors_info)
    if sorted(expected) != sorted(request["names"]):
        text = f"the compiled kernel takes the tensors {', '.join(expected)}, not {', '.join(request['names'])}"
        raise KernelFailure(EvaluationOutcome.UNSUPPORTED, text)
    tensors = {
        name: tensor_class.from_numpy(array, name=name) for name, array in zip(request["names"], arrays, strict=True)
    }
    return model, tensors


def _call(action: Any) -> Any:
    try:
        return action()
    except RuntimeError as error:  # NrtError and NrtpyError are of this type
        raise KernelFailure(EvaluationOutcome.RUNTIME_ERROR, describe(error)) from None


def _typed(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """The runtime does not always know a tensor's type and then gives raw bytes."""
    return array.view(numpy_type(dtype)) if array.dtype.kind == "V" else array
