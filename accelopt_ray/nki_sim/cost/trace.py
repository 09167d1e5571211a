"""Export of a predicted schedule as a trace file that Perfetto and Chrome's tracing page open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelopt_ray.nki_sim.cost.constants import DeviceConstants, device_constants
from accelopt_ray.nki_sim.cost.engines import ENGINE_NAMES
from accelopt_ray.nki_sim.cost.explain import step_label
from accelopt_ray.nki_sim.cost.options import ModelOptions
from accelopt_ray.nki_sim.cost.predict import simulate
from accelopt_ray.nki_sim.program import Program

DEFAULT_EVENTS = 200_000


def trace_events(
    program: Program,
    target: str | DeviceConstants = "trn1",
    options: ModelOptions | None = None,
    limit: int = DEFAULT_EVENTS,
) -> dict[str, Any]:
    """The predicted schedule in the Trace Event format.

    Args:
        program: A traced kernel.
        target: Device as for :func:`accelopt_ray.nki_sim.cost.predict.predict`.
        options: Which rules of the model are on.
        limit: At most this many steps, from the beginning.

    Returns:
        An object with ``traceEvents``: one complete event per executed instruction or transfer (microseconds, one
        thread per engine, source line as an argument) and a counter track of SBUF use. ``otherData`` says that the
        times are simulated.
    """
    device = device_constants(target)
    run = simulate(program, device, options or ModelOptions())
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": f"NeuronCore ({device.name}, simulated)"}}
    ]
    for number, name in enumerate(ENGINE_NAMES):
        events.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": name}})
    shown = min(limit, len(run.steps.op))
    for step in range(shown):
        label, line = step_label(run.program, run.events, run.steps, step)
        start, end = run.timeline.start[step], run.timeline.end[step]
        events.append(
            {
                "name": label, "ph": "X", "pid": 1, "tid": run.timeline.engine[step], "ts": round(start, 4),
                "dur": round(end - start, 4), "args": {"line": line},
            }
        )  # fmt: skip
    for step, used in run.steps.occupancy:
        if step < shown:
            events.append(
                {"name": "SBUF bytes per partition", "ph": "C", "pid": 1, "ts": round(run.timeline.start[step], 4),
                 "args": {"bytes": used}}
            )  # fmt: skip
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "simulated": True,
            "device": device.name,
            "calibrated": device.calibrated,
            "latency_us": run.latency_us,
            "steps": len(run.steps.op),
            "steps_shown": shown,
        },
    }


def write_trace(program: Program, path: Path, target: str | DeviceConstants = "trn1") -> None:
    """Writes :func:`trace_events` as JSON."""
    path.write_text(json.dumps(trace_events(program, target)), encoding="utf-8")
