"""What the simulator does inside child processes.

:func:`compile_kernel` runs the kernel's own Python and is called in a confined child; nothing but the program it
returns is ever used, and the other functions check that program before they believe it. They run in children as well,
for the limits on time and memory, but need no confinement: the kernel's code is not there.

Messages are those of :mod:`accelopt_ray.devices.messages`.
"""

from __future__ import annotations

import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelopt_ray.devices.messages import pack, unpack
from accelopt_ray.devices.protocol import TensorSpec
from accelopt_ray.nki_sim import dtypes, serialize
from accelopt_ray.nki_sim.builder import KERNEL_FILENAME
from accelopt_ray.nki_sim.cost import predict
from accelopt_ray.nki_sim.errors import KernelError
from accelopt_ray.nki_sim.numerics import NumericsError, run_program
from accelopt_ray.nki_sim.program import Buffer, Opcode, Program
from accelopt_ray.nki_sim.tracer import trace_kernel
from accelopt_ray.nki_sim.validate import validate
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.verify.precision import precision_tier

_RANDOM = frozenset({Opcode.RANDOM, Opcode.DROPOUT})
_PROGRAM_ERRORS = (KernelError, NumericsError, serialize.ProgramFormatError)


def compile_kernel(argument: bytes) -> bytes:
    """Traces a kernel. Untrusted: call it in a confined child only."""
    request, source = unpack(argument)
    inputs = [
        TensorSpec(tuple(value[0]), value[1]) if isinstance(value, list) else value for value in request["inputs"]
    ]
    try:
        program = trace_kernel(source.decode(), inputs, entry=request["entry"], target=request["target"])
    except KernelError as error:
        return pack(_failure(error))
    except MemoryError:
        raise
    except BaseException as error:  # a kernel may raise anything; it is always the kernel's failure
        return pack({"outcome": EvaluationOutcome.COMPILE_ERROR, "message": _last_lines(error)})
    return pack({}, serialize.dumps(program))


def inspect_program(argument: bytes) -> bytes:
    """Checks a program that a compile child returned and reports what is known about it."""
    try:
        program = _load(argument)
    except _PROGRAM_ERRORS as error:
        return pack(_failure(error))
    outputs = [program.buffers[output] for output in program.outputs]
    return pack(
        {
            "outputs": [[list(buffer.shape), buffer.dtype] for buffer in outputs],
            "precision_tier": precision_tier(program),
            "repeatable": all(instruction.opcode not in _RANDOM for _, instruction in program.walk()),
        }
    )


def run(argument: bytes) -> bytes:
    """Runs a program on ``.npy`` inputs; its outputs are written to the ``.npy`` files named in the request."""
    request, payload = unpack(argument)
    started = time.perf_counter()
    try:
        program = _load(payload)
        inputs = [np.load(value, mmap_mode="r") if isinstance(value, str) else value for value in request["inputs"]]
        paths = [Path(request["folder"]) / f"output{position}.npy" for position in range(len(program.outputs))]
        outputs = [
            _new_output(path, program.buffers[buffer]) for path, buffer in zip(paths, program.outputs, strict=True)
        ]
        run_program(program, inputs, outputs)
        for path, output in zip(paths, outputs, strict=True):
            if not isinstance(output, np.memmap):
                np.save(path, output.astype(np.float32))
    except _PROGRAM_ERRORS as error:
        return pack(_failure(error))
    return pack({"run_s": time.perf_counter() - started})


def measure(argument: bytes) -> bytes:
    """Predicts latency and counters of a program."""
    request, payload = unpack(argument)
    try:
        prediction = predict(_load(payload), target=request["target"])
    except _PROGRAM_ERRORS as error:
        return pack(_failure(error))
    return pack(
        {
            "latency_ms": prediction.latency_ms,
            "counters": dict(prediction.counters),
            "confidence": prediction.confidence,
            "explanation": prediction.explanation,
        }
    )


def _new_output(path: Path, buffer: Buffer) -> npt.NDArray[Any]:
    """An array that is its own ``.npy`` file, where that format knows the type."""
    dtype = dtypes.storage(buffer.dtype)
    if dtype.kind == "V":
        return np.zeros(buffer.shape, dtype)
    return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=buffer.shape)


def _load(payload: bytes) -> Program:
    program: Program = serialize.loads(payload)
    validate(program)
    return program


def _failure(error: KernelError | NumericsError | serialize.ProgramFormatError) -> dict[str, object]:
    if isinstance(error, serialize.ProgramFormatError):
        message = f"the kernel's process left a result that is no program: {error}"
        return {"outcome": EvaluationOutcome.CRASHED, "message": message}
    return {"outcome": str(error.outcome), "message": str(error)}


def _last_lines(error: BaseException) -> str:
    """The kernel's own frames and the error, as a developer would see them; not the harness's frames above."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == KERNEL_FILENAME]
    lines = traceback.format_list(frames[-3:]) + traceback.format_exception_only(type(error), error)
    return "".join(lines)[-4000:]
