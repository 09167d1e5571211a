"""The roofline: how fast a task could run on given hardware, and how close a kernel comes.

The formula is AccelOpt's: T* = max(bytes / bandwidth, matmul flops / matmul rate, vector flops / vector rate), with
every input and every output moved once, and percent of peak = T* / latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from nkibench.hardware import Hardware

BYTES_PER_ELEMENT = 4  # every task is fp32


@dataclass(frozen=True)
class Counts:
    """The work a task cannot avoid.

    Attributes:
        vector_flops: Elementwise operations; those on constants are left out, since they fuse into others.
        matmul_flops: Operations of matrix products, a multiply-add counting as two.
        elements: Elements of all inputs and outputs, each counted once.
    """

    vector_flops: float
    matmul_flops: float
    elements: float

    @property
    def hbm_bytes(self) -> float:
        """Bytes that must cross HBM."""
        return self.elements * BYTES_PER_ELEMENT


@dataclass(frozen=True)
class Bound:
    """The roofline time and what sets it.

    Attributes:
        latency_ms: T* in milliseconds.
        limit: ``memory``, ``matmul`` or ``vector``.
    """

    latency_ms: float
    limit: str


def bound(counts: Counts, hardware: Hardware) -> Bound:
    """Computes T* and names the resource that sets it."""
    seconds = {
        "memory": counts.hbm_bytes / hardware.hbm_bytes_per_s,
        "matmul": counts.matmul_flops / hardware.matmul_flops_per_s,
        "vector": counts.vector_flops / hardware.vector_flops_per_s,
    }
    limit = max(seconds, key=lambda name: seconds[name])
    return Bound(latency_ms=seconds[limit] * 1e3, limit=limit)


def peak_latency_ms(counts: Counts, hardware: Hardware) -> float:
    """Returns T* in milliseconds: no correct kernel can be faster."""
    return bound(counts, hardware).latency_ms


def percent_of_peak(counts: Counts, hardware: Hardware, latency_ms: float) -> float:
    """Returns 100 · T* / latency.

    Raises:
        ValueError: The latency is not a positive finite number.
    """
    if not (math.isfinite(latency_ms) and latency_ms > 0):
        raise ValueError(f"a latency must be a positive number of milliseconds, not {latency_ms}")
    return 100.0 * peak_latency_ms(counts, hardware) / latency_ms


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the geometric mean, in which NKIBench reports averages.

    Raises:
        ValueError: There are no values, or one is not positive and finite.
    """
    numbers = list(values)
    if not numbers:
        raise ValueError("the geometric mean of no values is undefined")
    if any(not (math.isfinite(value) and value > 0) for value in numbers):
        raise ValueError("a geometric mean needs positive finite values")
    return math.exp(math.fsum(math.log(value) for value in numbers) / len(numbers))
