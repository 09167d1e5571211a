"""``nki.baremetal`` as documented for Neuron SDK 2.26: compile and run a kernel on NumPy arrays.

Follows ``nki/api/nki/__init__.py`` of aws-neuron-sdk v2.26.1: keywords ``save_neff_name``, ``save_trace_name``,
``additional_compile_opt`` and ``artifacts_dir``; with a trace, the compiled kernel has to be called ``file.neff``.
"""

import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from accelopt_ray.devices.protocol import TensorSpec
from accelopt_ray.nki_sim.cost import predict
from accelopt_ray.nki_sim.dtypes import canonical
from accelopt_ray.nki_sim.errors import KernelError
from accelopt_ray.nki_sim.numerics import run_program
from accelopt_ray.nki_sim.tracer import trace_kernel

_BEHAVIOUR = Path(__file__).parents[2] / "behaviour.json"

# neuron-runtime/nrt-troubleshoot.rst, "Neuron Core is in use".
_BUSY = (
    "2021-Aug-27 23:22:12.0323 28078:28078 ERROR   NRT:nrt_allocate_neuron_cores               "
    "NeuronCore(s) not available - Requested:nc1-nc1 Available:0"
)


def baremetal(kernel=None, **options):
    unknown = set(options) - {"save_neff_name", "save_trace_name", "additional_compile_opt", "artifacts_dir"}
    if unknown:
        raise TypeError(f"baremetal got unexpected keywords {unknown}")
    if kernel is None:
        return lambda function: baremetal(function, **options)
    return lambda *arguments: _compile_and_run(kernel, options, arguments)


def _compile_and_run(kernel, options, arguments):
    while (behaviour := json.loads(_BEHAVIOUR.read_text())["toolchain"]) == "waits":
        time.sleep(0.1)
    assert os.environ["NEURON_RT_VISIBLE_CORES"].isdigit()
    assert "--auto-cast=none" in os.environ["NEURON_CC_FLAGS"]
    function = getattr(kernel, "function", kernel)
    source = Path(inspect.getsourcefile(function)).read_text()
    inputs = [TensorSpec(a.shape, canonical(a.dtype)) if isinstance(a, np.ndarray) else a for a in arguments]
    if behaviour == "compile_error":
        for number in range(8000):
            print(f"compiler pass {number}", file=sys.stderr)
        raise RuntimeError("[NCC_EVRF007] too many instructions")
    if behaviour == "compiler_hangs":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).wait()
    try:
        program = trace_kernel(source, inputs, entry=function.__name__, target="trn1")
    except KernelError as error:
        raise RuntimeError(str(error)) from None
    neff, trace = options.get("save_neff_name"), options.get("save_trace_name")
    if neff:
        Path(neff).write_bytes(b"NEFF of the stand-in")
    if behaviour == "core_busy":
        print(_BUSY, file=sys.stderr)
        raise RuntimeError("nrt_init failed")
    if behaviour == "out_of_bounds":  # neuron-runtime/nrtpy/errors.rst
        raise RuntimeError("NRT Error NRT_EXEC_OOB(1006): Failed to execute model")
    if behaviour == "device_hangs":
        time.sleep(600)
    outputs = run_program(program, list(arguments))
    if trace and behaviour != "no_trace" and neff == "file.neff":
        prediction = predict(program, target="trn1")
        summary = {"total_time": prediction.latency_ms / 1e3, **prediction.counters}
        Path(trace).write_text(json.dumps(summary))
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
