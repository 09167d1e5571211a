"""Predicted against measured: how far the simulator's latencies and counters can be trusted.

Measured kernels come from three places: the published profiles kept in the package (AccelOpt's repository, commit
47e29a7, Apache-2.0: ``experiments/full_complete_local/profile_results.csv``), set beside this project's own baselines or
beside the published kernels of a checkout; and a user's own CSV file.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Union

from accelopt_ray.nki_sim.cost.constants import DeviceConstants, device_constants
from accelopt_ray.nki_sim.cost.options import ModelOptions
from accelopt_ray.nki_sim.cost.predict import Prediction, predict
from accelopt_ray.nki_sim.program import Program
from accelopt_ray.nki_sim.tracer import TensorSpec, trace_kernel
from accelopt_ray.outcome import UserError
from nkibench.task import Task, list_tasks, load_suite, load_task

InputSpec = Union[tuple[tuple[int, ...], str], float, int]

PUBLISHED_FILE = "trn1_published_baselines.csv"
PUBLISHED_SOURCE = (
    "github.com/zhang677/AccelOpt, commit 47e29a7, experiments/full_complete_local/profile_results.csv (Apache-2.0)"
)
REQUIRED_COLUMNS = ("kernel", "entry", "inputs", "latency_ms")
OTHER_COLUMNS = ("name", "task", "target", "latency_kind", "shapes")

COUNTERS = (
    "hbm_read_bytes", "hbm_write_bytes", "spill_save_bytes", "spill_reload_bytes", "psum_read_bytes",
    "psum_write_bytes", "sbuf_read_bytes", "sbuf_write_bytes", "hardware_flops", "transpose_flops",
    "peak_flops_bandwidth_ratio", "mm_arithmetic_intensity", "hfu_estimated_percent",
    "scalar_engine_active_time_percent", "vector_engine_active_time_percent", "gpsimd_engine_active_time_percent",
)  # fmt: skip
"""Profiler fields that measured files may carry, under the profiler's names and in its units."""


@dataclass(frozen=True)
class Measurement:
    """What a device reported.

    Attributes:
        latency_ms: Measured latency in milliseconds.
        counters: Profiler fields that were reported.
    """

    latency_ms: float
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredKernel:
    """A kernel with a measurement to compare with.

    Attributes:
        name: Unique within the comparison.
        task: Kernels of one task belong together; a fold of the leave-one-task-out error leaves them out together.
        program: The traced kernel.
        measurement: What the device reported.
    """

    name: str
    task: str
    program: Program
    measurement: Measurement


@dataclass(frozen=True)
class Comparison:
    """One kernel's prediction beside its measurement.

    Attributes:
        name: The kernel.
        task: Its task.
        prediction: What the model says.
        measurement: What the device reported.
    """

    name: str
    task: str
    prediction: Prediction
    measurement: Measurement

    @property
    def latency_error(self) -> float:
        """Signed relative error of the predicted latency."""
        return self.prediction.latency_ms / self.measurement.latency_ms - 1.0


@dataclass(frozen=True)
class Fidelity:
    """Predictions beside measurements, with a summary.

    Attributes:
        comparisons: One per kernel.
        note: What the reader must know about the comparison.
    """

    comparisons: tuple[Comparison, ...]
    note: str = ""

    @property
    def median_error(self) -> float:
        """Median absolute relative latency error."""
        return statistics.median(abs(entry.latency_error) for entry in self.comparisons)

    @property
    def worst_error(self) -> float:
        """Largest absolute relative latency error."""
        return max(abs(entry.latency_error) for entry in self.comparisons)

    @property
    def rank_correlation(self) -> float:
        """Spearman's rank correlation of predicted and measured latency."""
        return spearman(
            [entry.prediction.latency_ms for entry in self.comparisons],
            [entry.measurement.latency_ms for entry in self.comparisons],
        )

    def within(self, counter: str, relative: float) -> tuple[int, int]:
        """How many kernels predict a counter within a relative bound, of how many that measured it."""
        measured = [entry for entry in self.comparisons if counter in entry.measurement.counters]
        close = sum(
            abs(entry.prediction.counters.get(counter, 0.0) - entry.measurement.counters[counter])
            <= relative * abs(entry.measurement.counters[counter])
            for entry in measured
        )
        return close, len(measured)

    def as_json(self) -> dict[str, Any]:
        """Plain data: per kernel latencies and counters, and the summary."""
        return {
            "kernels": [
                {
                    "kernel": entry.name,
                    "task": entry.task,
                    "predicted_latency_ms": entry.prediction.latency_ms,
                    "measured_latency_ms": entry.measurement.latency_ms,
                    "latency_error": entry.latency_error,
                    "confidence": entry.prediction.confidence,
                    "counters": {
                        name: {"predicted": entry.prediction.counters.get(name), "measured": value}
                        for name, value in entry.measurement.counters.items()
                    },
                }
                for entry in self.comparisons
            ],
            "median_latency_error": self.median_error,
            "worst_latency_error": self.worst_error,
            "rank_correlation": self.rank_correlation,
            "simulated": True,
            "note": self.note,
        }

    def as_text(self) -> str:
        """A table in Markdown with the summary below it."""
        header = "| kernel | predicted ms | measured ms | error | ± | HBM r+w | flops | scalar | vector |"
        lines = [header, "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
        for entry in self.comparisons:
            predicted, measured = entry.prediction.counters, entry.measurement.counters
            cells = [
                entry.name,
                f"{entry.prediction.latency_ms:.3f}",
                f"{entry.measurement.latency_ms:.3f}",
                f"{entry.latency_error:+.1%}",
                f"{entry.prediction.confidence:.0%}",
                _relative(hbm_bytes(predicted), hbm_bytes(measured)),
                _relative(predicted.get("hardware_flops"), measured.get("hardware_flops")),
                _shares(predicted, measured, "scalar_engine_active_time_percent"),
                _shares(predicted, measured, "vector_engine_active_time_percent"),
            ]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
        lines.append(
            f"Latency error: median {self.median_error:.1%}, worst {self.worst_error:.1%}; "
            f"rank correlation {self.rank_correlation:.3f} over {len(self.comparisons)} kernels."
        )
        if self.note:
            lines.append(self.note)
        return "\n".join(lines)


def hbm_bytes(counters: Mapping[str, float]) -> float | None:
    """HBM bytes read plus written, or None when they were not reported."""
    if "hbm_read_bytes" not in counters or "hbm_write_bytes" not in counters:
        return None
    return counters["hbm_read_bytes"] + counters["hbm_write_bytes"]


def _relative(predicted: float | None, measured: float | None) -> str:
    if measured is None:
        return "–"
    if predicted is None or not measured:
        return "absent"
    error = predicted / measured - 1.0
    return "exact" if predicted == measured else f"{error:+.1%}"


def _shares(predicted: Mapping[str, float], measured: Mapping[str, float], name: str) -> str:
    if name not in measured:
        return "–"
    return f"{predicted.get(name, 0.0):.3f} / {measured[name]:.3f}"


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation with mean ranks for ties; 1 for fewer than two values."""
    if len(first) < 2:
        return 1.0
    a, b = _ranks(first), _ranks(second)
    mean = (len(first) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return covariance / spread if spread else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda position: values[position])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop + 1 < len(order) and values[order[stop + 1]] == values[order[start]]:
            stop += 1
        for position in order[start : stop + 1]:
            ranks[position] = (start + stop) / 2 + 1
        start = stop + 1
    return ranks


# Measured kernels.


def published_measurements() -> dict[str, Measurement]:
    """The published trn1 profiles of the 14 baseline kernels, by task name (source: :data:`PUBLISHED_SOURCE`)."""
    text = (resources.files("accelopt_ray.nki_sim") / "data" / PUBLISHED_FILE).read_text(encoding="utf-8")
    return {row["task"]: _measurement(row, PUBLISHED_FILE) for row in csv.DictReader(text.splitlines())}


def own_baselines() -> list[MeasuredKernel]:
    """This project's baselines beside the published measurements of their counterparts.

    They compute the same at the same shapes with the same kind of inefficiencies but differ in detail.
    """
    measurements = published_measurements()
    names = [name for name in list_tasks() if name in measurements]
    return [_from_task(load_task(name), measurements[name]) for name in names]


def published_suite(path: Path) -> list[MeasuredKernel]:
    """The published kernels themselves, from a checkout of their suite.

    Args:
        path: Folder with the suite's ``summary.json``.

    Raises:
        UserError: If no kernel of the suite has a published measurement.
    """
    measurements = published_measurements()
    kernels = [_from_task(task, measurements[task.name]) for task in load_suite(path) if task.name in measurements]
    if not kernels:
        raise UserError(f"the suite {path} holds none of the kernels with published measurements; pass --measured instead")
    return kernels


def measured_file(path: Path, target: str = "trn1") -> list[MeasuredKernel]:
    """A user's measurements.

    The CSV has one row per kernel with the columns ``kernel`` (a Python file, relative to the CSV), ``entry`` (function
    name), ``inputs`` (arguments in order, separated by semicolons: ``float32[4096,1024]`` for a tensor or a number) and
    ``latency_ms``; optionally ``name`` and ``task``, and any of the profiler's fields in :data:`COUNTERS`.

    Args:
        path: The CSV file.
        target: Hardware generation the kernels were written for.

    Raises:
        UserError: If the file, a column or a value is wrong; the message names the row.
    """
    try:
        rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the measurements {path}: {error}") from error
    if not rows:
        raise UserError(f"the measurements {path} hold no rows; the first line must name the columns")
    columns = set(rows[0])
    missing = [name for name in REQUIRED_COLUMNS if name not in columns]
    if missing:
        raise UserError(f"the measurements {path} lack the column {missing[0]!r}; needed are {', '.join(REQUIRED_COLUMNS)}")
    unknown = sorted(str(name) for name in columns - {*REQUIRED_COLUMNS, *OTHER_COLUMNS, *COUNTERS})
    if unknown:
        raise UserError(f"the measurements {path} have an unknown column {unknown[0]!r}; see the documented columns")
    kernels = []
    for number, row in enumerate(rows, start=2):
        where = f"{path}, line {number}"
        file = path.parent / str(row["kernel"])
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{where}: cannot read the kernel {file}: {error}") from error
        name = row.get("name") or str(row["kernel"])
        program = trace_kernel(source, _specs(parse_inputs(str(row["inputs"]), where)), str(row["entry"]), target)
        kernels.append(MeasuredKernel(name, row.get("task") or name, program, _measurement(row, where)))
    return kernels


_TENSOR = re.compile(r"^(\w+)\[(\d+(?:,\d+)*)\]$")


def parse_inputs(text: str, where: str = "inputs") -> list[InputSpec]:
    """Parses ``float32[4096,1024];1e-5`` into shapes with dtypes and numbers.

    Raises:
        UserError: If an entry is neither.
    """
    specs: list[InputSpec] = []
    for entry in (part.replace(" ", "") for part in text.split(";")):
        match = _TENSOR.match(entry)
        if match:
            specs.append((tuple(int(extent) for extent in match[2].split(",")), match[1]))
            continue
        try:
            value = float(entry)
        except ValueError:
            raise UserError(f"{where}: {entry!r} is neither a tensor such as float32[128,512] nor a number") from None
        specs.append(int(value) if re.fullmatch(r"-?\d+", entry) else value)
    return specs


def _measurement(row: Mapping[str, str], where: str) -> Measurement:
    values: dict[str, float] = {}
    for name in ("latency_ms", *COUNTERS):
        text = row.get(name)
        if text is None or text.strip() == "":
            continue
        try:
            values[name] = float(text)
        except ValueError:
            raise UserError(f"{where}: the value {text!r} of {name} is not a number") from None
    latency = values.pop("latency_ms", 0.0)
    if not latency > 0 or math.isinf(latency):
        raise UserError(f"{where}: latency_ms must be a positive number of milliseconds")
    for name, value in values.items():
        if name.endswith("_percent") and not 0.0 <= value <= 1.0:
            raise UserError(f"{where}: {name} must be a fraction between 0 and 1, as in the profiler's JSON")
    return Measurement(latency, values)


def _from_task(task: Task, measurement: Measurement) -> MeasuredKernel:
    return MeasuredKernel(task.name, task.name, _traced_task(task), measurement)


@cache
def _traced(source: str, specs: tuple[InputSpec, ...], entry: str) -> Program:
    return trace_kernel(source, _specs(specs), entry, "trn1")


def _traced_task(task: Task) -> Program:
    return _traced(task.baseline_source(), task.input_specs(), task.entry)


def _specs(specs: Iterable[InputSpec]) -> list[TensorSpec | float | int]:
    return [TensorSpec(*spec) if isinstance(spec, tuple) else spec for spec in specs]


# Comparison, leave-one-out, ablation, calibration.


def compare(
    kernels: Sequence[MeasuredKernel],
    target: str | DeviceConstants = "trn1",
    options: ModelOptions | None = None,
    note: str = "",
) -> Fidelity:
    """Predicts every kernel and sets it beside its measurement.

    Args:
        kernels: Kernels with measurements.
        target: Device, device profile or constants.
        options: Which rules of the model are on.
        note: What the reader must know about the comparison.

    Raises:
        UserError: If there is no kernel.
    """
    if not kernels:
        raise UserError("there is no measured kernel to compare with; pass --suite or --measured")
    device = device_constants(target)
    return Fidelity(
        tuple(
            Comparison(kernel.name, kernel.task, predict(kernel.program, device, options), kernel.measurement)
            for kernel in kernels
        ),
        note,
    )


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
        candidates = sorted((trial for trial in trials if trial.constant == name), key=lambda trial: abs(trial.factor - 1))
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


def calibrate(kernels: Sequence[MeasuredKernel], target: str | DeviceConstants = "trn1", name: str = "") -> DeviceConstants:
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
            if (measured := hbm_bytes(entry.measurement.counters)) and (predicted := hbm_bytes(entry.prediction.counters))
        ]
        results.append(Ablation(rule, latency, mean_log_error(ratios) if ratios else None))
    return results
