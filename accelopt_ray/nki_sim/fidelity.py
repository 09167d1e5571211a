"""Predicted against measured: how far the simulator's latencies and counters can be trusted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accelopt_ray.nki_sim.cost.constants import DeviceConstants, device_constants
from accelopt_ray.nki_sim.cost.options import ModelOptions
from accelopt_ray.nki_sim.cost.predict import Prediction, predict
from accelopt_ray.nki_sim.measurements import MeasuredKernel, Measurement
from accelopt_ray.outcome import UserError


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
