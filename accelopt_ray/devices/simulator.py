"""The NKI simulator as a device: kernels are traced, executed with NumPy and priced by the cost model.

Nothing here is ever a Trainium result; every measurement carries ``simulated=True``.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Union

import numpy as np

import accelopt_ray
from accelopt_ray.devices.child import ChildEnd, ChildResult, ChildTask, run_child
from accelopt_ray.devices.messages import pack, unpack
from accelopt_ray.devices.protocol import (
    Artifact,
    Failure,
    KernelRequest,
    Limits,
    Measurement,
    RunResult,
    TensorSpec,
)
from accelopt_ray.outcome import EvaluationOutcome

_WORKER = "accelopt_ray.devices.simulator_worker"
# A traced program is a few hundred kilobytes; this leaves room for large constants and none for a disk-filling one.
_MAX_PROGRAM_BYTES = 64 << 20
_MAX_ERROR_CHARACTERS = 4000
_MAX_ITEM_BYTES = 4

_OUTCOMES = {
    ChildEnd.TIMEOUT: EvaluationOutcome.TIMEOUT,
    ChildEnd.MEMORY_LIMIT: EvaluationOutcome.MEMORY_LIMIT,
    ChildEnd.CRASHED: EvaluationOutcome.CRASHED,
}


@dataclass(frozen=True)
class SimulatorDevice:
    """A simulated NeuronCore.

    Attributes:
        name: ``sim-trn1``, ``sim-trn2``, ``sim-trn3`` or a device profile's path.
        hardware: Hardware generation, ``trn1`` and so on.
        profile: Device profile to take the cost model's constants from; None for those of the generation.
    """

    name: str
    hardware: str
    profile: Path | None = None

    @property
    def simulated(self) -> bool:
        """Always True."""
        return True

    @property
    def predicts_latency(self) -> bool:
        """Always True: a program's latency follows from its text."""
        return True

    def fingerprint(self) -> Mapping[str, str]:
        """Versions of the package, of NumPy and of the simulator's own text, and the device profile's content."""
        versions = {
            "device": self.name,
            "accelopt_ray": _package_version(),
            "numpy": np.__version__,
            "simulator_sha256": _simulator_sha256(),
        }
        if self.profile is not None:
            versions["profile_sha256"] = hashlib.sha256(self.profile.read_bytes()).hexdigest()
        return versions

    @property
    def cost_target(self) -> str:
        """What the cost model is to predict for: a generation or a device profile's path."""
        return self.hardware if self.profile is None else str(self.profile)

    def compile(self, request: KernelRequest, limits: Limits) -> Union[Artifact, Failure]:
        """Traces the kernel in a confined child and has the resulting program checked in another."""
        header = {
            "inputs": [
                [list(value.shape), value.dtype] if isinstance(value, TensorSpec) else value for value in request.inputs
            ],
            "entry": request.entry,
            "target": self.hardware,
        }
        traced = run_child(
            ChildTask(
                f"{_WORKER}:compile_kernel",
                pack(header, request.source.encode()),
                confined=True,
                max_answer_bytes=_MAX_PROGRAM_BYTES,
            ),
            limits,
        )
        answer = _read(traced, untrusted=True)
        if isinstance(answer, Failure):
            return answer
        payload = answer[1]
        inspected = run_child(ChildTask(f"{_WORKER}:inspect_program", payload), limits)
        facts = _read(inspected)
        if isinstance(facts, Failure):
            return facts
        return Artifact(
            device=self.name,
            payload=payload,
            compile_s=traced.wall_s + inspected.wall_s,
            outputs=tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in facts[0]["outputs"]),
            precision_tier=facts[0]["precision_tier"],
            stragglers=traced.stragglers,
            repeatable=facts[0]["repeatable"],
            program_sha256=hashlib.sha256(payload).hexdigest(),
        )

    def run(
        self, artifact: Artifact, inputs: Sequence[Union[Path, float, int]], folder: Path, limits: Limits
    ) -> Union[RunResult, Failure]:
        """Executes the program with NumPy."""
        header = {
            "inputs": [str(value) if isinstance(value, Path) else value for value in inputs],
            "folder": str(folder),
        }
        mapped_bytes = sum(value.stat().st_size for value in inputs if isinstance(value, Path))
        mapped_bytes += sum(_MAX_ITEM_BYTES * math.prod(output.shape) for output in artifact.outputs)
        message = pack(header, artifact.payload)
        answer = _read(run_child(ChildTask(f"{_WORKER}:run", message, mapped_bytes=mapped_bytes), limits))
        if isinstance(answer, Failure):
            return answer
        outputs = tuple(folder / f"output{position}.npy" for position in range(len(artifact.outputs)))
        return RunResult(outputs, float(answer[0]["run_s"]))

    def measure(
        self, artifact: Artifact, inputs: Sequence[Union[Path, float, int]], limits: Limits
    ) -> Union[Measurement, Failure]:
        """Predicts latency and counters; ``inputs`` are not looked at."""
        message = pack({"target": self.cost_target}, artifact.payload)
        answer = _read(run_child(ChildTask(f"{_WORKER}:measure", message), limits))
        if isinstance(answer, Failure):
            return answer
        prediction = answer[0]
        latency_ms = float(prediction["latency_ms"])
        return Measurement(
            latency_ms=latency_ms,
            latency_samples_ms=(latency_ms,),
            latency_spread=0.0,
            counters=prediction["counters"],
            simulated=True,
            confidence=prediction["confidence"],
            explanation=prediction["explanation"],
        )


def _read(result: ChildResult, untrusted: bool = False) -> Union[tuple[dict[str, Any], bytes], Failure]:
    if result.end in _OUTCOMES:
        text = f"the kernel {result.detail}" if untrusted else f"the simulated kernel {result.detail}"
        if result.output:
            text += f"\n{result.output}"
        return Failure(_OUTCOMES[result.end], _trim(text), str(result.end))
    if result.end is ChildEnd.RAISED:
        # Neither the kernel's nor the user's mistake; still only this kernel's row, never the run.
        return Failure(EvaluationOutcome.CRASHED, _trim(f"the simulator failed\n{result.detail}"), "simulator_error")
    try:
        header, payload = unpack(result.answer)
        if "outcome" not in header:
            return header, payload
        return Failure(EvaluationOutcome(header["outcome"]), _trim(str(header["message"])))
    except (ValueError, KeyError):
        text = "the kernel's process left a result that cannot be read"
        return Failure(EvaluationOutcome.CRASHED, text, "bad_result")


def _trim(text: str) -> str:
    if len(text) <= _MAX_ERROR_CHARACTERS:
        return text
    half = _MAX_ERROR_CHARACTERS // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"


def _package_version() -> str:
    try:
        return importlib.metadata.version("accelopt-ray")
    except importlib.metadata.PackageNotFoundError:
        return "source tree"


@lru_cache(maxsize=1)
def _simulator_sha256() -> str:
    """Hash over the simulator's files: whatever changes there may change a verdict or a latency."""
    digest = hashlib.sha256()
    root = Path(accelopt_ray.__file__).parent / "nki_sim"
    for path in sorted(path for path in root.rglob("*") if path.suffix in {".py", ".json", ".yaml", ".csv"}):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
