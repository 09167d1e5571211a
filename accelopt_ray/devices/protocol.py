"""The contract between the profiling service and whatever executes kernels.

A device compiles a kernel to an artefact that can be sent to another process, runs an artefact on arrays, and measures
it. Tensors cross the boundary as ``.npy`` files, so that gigabyte outputs are mapped, never copied through a pipe. A
kernel's failure is a value (:class:`Failure`), never an exception; exceptions mean that the device itself is at fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Union, runtime_checkable

from accelopt_ray.outcome import EvaluationOutcome


@dataclass(frozen=True)
class Limits:
    """What one stage of one evaluation may use; the deadline starts when the stage starts."""

    timeout_s: float = 120.0
    memory_bytes: int = 8 << 30
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Failure:
    """Why a kernel did not get through a stage.

    Attributes:
        outcome: The typed outcome for the evaluation's row.
        error_text: What a developer would see on the device, at most a few thousand characters.
        reason: Short machine-readable cause, when the outcome alone does not say it.
        output: What compiler, runtime and profiler printed, where the device has such.
    """

    outcome: EvaluationOutcome
    error_text: str
    reason: str = ""
    output: str = ""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype (NumPy name) of one kernel argument."""

    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class KernelRequest:
    """A kernel to compile.

    Attributes:
        source: Python source text of the kernel file.
        inputs: The kernel's positional arguments: tensors by spec, scalars as they are.
        entry: Name of the kernel function; ``optimized_kernel`` is tried as well when it is ``kernel``.
    """

    source: str
    inputs: tuple[Union[TensorSpec, float, int], ...]
    entry: str = "kernel"


@dataclass(frozen=True)
class Artifact:
    """A compiled kernel: opaque bytes for the device that made it.

    Attributes:
        device: Name of the device that can run it.
        payload: Opaque to everyone else.
        compile_s: Wall time of the compilation.
        outputs: What the kernel returns.
        precision_tier: ``fp32``, ``compensated`` or ``reduced`` where the device can tell from what it compiled.
        stragglers: Processes that the kernel's code had started and left behind; they have been ended.
        repeatable: Whether the device guarantees the same outputs for the same inputs, however often it runs.
        program_sha256: Hash that equal programs share, where what the device compiles to is the same each time.
        output: What the compiler printed, where the device has one.
    """

    device: str
    payload: bytes
    compile_s: float = 0.0
    outputs: tuple[TensorSpec, ...] = ()
    precision_tier: str = ""
    stragglers: int = 0
    repeatable: bool = False
    program_sha256: str = ""
    output: str = ""


@dataclass(frozen=True)
class RunResult:
    """A run of a compiled kernel.

    Attributes:
        outputs: Files with its outputs, in the kernel's own layout.
        run_s: Wall time of the run.
        output: What compiler and runtime printed, where the device has such.
    """

    outputs: tuple[Path, ...]
    run_s: float
    output: str = ""


@dataclass(frozen=True)
class Measurement:
    """Latency and counters of a compiled kernel.

    Attributes:
        latency_samples_ms: Timed runs; one value on a device that predicts.
        latency_ms: Their mean.
        latency_spread: (max - min) / min of the samples.
        counters: The Neuron profiler's own field names and units; a field that the profiler would leave out is absent.
        simulated: True when predicted by a model instead of measured.
        confidence: For a prediction, the relative half-width within which two variants count as equal; else None.
        explanation: Bottleneck breakdown for people and prompts.
        output: What compiler, runtime and profiler printed, where the device has such.
    """

    latency_ms: float
    latency_samples_ms: tuple[float, ...]
    latency_spread: float
    counters: Mapping[str, float]
    simulated: bool
    confidence: float | None = None
    explanation: Mapping[str, object] = field(default_factory=dict)
    output: str = ""


@runtime_checkable
class Device(Protocol):
    """One kind of accelerator, real or simulated.

    Methods are synchronous, thread-compatible and may be called from different processes on the same artefact. Each
    runs candidate code only in child processes that are gone when it returns.
    """

    @property
    def name(self) -> str:
        """Device name as given to ``--device``."""

    @property
    def hardware(self) -> str:
        """Key into :data:`nkibench.hardware.HARDWARE` for roofline constants."""

    @property
    def simulated(self) -> bool:
        """Whether latencies are predictions."""

    @property
    def predicts_latency(self) -> bool:
        """Whether :meth:`measure` needs no run, so that it can come before the numeric checks."""

    def fingerprint(self) -> Mapping[str, str]:
        """Toolchain and model versions that a result depends on."""

    def compile(self, request: KernelRequest, limits: Limits) -> Union[Artifact, Failure]:
        """Compiles a kernel."""

    def run(
        self, artifact: Artifact, inputs: Sequence[Union[Path, float, int]], folder: Path, limits: Limits
    ) -> Union[RunResult, Failure]:
        """Runs a compiled kernel on ``.npy`` inputs and writes its outputs as ``.npy`` files into ``folder``."""

    def measure(
        self, artifact: Artifact, inputs: Sequence[Union[Path, float, int]], limits: Limits
    ) -> Union[Measurement, Failure]:
        """Measures (or predicts) latency and counters; a predicting device ignores ``inputs``."""
