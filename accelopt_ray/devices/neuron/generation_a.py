"""Generation A: kernels import ``neuronxcc.nki``.

Its documentation knows no way to compile without running. So compiling checks what can be said of the text and packs
it, and each run compiles and runs, on the core, in a process of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Union

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
from accelopt_ray.devices.neuron.worker_a import NEFF_NAME, NTFF_NAME
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

_WORKER = "accelopt_ray.devices.neuron.worker_a"


class GenerationADevice(NeuronDevice):
    """A core driven by ``nki.baremetal``."""

    def compile(self, request: KernelRequest, limits: Limits) -> Union[Artifact, Failure]:
        """Checks syntax and entry, and packs the text; the compiler itself runs with the first run."""
        failure = source_failure(request.source, request.entry)
        if failure is not None:
            return failure
        dtypes = [value.dtype if isinstance(value, TensorSpec) else "" for value in request.inputs]
        return Artifact(self.name, pack({"entry": request.entry, "dtypes": dtypes}, request.source.encode()))

    def run(self, artifact: Artifact, inputs: Inputs, folder: Path, limits: Limits) -> Union[RunResult, Failure]:
        """Compiles and runs the kernel once."""
        header, source = header_of(artifact)
        request = {
            "entry": header["entry"],
            "inputs": described_inputs(inputs, header["dtypes"]),
            "folder": str(folder.absolute()),
        }
        answer = run_with_core(
            f"{_WORKER}:run",
            pack(request, source),
            limits,
            readable=input_files(inputs),
            writable=[str(folder.absolute())],
        )
        if isinstance(answer, Failure):
            return answer
        return collect_outputs(folder, answer)

    def measure(self, artifact: Artifact, inputs: Inputs, limits: Limits) -> Union[Measurement, Failure]:
        """Runs rounds until one is quiet; latency and counters are the profiler's, of each timed run."""
        taken: list[list[tuple[float, dict[str, float]]]] = []
        output = ""

        def take_round() -> Sequence[float]:
            nonlocal output
            with tempfile.TemporaryDirectory(prefix="accelopt-ray-round-") as name:
                ran = self._run_round(artifact, inputs, Path(name), limits)
                timed = range(self.rule.warmup_runs, self.rule.warmup_runs + self.rule.timed_runs)
                folders = [Path(name) / f"run{index}" for index in timed]
                summaries, told = self._summaries([(folder / NEFF_NAME, folder / NTFF_NAME) for folder in folders])
                taken.append(summaries)
                output = joined_output(ran, told)
            return [latency_ms for latency_ms, _ in taken[-1]]

        try:
            rounds = measure_rounds(take_round, self.rule)
        except StageFailed as failed:
            return failed.failure
        return measurement(rounds, taken[rounds.kept][-1][1], output)

    def _run_round(self, artifact: Artifact, inputs: Inputs, folder: Path, limits: Limits) -> str:
        header, source = header_of(artifact)
        runs = self.rule.warmup_runs + self.rule.timed_runs
        request = {
            "entry": header["entry"],
            "inputs": described_inputs(inputs, header["dtypes"]),
            "folder": str(folder),
            "runs": runs,
        }
        all_runs = Limits(limits.timeout_s * runs, limits.memory_bytes, limits.output_bytes)
        answer = run_with_core(
            f"{_WORKER}:run_round", pack(request, source), all_runs, input_files(inputs), [str(folder)]
        )
        return unless_failed(answer).output
