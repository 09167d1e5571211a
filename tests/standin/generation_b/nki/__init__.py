"""Stand-in for generation B: just enough of ``nki`` for the contract tests, executed eagerly with NumPy.

Follows ``neuron-runtime/nrtpy/tutorial-debug-neff-nrtpy.rst`` of aws-neuron-sdk (SDK 2.32): a kernel called with arrays
is compiled and run; with ``NKI_ARTIFACTS_DIR`` set before the import, ``kernel.neff`` stays there.
"""

import functools
import inspect
import json
import os
from pathlib import Path

import numpy as np

_ARTIFACTS = os.environ.get("NKI_ARTIFACTS_DIR")
_BEHAVIOUR = Path(__file__).parents[1] / "behaviour.json"


def jit(function):
    @functools.wraps(function)
    def kernel(*arguments):
        assert os.environ["NEURON_RT_VISIBLE_CORES"].isdigit()
        behaviour = json.loads(_BEHAVIOUR.read_text())["toolchain"]
        if behaviour == "compile_error":
            raise RuntimeError("[NCC_EVRF007] too many instructions")
        result = function(*arguments)
        names = list(inspect.signature(function).parameters)
        given = dict(zip(names, arguments, strict=True))
        tensors = {n: [list(a.shape), a.dtype.name] for n, a in given.items() if isinstance(a, np.ndarray)}
        content = {
            "source": Path(inspect.getsourcefile(function)).read_text(),
            "entry": function.__name__,
            "names": names,
            "inputs": tensors,
            "scalars": {n: a for n, a in given.items() if not isinstance(a, np.ndarray)},
            "outputs": {"output_0": [list(result.shape), result.dtype.name]},
        }
        if _ARTIFACTS:
            Path(_ARTIFACTS, "kernel.neff").write_text(json.dumps(content))
        if behaviour == "core_busy":
            raise RuntimeError("NRT Error NRT_EXEC_NC_BUSY(1005): Failed to execute model")
        if behaviour == "out_of_bounds":
            raise RuntimeError("NRT Error NRT_EXEC_OOB(1006): Failed to execute model")
        return result

    return kernel
