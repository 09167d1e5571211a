"""Measuring a candidate against its parent on one core, so that a small gain can be believed.

Two latencies that were measured at different times on different cores differ by drift and by the cores. A candidate
that is about to enter the beam is therefore measured again in turns with its parent (A, B, A, B), and promoted only if
it is faster by a margin above what the turns differ among themselves.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Union

from accelopt_ray.devices.noise import Comparison, compare_interleaved
from accelopt_ray.devices.protocol import Artifact, Device, Failure, Limits, Measurement

TURNS = 3
PROMOTION_MARGIN = 0.01
"""Relative gain beyond the noise that a candidate has to show."""

Inputs = Sequence[Union[Path, float, int]]


def remeasure(
    device: Device, parent: Artifact, child: Artifact, inputs: Inputs, limits: Limits, turns: int = TURNS
) -> Union[Comparison, Failure, None]:
    """Measures both kernels in turns.

    Args:
        device: The core to measure both on.
        parent: The kernel that the candidate came from.
        child: The candidate.
        inputs: Inputs of both.
        limits: Bounds of each run.
        turns: How often each is measured.

    Returns:
        All latencies; the candidate's failure; None if it is the parent that fails, so that nothing can be said.
    """
    try:
        return compare_interleaved(
            lambda: _latency_ms(device, parent, inputs, limits, is_child=False),
            lambda: _latency_ms(device, child, inputs, limits, is_child=True),
            turns,
        )
    except _KernelFailed as failed:
        return failed.failure if failed.is_child else None


def as_details(comparison: Comparison) -> dict[str, object]:
    """A comparison as plain data, for the evaluation's details."""
    return {
        "parent_ms": list(comparison.parent_ms),
        "child_ms": list(comparison.child_ms),
        "parent_latency_ms": statistics.median(comparison.parent_ms),
        "speedup": comparison.speedup,
        "noise": comparison.noise,
        "promoted": comparison.promotes(PROMOTION_MARGIN),
    }


class _KernelFailed(Exception):
    """Carries a failure out of the turns."""

    def __init__(self, failure: Failure, is_child: bool) -> None:
        super().__init__(failure.error_text)
        self.failure = failure
        self.is_child = is_child


def _latency_ms(device: Device, artifact: Artifact, inputs: Inputs, limits: Limits, is_child: bool) -> float:
    measured = device.measure(artifact, inputs, limits)
    if isinstance(measured, Measurement):
        return measured.latency_ms
    raise _KernelFailed(measured, is_child)
