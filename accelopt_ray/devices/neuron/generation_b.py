"""Generation B: kernels import ``nki``.

The documented way to a compiled kernel runs it once, so compiling takes a core as well; but what comes of it is a file
that the SDK's runner executes, and the candidate's Python runs in no later stage.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Union

from accelopt_ray.devices.messages import pack
from accelopt_ray.devices.neuron.children import run_with_core
from accelopt_ray.devices.neuron.device import (
    Inputs,
    NeuronDevice,
    StageFailed,
    collect_outputs,
    described_inputs,
    header_of,
    input_files,
    joined_output,
    measurement,
    source_failure,
    unless_failed,
)
from accelopt_ray.devices.neuron.worker_b import NEFF_NAME, NTFF_NAME
from accelopt_ray.devices.noise import measure_rounds
from accelopt_ray.devices.protocol import (
    Artifact,
    Failure,
    KernelRequest,
    Limits,
    Measurement,
    RunResult,
    TensorSpec,
)

_WORKER = "accelopt_ray.devices.neuron.worker_b"
_ARTIFACTS_VARIABLE = "NKI_ARTIFACTS_DIR"


class GenerationBDevice(NeuronDevice):
    """A core driven by the SDK's runner of compiled kernels."""

    def compile(self, request: KernelRequest, limits: Limits) -> Union[Artifact, Failure]:
        """Compiles the kernel, which runs it once on ones."""
        failure = source_failure(request.source, request.entry)
        if failure is not None:
            return failure
        tensors = [value for value in request.inputs if isinstance(value, TensorSpec)]
        inputs = [
            [list(value.shape), value.dtype] if isinstance(value, TensorSpec) else value for value in request.inputs
        ]
        with tempfile.TemporaryDirectory(prefix="accelopt-ray-nki-") as artifacts:
            answer = run_with_core(
                f"{_WORKER}:compile_kernel",
                pack({"entry": request.entry, "inputs": inputs, "artifacts": artifacts}, request.source.encode()),
                limits,
                writable=[artifacts],
                environment={_ARTIFACTS_VARIABLE: artifacts},
            )
        if isinstance(answer, Failure):
            return answer
        header = {
            "input_dtypes": [value.dtype if isinstance(value, TensorSpec) else "" for value in request.inputs],
            "names": [str(name) for name in answer.header["names"]][: len(tensors)],
            "dtypes": [str(name) for name in answer.header["dtypes"]],
        }
        return Artifact(self.name, pack(header, answer.payload), output=answer.output)

    def run(self, artifact: Artifact, inputs: Inputs, folder: Path, limits: Limits) -> Union[RunResult, Failure]:
        """Has the runner execute the compiled kernel once."""
        request, neff = self._request(artifact, inputs, folder.absolute())
        answer = run_with_core(
            f"{_WORKER}:run", pack(request, neff), limits, input_files(inputs), [str(folder.absolute())]
        )
        if isinstance(answer, Failure):
            return answer
        return collect_outputs(folder, answer)

    def measure(self, artifact: Artifact, inputs: Inputs, limits: Limits) -> Union[Measurement, Failure]:
        """Times rounds on the device's own clock until one is quiet; counters come from a traced run of each."""
        counters: list[Mapping[str, float]] = []
        output = ""

        def take_round() -> Sequence[float]:
            nonlocal output
            with tempfile.TemporaryDirectory(prefix="accelopt-ray-round-") as name:
                request, neff = self._request(artifact, inputs, Path(name))
                request |= {"warmup_runs": self.rule.warmup_runs, "timed_runs": self.rule.timed_runs}
                runs = self.rule.warmup_runs + self.rule.timed_runs + 1
                all_runs = Limits(limits.timeout_s * runs, limits.memory_bytes, limits.output_bytes)
                answer = unless_failed(
                    run_with_core(f"{_WORKER}:run_round", pack(request, neff), all_runs, input_files(inputs), [name])
                )
                summaries, told = self._summaries([(Path(name) / NEFF_NAME, Path(name) / NTFF_NAME)])
                counters.append(summaries[0][1])
                output = joined_output(answer.output, told)
            return [float(value) for value in answer.header["durations_ms"]]

        try:
            rounds = measure_rounds(take_round, self.rule)
        except StageFailed as failed:
            return failed.failure
        return measurement(rounds, counters[rounds.kept], output)

    def _request(self, artifact: Artifact, inputs: Inputs, folder: Path) -> tuple[dict[str, Any], bytes]:
        header, neff = header_of(artifact)
        request = {
            "runner": self.toolchain.runner,
            "names": header["names"],
            "dtypes": header["dtypes"],
            "inputs": described_inputs(inputs, header["input_dtypes"]),
            "folder": str(folder),
        }
        return request, neff
