"""What the devices of both generations have in common: identity, inputs, outputs, rounds, summaries."""

from __future__ import annotations

import abc
import ast
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

import numpy as np

from accelopt_ray.devices.child import ChildEnd, ChildTask, run_child
from accelopt_ray.devices.faults import DeviceFault
from accelopt_ray.devices.messages import unpack
from accelopt_ray.devices.neuron.children import COMPILER_FLAGS, Answer, file_written, kept_output
from accelopt_ray.devices.neuron.toolchain import Toolchain, visible_core
from accelopt_ray.devices.noise import NOISE_RULES, NoiseRule, Rounds
from accelopt_ray.devices.protocol import (
    Artifact,
    Failure,
    KernelRequest,
    Limits,
    Measurement,
    RunResult,
)
from accelopt_ray.outcome import EvaluationOutcome
from accelopt_ray.version import code_version

NAME = "neuron"
_SUMMARY = "accelopt_ray.devices.neuron.summary:summarise_runs"
_SUMMARY_TIMEOUT_S = 120.0

Inputs = Sequence[Union[Path, float, int]]


@dataclass(frozen=True)
class NeuronDevice(abc.ABC):
    """One NeuronCore, named by ``NEURON_RT_VISIBLE_CORES``.

    Attributes:
        toolchain: What is installed.
        rule: How often to measure.
    """

    toolchain: Toolchain
    rule: NoiseRule

    @classmethod
    def open(cls, toolchain: Toolchain) -> NeuronDevice:
        """Makes the device with the noise rule of the toolchain's hardware.

        Raises:
            UserError: No core, or more than one, was assigned to this process.
        """
        visible_core()
        return cls(toolchain, NOISE_RULES[toolchain.hardware])

    @property
    def name(self) -> str:
        """``neuron``."""
        return NAME

    @property
    def hardware(self) -> str:
        """Hardware of this machine."""
        return self.toolchain.hardware

    @property
    def simulated(self) -> bool:
        """Always False."""
        return False

    @property
    def predicts_latency(self) -> bool:
        """Always False: latency is what the profiler saw."""
        return False

    def fingerprint(self) -> Mapping[str, str]:
        """Hardware, versions of the toolchain and settings that change what is compiled or measured."""
        settings = {
            "device": NAME,
            "hardware": self.hardware,
            "generation": str(self.toolchain.generation),
            "runner": self.toolchain.runner,
            "compiler_flags": COMPILER_FLAGS,
            "logical_nc_config": os.environ.get("NEURON_LOGICAL_NC_CONFIG", ""),
            "accelopt_ray": code_version(),
            "numpy": np.__version__,
        }
        return settings | dict(self.toolchain.versions)

    @abc.abstractmethod
    def compile(self, request: KernelRequest, limits: Limits) -> Union[Artifact, Failure]:
        """See :class:`~accelopt_ray.devices.protocol.Device`."""

    @abc.abstractmethod
    def run(self, artifact: Artifact, inputs: Inputs, folder: Path, limits: Limits) -> Union[RunResult, Failure]:
        """See :class:`~accelopt_ray.devices.protocol.Device`."""

    @abc.abstractmethod
    def measure(self, artifact: Artifact, inputs: Inputs, limits: Limits) -> Union[Measurement, Failure]:
        """See :class:`~accelopt_ray.devices.protocol.Device`; each run of a round has ``limits.timeout_s``."""

    def _summaries(self, runs: Sequence[tuple[Path, Path]]) -> tuple[list[tuple[float, dict[str, float]]], str]:
        """Summarises runs, given as compiled kernel and trace.

        Returns:
            Latency in milliseconds and counters of each, and what the profiler printed beside its summaries.

        Raises:
            DeviceFault: A trace is missing, or the profiler fails.
        """
        for path in (path for run in runs for path in run):
            if not file_written(path):
                raise DeviceFault(f"the Neuron toolchain left no {path.name}")
        request = {
            "profiler": str(self.toolchain.profiler),
            "timeout_s": _SUMMARY_TIMEOUT_S,
            "runs": [[str(neff), str(ntff)] for neff, ntff in runs],
        }
        environment = {"PATH": os.environ.get("PATH", os.defpath)}
        done = run_child(
            ChildTask(_SUMMARY, json.dumps(request).encode(), toolchain=True, environment=environment),
            Limits(timeout_s=_SUMMARY_TIMEOUT_S * (len(runs) + 1)),
        )
        if done.end is not ChildEnd.ANSWERED:
            raise DeviceFault(f"the profiler's process {done.detail}")
        answer = json.loads(done.answer)
        if "fault" in answer:
            raise DeviceFault(str(answer["fault"]))
        summaries = [(float(latency_ms), dict(counters)) for latency_ms, counters in answer["summaries"]]
        return summaries, kept_output(str(answer["output"]))


class StageFailed(Exception):
    """Carries a kernel's failure out of a round."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error_text)
        self.failure = failure


def unless_failed(answer: Union[Answer, Failure]) -> Answer:
    """Returns the answer.

    Raises:
        StageFailed: It is a failure.
    """
    if isinstance(answer, Failure):
        raise StageFailed(answer)
    return answer


def measurement(rounds: Rounds, counters: Mapping[str, float], output: str) -> Measurement:
    """A measurement with all its samples, and what the toolchain printed."""
    return Measurement(
        latency_ms=rounds.latency_ms,
        latency_samples_ms=rounds.kept_ms,
        latency_spread=rounds.spread,
        counters=counters,
        simulated=False,
        explanation={
            "rounds_ms": [list(samples) for samples in rounds.samples_ms],
            "kept_round": rounds.kept,
        },
        output=output,
    )


def joined_output(*outputs: str) -> str:
    """What several programs printed, one after the other."""
    return "\n".join(output for output in outputs if output)


def source_failure(source: str, entry: str) -> Failure | None:
    """What can be said of a kernel file without running it: its syntax, and that its entry is defined."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Failure(EvaluationOutcome.COMPILE_ERROR, f"{type(error).__name__}: {error}")
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {(a.asname or a.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
    if entry in names or (entry == "kernel" and "optimized_kernel" in names):
        return None
    return Failure(EvaluationOutcome.COMPILE_ERROR, f"the kernel file defines no function '{entry}'")


def header_of(artifact: Artifact) -> tuple[dict[str, Any], bytes]:
    """Splits an artefact's payload.

    Raises:
        ValueError: It is not one of this device.
    """
    if artifact.device != NAME:
        raise ValueError(f"artefact of device '{artifact.device}' given to '{NAME}'")
    return unpack(artifact.payload)


def described_inputs(inputs: Inputs, dtypes: Sequence[str]) -> list[Any]:
    """Inputs as workers take them: files with their type's name, numbers as they are."""
    return [
        [str(value), dtype] if isinstance(value, Path) else value for value, dtype in zip(inputs, dtypes, strict=True)
    ]


def input_files(inputs: Inputs) -> list[str]:
    """The files among the inputs."""
    return [str(value) for value in inputs if isinstance(value, Path)]


def collect_outputs(folder: Path, answer: Answer) -> Union[RunResult, Failure]:
    """Finds the outputs that a worker wrote; whatever is not a plain file of its own was not written by it."""
    count = len(answer.header["outputs"])
    paths = tuple(folder / f"output{position}.npy" for position in range(count))
    if count > 0 and all(file_written(path) for path in paths):
        return RunResult(paths, float(answer.header["run_s"]), answer.output)
    text = "the kernel's process left no usable outputs"
    return Failure(EvaluationOutcome.CRASHED, text, "bad_result", answer.output)
