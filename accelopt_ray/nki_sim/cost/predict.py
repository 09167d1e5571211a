"""Prediction of one kernel's latency and counters."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelopt_ray.nki_sim.cost.confidence import can_tell_apart, confidence
from accelopt_ray.nki_sim.cost.constants import DeviceConstants, device_constants
from accelopt_ray.nki_sim.cost.counters import count
from accelopt_ray.nki_sim.cost.engines import Pricer
from accelopt_ray.nki_sim.cost.explain import explain
from accelopt_ray.nki_sim.cost.fusion import fuse
from accelopt_ray.nki_sim.cost.options import ModelOptions
from accelopt_ray.nki_sim.cost.pieces import Pieces
from accelopt_ray.nki_sim.cost.residency import Steps, allocate
from accelopt_ray.nki_sim.cost.rewriting import rewrite
from accelopt_ray.nki_sim.cost.schedule import Timeline, schedule
from accelopt_ray.nki_sim.cost.steady_state import extend, extend_counters, shortened
from accelopt_ray.nki_sim.cost.stream import unroll
from accelopt_ray.nki_sim.cost.thrashing import hoisting_blocked
from accelopt_ray.nki_sim.cost.value_numbering import Events, number_values
from accelopt_ray.nki_sim.program import Program, Space

US_PER_MS = 1e3


@dataclass(frozen=True)
class Prediction:
    """What the model says about one kernel on one device.

    Attributes:
        latency_ms: Predicted latency in milliseconds.
        counters: The profiler's fields by name, in its units.
        confidence: Relative half-width of the latency: the true value is expected within ``latency_ms`` times
            ``1 / (1 + confidence)`` to ``1 + confidence`` in about two of three cases.
        explanation: Plain data: what bounds the kernel and where the time goes; see
            :func:`accelopt_ray.nki_sim.cost.explain.explain`.
    """

    latency_ms: float
    counters: dict[str, float]
    confidence: float
    explanation: dict[str, Any]


@dataclass(frozen=True)
class Simulation:
    """All intermediate results of one prediction, for the trace export and for tests."""

    program: Program
    events: Events
    steps: Steps
    timeline: Timeline
    device: DeviceConstants
    latency_us: float


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """The stages make some hundred thousand small lists and no cycles; scanning them would take most of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def simulate(program: Program, device: DeviceConstants, options: ModelOptions) -> Simulation:
    """Runs all stages of the model.

    Args:
        program: A traced kernel.
        device: Constants of the device.
        options: Which rules are on.

    Returns:
        The program as scheduled and when each step ran.
    """
    rewritten = rewrite(fuse(program) if options.fuse_loops else program, options)
    pricer = Pricer(rewritten.buffers, device, options)
    pieces = Pieces(rewritten, sub_tile_units=options.sub_tile_units)
    stream = unroll(rewritten, pieces, pricer)
    partitions = {
        buffer.id: buffer.shape[buffer.block_dims]
        for buffer in rewritten.buffers.values()
        if buffer.space is not Space.HBM
    }
    capacity = None if options.infinite_sbuf else device.sbuf_bytes
    events = number_values(stream, rewritten, pricer, deduplicate=options.deduplicate)
    steps = allocate(events, partitions, capacity)
    if options.deduplicate and options.keep_thrashing_nests:
        blocked = hoisting_blocked(stream, events, steps)
        if blocked:
            events = number_values(stream, rewritten, pricer, deduplicate=True, blocked=blocked)
            steps = allocate(events, partitions, capacity)
    timeline = schedule(events, steps, device, options)
    return Simulation(rewritten, events, steps, timeline, device, timeline.total_us + device.launch_us)


def predict(
    program: Program,
    target: str | DeviceConstants = "trn1",
    options: ModelOptions | None = None,
) -> Prediction:
    """Predicts latency and counters of a traced kernel without running it.

    Args:
        program: A traced kernel.
        target: ``trn1``, ``trn2``, ``trn3``, a device profile's path, or constants.
        options: Which rules are on; all by default.

    Returns:
        Latency, counters, confidence and explanation.

    Raises:
        UserError: If the target is unknown.
    """
    device, rules = device_constants(target), options or ModelOptions()
    shortening = shortened(program)
    with _without_garbage_collection():
        if shortening is None:
            return _summarise(simulate(program, device, rules))
        first = _summarise(simulate(shortening.first, device, rules))
        second = _summarise(simulate(shortening.second, device, rules))
    latency_ms = extend(first.latency_ms, second.latency_ms, shortening.weight)
    latencies = (first.latency_ms, second.latency_ms, latency_ms)
    return Prediction(
        latency_ms=latency_ms,
        counters=extend_counters(first.counters, second.counters, latencies, shortening.weight),
        confidence=second.confidence,
        explanation={
            **second.explanation,
            "busy_ms": {
                name: extend(first.explanation["busy_ms"][name], busy, shortening.weight)
                for name, busy in second.explanation["busy_ms"].items()
            },
            "extended_from_ms": second.latency_ms,
        },
    )


def _summarise(simulation: Simulation) -> Prediction:
    return Prediction(
        latency_ms=simulation.latency_us / US_PER_MS,
        counters=count(
            simulation.program,
            simulation.events,
            simulation.steps,
            simulation.timeline,
            simulation.device,
            simulation.latency_us,
        ),
        confidence=confidence(
            simulation.program, simulation.events, simulation.steps, simulation.timeline, simulation.device
        ),
        explanation=explain(
            simulation.program,
            simulation.events,
            simulation.steps,
            simulation.timeline,
            simulation.device,
            simulation.latency_us,
        ),
    )


def faster(first: Prediction, second: Prediction) -> bool | None:
    """Whether the first of two variants of one task is predicted to be faster.

    Args:
        first: Prediction of one variant.
        second: Prediction of the other.

    Returns:
        True or False, or None for no predicted difference: the latencies lie closer together than the model can tell
        apart.
    """
    if not can_tell_apart(first.latency_ms, second.latency_ms, max(first.confidence, second.confidence)):
        return None
    return first.latency_ms < second.latency_ms
