"""Stand-in for nkipy's ``spike``: loads, runs and times what the stand-in ``nki`` compiled.

Follows ``spike/src/spike/spike_model.py`` and ``spike_tensor.py`` of aws-neuron/nkipy at b91c980.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

_BEHAVIOUR = Path(__file__).parents[1] / "behaviour.json"
_LATENCY_MS = 0.05


class SpikeTensor:
    def __init__(self, array, name):
        self._array, self.name = array, name

    @classmethod
    def from_numpy(cls, array, name=None, core_id=0):
        assert core_id == 0  # the first of the visible cores
        return cls(array, name)

    def numpy(self):
        return self._array


class SpikeModel:
    def __init__(self, content, path):
        self._content, self._path = content, path
        self.input_tensors_info = {n: SimpleNamespace(shape=s, dtype=d) for n, (s, d) in content["inputs"].items()}
        self.output_tensors_info = {n: SimpleNamespace(shape=s, dtype=d) for n, (s, d) in content["outputs"].items()}

    @classmethod
    def load_from_neff(cls, neff_path, name=None, core_id=0, cc_enabled=False, rank_id=0, world_size=1):
        return cls(json.loads(Path(neff_path).read_text()), Path(neff_path))

    def __call__(self, inputs, outputs=None, save_trace=False, ntff_name=None):
        assert outputs is None
        if set(inputs) != set(self.input_tensors_info):
            raise ValueError(f"Unknown input(s); expected {list(self.input_tensors_info)}")
        behaviour = json.loads(_BEHAVIOUR.read_text())["toolchain"]
        if behaviour == "exec_fails":
            raise RuntimeError("NRT Error NRT_EXEC_COMPLETED_WITH_ERR(1004): Failed to execute model")
        values = self._content["scalars"] | {name: tensor.numpy() for name, tensor in inputs.items()}
        module = ModuleType("compiled")
        module.__file__ = "compiled"
        # The decorator would compile again; what it wraps is what the device would run.
        exec(self._content["source"].replace("@nki.jit", ""), vars(module))
        result = vars(module)[self._content["entry"]](*(values[name] for name in self._content["names"]))
        if save_trace and behaviour != "no_trace":
            read = sum(tensor.numpy().nbytes for tensor in inputs.values())
            summary = {"total_time": _LATENCY_MS / 1e3, "hbm_read_bytes": read, "hbm_write_bytes": result.nbytes}
            Path(ntff_name or self._path.with_suffix(".ntff")).write_text(json.dumps(summary))
        # libnrt does not always know the type: neuron-runtime/nrtpy/nrtpy-troubleshooting.rst.
        return {"output_0": SpikeTensor(result.view(f"V{result.dtype.itemsize}"), "output_0")}

    def benchmark(self, inputs, outputs=None, warmup_iter=5, benchmark_iter=5, mode="device"):
        assert mode == "device"
        durations = [_LATENCY_MS * (1 + 0.0005 * (index % 3)) for index in range(benchmark_iter)]
        return SimpleNamespace(
            mean_ms=float(np.mean(durations)),
            min_ms=min(durations),
            max_ms=max(durations),
            std_dev_ms=float(np.std(durations)),
            iterations=benchmark_iter,
            warmup_iterations=warmup_iter,
            durations_ms=durations,
        )


if "nki" in sys.modules:
    raise ImportError("the runner is loaded in a process of its own, without the compiler")
