"""Refitting the cost model to measurements, and what each of its rules contributes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accelopt_ray.nki_sim.cost.constants import DeviceConstants, device_constants
from accelopt_ray.nki_sim.cost.options import ModelOptions
from accelopt_ray.nki_sim.cost.predict import predict
from accelopt_ray.nki_sim.fidelity import compare, hbm_bytes
from accelopt_ray.nki_sim.measurements import MeasuredKernel
from accelopt_ray.outcome import UserError

FREE_CONSTANTS: Mapping[str, tuple[float, ...]] = {
    "pe_inefficiency": (0.9, 0.95, 1.0, 1.05, 1.1),
    "vector_inefficiency": (0.85, 0.92, 1.0, 1.08, 1.15),
    "dma_bytes_per_us": (0.9, 0.95, 1.0, 1.05, 1.1),
    "dma_latency_us": (0.5, 0.75, 1.0, 1.5),
    "launch_us": (0.7, 1.0, 1.3),
}
"""The constants that calibration may change, with the factors it tries."""


def mean_log_error(errors: Iterable[float]) -> float:
    """Mean absolute logarithmic error of latency ratios."""
    values = [abs(error) for error in errors]
    return sum(values) / len(values)


@dataclass(frozen=True)
class Trial:
    """Logarithmic latency errors of all kernels with one constant changed."""

    constant: str
    factor: float
    errors: tuple[float, ...]


def _log_errors(kernels: Sequence[MeasuredKernel], device: DeviceConstants) -> tuple[float, ...]:
    return tuple(
        math.log(predict(kernel.program, device).latency_ms / kernel.measurement.latency_ms) for kernel in kernels
    )


def _trials(kernels: Sequence[MeasuredKernel], device: DeviceConstants) -> list[Trial]:
    return [
        Trial(name, factor, _log_errors(kernels, scaled(device, {name: factor})))
        for name, factors in FREE_CONSTANTS.items()
        for factor in factors
    ]


def scaled(device: DeviceConstants, factors: Mapping[str, float]) -> DeviceConstants:
    """The device with some constants multiplied."""
    return replace(device, **{name: getattr(device, name) * factor for name, factor in factors.items()})


def _best_factors(trials: Sequence[Trial], chosen: Callable[[int], bool]) -> dict[str, float]:
    """For each constant the factor with the least mean error over the chosen kernels; ties stay at 1."""
    best: dict[str, float] = {}
    for name in FREE_CONSTANTS:
        candidates = sorted(
            (trial for trial in trials if trial.constant == name), key=lambda trial: abs(trial.factor - 1)
        )
        best[name] = min(
            candidates,
            key=lambda trial: round(
                mean_log_error(error for number, error in enumerate(trial.errors) if chosen(number)), 4
            ),
        ).factor
    return best


@dataclass(frozen=True)
class HeldOut:
    """Errors of kernels predicted with constants fitted without their task.

    Attributes:
        errors: Signed relative latency error by kernel name.
    """

    errors: Mapping[str, float]

    @property
    def median_error(self) -> float:
        """Median absolute relative error."""
        return statistics.median(abs(error) for error in self.errors.values())


def leave_one_task_out(kernels: Sequence[MeasuredKernel], target: str | DeviceConstants = "trn1") -> HeldOut:
    """Refits the free constants without each task in turn and predicts that task's kernels with them.

    This covers the constants alone, not the choice of the model's rules, so it is still optimistic.

    Args:
        kernels: Kernels of at least two tasks.
        target: Device to start from.

    Raises:
        UserError: If there are fewer than two tasks.
    """
    tasks = list(dict.fromkeys(kernel.task for kernel in kernels))
    if len(tasks) < 2:
        raise UserError("a leave-one-task-out error needs measured kernels of at least two tasks")
    device = device_constants(target)
    trials = _trials(kernels, device)
    errors: dict[str, float] = {}
    for task in tasks:
        factors = _best_factors(trials, lambda number, task=task: kernels[number].task != task)  # type: ignore[misc]
        fitted = scaled(device, factors)
        for kernel in kernels:
            if kernel.task == task:
                errors[kernel.name] = predict(kernel.program, fitted).latency_ms / kernel.measurement.latency_ms - 1.0
    return HeldOut(errors)


def calibrate(
    kernels: Sequence[MeasuredKernel], target: str | DeviceConstants = "trn1", name: str = ""
) -> DeviceConstants:
    """Fits the free constants to measurements, one after the other, each at its best factor.

    Args:
        kernels: Kernels with measurements from one device.
        target: Device to start from.
        name: Name of the resulting device profile.

    Returns:
        Constants marked as calibrated; save them with
        :func:`accelopt_ray.nki_sim.cost.constants.save_device_profile`.

    Raises:
        UserError: If there is no kernel.
    """
    if not kernels:
        raise UserError("there is no measured kernel to calibrate with; pass a CSV of measurements")
    device = device_constants(target)
    best = mean_log_error(_log_errors(kernels, device))
    fitted: list[str] = []
    for constant, factors in FREE_CONSTANTS.items():
        for factor in factors:
            candidate = scaled(device, {constant: factor})
            error = mean_log_error(_log_errors(kernels, candidate)) if factor != 1.0 else best
            if error < best - 1e-4:
                best, improved = error, candidate
                fitted.append(constant)
            else:
                continue
            chosen = improved
        if constant in fitted:
            device = chosen
    sources = {**device.sources, **dict.fromkeys(fitted, f"fitted to {len(kernels)} measured kernels")}
    return replace(device, name=name or f"{device.name}-calibrated", calibrated=True, sources=sources)


ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "no deduplication or hoisting": {"deduplicate": False},
    "hoist out of thrashing nests too": {"keep_thrashing_nests": False},
    "no loop fusion": {"fuse_loops": False},
    "no merging of short loops": {"merge_short_loops": False},
    "whole-tile units": {"sub_tile_units": False},
    "infinite SBUF": {"infinite_sbuf": True},
    "strict in-order engines": {"backfill_gaps": 0},
    "no cross-engine delay": {"cross_engine_delay": False},
    "no DMA latency": {"dma_latency": False},
    "no cost of short DMA runs": {"short_run_cost": False},
    "no PSUM operands": {"psum_operands": False},
    "unlimited PSUM": {"psum_limit": False},
}
"""Rules of the model by name, with the options that switch each off."""


@dataclass(frozen=True)
class Ablation:
    """The model without one rule.

    Attributes:
        rule: What was switched off; "full model" for none.
        latency_error: Mean absolute logarithmic latency error.
        hbm_error: The same for HBM bytes read plus written, where measured; None when nowhere.
    """

    rule: str
    latency_error: float
    hbm_error: float | None


def ablate(kernels: Sequence[MeasuredKernel], target: str | DeviceConstants = "trn1") -> list[Ablation]:
    """The full model's error and the error without each rule."""
    results = []
    for rule, changes in {"full model": {}, **ABLATIONS}.items():
        table = compare(kernels, target, replace(ModelOptions(), **changes))
        latency = mean_log_error(math.log1p(entry.latency_error) for entry in table.comparisons)
        ratios = [
            math.log(predicted / measured)
            for entry in table.comparisons
            if (measured := hbm_bytes(entry.measurement.counters))
            and (predicted := hbm_bytes(entry.prediction.counters))
        ]
        results.append(Ablation(rule, latency, mean_log_error(ratios) if ratios else None))
    return results
