"""How far a prediction can be trusted: wider outside the regime that the model was calibrated in."""

from __future__ import annotations

import math
from collections import Counter

from accelopt_ray.nki_sim.cost.constants import DeviceConstants
from accelopt_ray.nki_sim.cost.engines import DMA, ENGINE_NAMES, GPSIMD, run_elements
from accelopt_ray.nki_sim.cost.pieces import accesses_of, item_bytes
from accelopt_ray.nki_sim.cost.residency import Steps
from accelopt_ray.nki_sim.cost.schedule import Timeline
from accelopt_ray.nki_sim.cost.value_numbering import Events
from accelopt_ray.nki_sim.program import Program, Space

BASE = 0.15
UNCALIBRATED = 0.35
SHORT_RUN_BYTES = 512
SMALL_ELEMENTS = 64
CROWDED = 0.75
"""Share of SBUF in use beyond which large tiles make residency a close call."""
PAIRWISE_SHARE = 0.25
"""Part of a prediction's half-width that does not cancel between two variants of one task, which share most errors."""


def can_tell_apart(first_ms: float, second_ms: float, half_width: float) -> bool:
    """Whether two predicted latencies of variants of one task differ by more than the model can be wrong about them.

    Args:
        first_ms: One latency.
        second_ms: The other.
        half_width: The larger of the two predictions' relative half-widths.
    """
    margin = 1.0 + PAIRWISE_SHARE * half_width
    return not 1.0 / margin <= first_ms / second_ms <= margin


def confidence(program: Program, events: Events, steps: Steps, timeline: Timeline, device: DeviceConstants) -> float:
    """Relative half-width of a latency prediction.

    The calibration kernels are fp32, built of full tiles, with instructions of 128 to 512 elements per partition and
    DMA runs of at least 512 bytes, none on GpSimd. Each departure adds to the width in proportion to the share of time
    it concerns; SBUF pieces above an eighth of its size add when it is nearly full, because what stays resident then
    flips with small changes.

    Args:
        program: The rewritten program.
        events: What is executed.
        steps: The same with saves and reloads.
        timeline: When it ran.
        device: Device constants.

    Returns:
        The half-width, for instance 0.2 for 20 %.
    """
    total = small = narrow = gpsimd = short = 0.0
    for op, times in Counter(events.op).items():
        operation = events.operations[op]
        price = operation.price
        time = times * price.busy_us
        total += time
        accesses = accesses_of(operation.instruction)
        if price.engine == DMA:
            far = [access for access in accesses if program.buffers[access.buffer].space is Space.HBM]
            runs = [
                run_elements(access, access.shape) * item_bytes(program.buffers[access.buffer].dtype) for access in far
            ]
            if runs and min(runs) < SHORT_RUN_BYTES:
                short += time
            continue
        if any(item_bytes(program.buffers[access.buffer].dtype) < 4 for access in accesses):
            narrow += time
        if price.engine == GPSIMD:
            gpsimd += time
        if max(math.prod(access.shape[1:]) for access in accesses) < SMALL_ELEMENTS:
            small += time
    width = BASE + (0.0 if device.calibrated else UNCALIBRATED)
    if total > 0:
        width += 0.6 * small / total + 0.3 * narrow / total + 0.4 * gpsimd / total + 0.4 * short / total
    moved = steps.spill_save_bytes + steps.spill_reload_bytes + steps.reissued_bytes
    crowded = moved > 0 or steps.peak_bytes > CROWDED * device.sbuf_bytes
    if crowded and steps.largest_unit_bytes * 8 > device.sbuf_bytes:
        width += 0.25
    busiest = max(timeline.busy_us[: len(ENGINE_NAMES)], default=0.0)
    if busiest > 0 and timeline.total_us > 1.6 * busiest:
        width += 0.1  # dependence stalls dominate, and their model is the coarsest part
    return round(width, 3)
