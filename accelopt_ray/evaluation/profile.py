"""One kernel on the caller's own arrays: the Python counterpart of ``accelopt-ray profile``."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Union

import numpy as np
import numpy.typing as npt

from accelopt_ray.devices.protocol import Artifact, Device, Failure, KernelRequest, Limits, TensorSpec
from accelopt_ray.devices.registry import get_device
from accelopt_ray.evaluation.evaluate import fingerprint_sha256
from accelopt_ray.evaluation.records import EvaluationResult
from accelopt_ray.outcome import EvaluationOutcome, UserError
from accelopt_ray.verify import published

DEFAULT_TOLERANCE = 2e-5

Value = Union[npt.NDArray[Any], float, int]


@dataclass(frozen=True)
class KernelProfile(EvaluationResult):
    """An evaluation's result with the kernel's outputs.

    ``outcome`` is ``correct`` when nothing that was asked for failed: without reference outputs, that the kernel
    compiles and runs. ``check`` tells which it was: ``published``, or empty.

    Attributes:
        outputs: What the kernel returned; empty if it did not get that far.
    """

    outputs: tuple[npt.NDArray[Any], ...] = ()


def profile_kernel(
    source_or_path: str | Path,
    inputs: Sequence[Value],
    *,
    device: str = "sim-trn1",
    entry: str = "kernel",
    reference_outputs: Sequence[npt.NDArray[Any]] | None = None,
    tolerance: float = DEFAULT_TOLERANCE,
    limits: Limits | None = None,
) -> KernelProfile:
    """Compiles, measures and runs one kernel.

    Args:
        source_or_path: The kernel file's text, or its path.
        inputs: The kernel's arguments, arrays and numbers, in the kernel's own layout.
        device: Device name.
        entry: Name of the kernel function.
        reference_outputs: What the kernel should return; compared by relative L2 error.
        tolerance: Bound of that error.
        limits: Bounds of each stage.

    Returns:
        Latency in milliseconds, counters under the profiler's names, outcome and outputs. A kernel's failure is an
        outcome, not an exception.

    Raises:
        UserError: The file or the device does not exist, or an input is neither array nor number.
    """
    source = _read_source(source_or_path)
    specs = tuple(_spec(position, value) for position, value in enumerate(inputs))
    target, bounds = get_device(device), limits or Limits()
    with tempfile.TemporaryDirectory(prefix="accelopt-ray-profile-") as name:
        return _profile(
            target, KernelRequest(source, specs, entry), inputs, reference_outputs, tolerance, bounds, Path(name)
        )


def _profile(
    device: Device,
    request: KernelRequest,
    inputs: Sequence[Value],
    reference_outputs: Sequence[npt.NDArray[Any]] | None,
    tolerance: float,
    limits: Limits,
    folder: Path,
) -> KernelProfile:
    known: dict[str, Any] = {
        "evaluation_id": uuid.uuid4().hex,
        "check": "" if reference_outputs is None else "published",
        "device": device.name,
        "simulated": device.simulated,
        "fingerprint_sha256": fingerprint_sha256(device),
    }

    def ended(outcome: EvaluationOutcome, reason: str = "", error_text: str = "") -> KernelProfile:
        return KernelProfile(outcome=outcome, reason=reason, error_text=error_text, **known)

    artifact = device.compile(request, limits)
    if isinstance(artifact, Failure):
        return ended(artifact.outcome, artifact.reason, artifact.error_text)
    known |= {"compile_s": artifact.compile_s, "precision_tier": artifact.precision_tier}
    arguments = _save_inputs(inputs, folder)
    failure = _measure(device, artifact, arguments, limits, known)
    if failure is not None:
        return ended(failure.outcome, failure.reason, failure.error_text)
    ran = device.run(artifact, arguments, folder, limits)
    if isinstance(ran, Failure):
        return ended(ran.outcome, ran.reason, ran.error_text)
    outputs = tuple(np.load(path) for path in ran.outputs)
    known |= {"run_s": ran.run_s, "outputs": outputs}
    if reference_outputs is None:
        return ended(EvaluationOutcome.CORRECT)
    comparison = published.compare(outputs, [np.asarray(value) for value in reference_outputs], tolerance)
    known["check_details"] = {"relative_l2": comparison.relative_l2}
    if comparison.passed:
        return ended(EvaluationOutcome.CORRECT)
    return ended(EvaluationOutcome.INCORRECT, "relative_l2", comparison.text)


def _measure(
    device: Device,
    artifact: Artifact,
    arguments: Sequence[Union[Path, float, int]],
    limits: Limits,
    known: dict[str, Any],
) -> Failure | None:
    measurement = device.measure(artifact, arguments, limits)
    if isinstance(measurement, Failure):
        return measurement
    names = {field.name for field in fields(EvaluationResult)}
    known |= {name: value for name, value in vars(measurement).items() if name in names}
    known["prediction_confidence"] = measurement.confidence
    return None


def _read_source(source_or_path: str | Path) -> str:
    # A text without a line break is no kernel, so it has to be a path.
    if isinstance(source_or_path, str) and "\n" in source_or_path:
        return source_or_path
    path = Path(source_or_path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"kernel file {path} cannot be read ({cause}); give a path or the kernel's text") from error


def _spec(position: int, value: Value) -> TensorSpec | float | int:
    if isinstance(value, np.ndarray):
        return TensorSpec(value.shape, value.dtype.name)
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, np.generic):
        return float(value) if value.dtype.kind == "f" else int(value)
    raise UserError(f"input {position} is of type '{type(value).__name__}': give NumPy arrays and numbers")


def _save_inputs(inputs: Sequence[Value], folder: Path) -> list[Union[Path, float, int]]:
    arguments: list[Union[Path, float, int]] = []
    for position, value in enumerate(inputs):
        if isinstance(value, np.ndarray):
            arguments.append(folder / f"input{position}.npy")
            np.save(folder / f"input{position}.npy", value)
        else:
            arguments.append(value.item() if isinstance(value, np.generic) else value)
    return arguments
