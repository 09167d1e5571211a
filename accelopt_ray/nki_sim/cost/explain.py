"""Why a kernel takes as long as it does, as plain data."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from accelopt_ray.nki_sim.cost.constants import DeviceConstants
from accelopt_ray.nki_sim.cost.engines import ENGINE_NAMES
from accelopt_ray.nki_sim.cost.residency import RELOAD, SAVE, Steps
from accelopt_ray.nki_sim.cost.schedule import Timeline
from accelopt_ray.nki_sim.cost.value_numbering import Events
from accelopt_ray.nki_sim.program import Access, Program, Space

TOP_INSTRUCTIONS = 12
DEPENDENCY_BOUND = 1.5
"""A kernel that runs this much longer than its busiest engine is bound by waiting, not by an engine."""


def explain(
    program: Program, events: Events, steps: Steps, timeline: Timeline, device: DeviceConstants, latency_us: float
) -> dict[str, Any]:
    """Collects busy times, the critical path, traffic by tensor and memory use.

    Args:
        program: The rewritten program.
        events: What is executed.
        steps: The same with saves and reloads.
        timeline: When it ran.
        device: Device constants.
        latency_us: Predicted latency including the launch.

    Returns:
        ``busy_ms`` by engine, ``bottleneck``, ``launch_ms``, ``critical_path`` (what the end of the
        kernel waited for: opcode, engine, source line, milliseconds, executions; most time first), ``hbm_bytes`` by
        tensor (read, written, spilled, reloaded), ``sbuf`` and ``psum`` use, ``device`` and whether it is calibrated.
        Of a program whose steady state was extended, everything but ``busy_ms`` describes the part that was simulated,
        ``extended_from_ms`` long.
    """
    busy = {name: timeline.busy_us[number] / 1e3 for number, name in enumerate(ENGINE_NAMES)}
    busiest = max(busy, key=lambda name: busy[name])
    stalled = timeline.total_us / 1e3 > DEPENDENCY_BOUND * busy[busiest]
    return {
        "device": device.name,
        "calibrated": device.calibrated,
        "busy_ms": busy,
        "launch_ms": device.launch_us / 1e3,
        "busiest": busiest,
        "bottleneck": "dependencies" if stalled else busiest,
        "critical_path": _critical_path(program, events, steps, timeline),
        "hbm_bytes": _traffic(program, events, steps),
        "sbuf": {
            "capacity_bytes_per_partition": device.sbuf_bytes,
            "peak_bytes_per_partition": steps.peak_bytes,
            "occupancy": [
                {"time_ms": timeline.start[step] / 1e3, "bytes_per_partition": used}
                for step, used in steps.occupancy
                if step < len(timeline.start)
            ],
        },
        "psum": {
            "capacity_bytes_per_partition": device.psum_bytes,
            "peak_bytes_per_partition": steps.psum_peak_bytes,
        },
        "spill": {"save_bytes": steps.spill_save_bytes, "reload_bytes": steps.spill_reload_bytes,
                  "reissued_load_bytes": steps.reissued_bytes},
    }  # fmt: skip


def step_label(program: Program, events: Events, steps: Steps, step: int) -> tuple[str, int]:
    """Name and source line of a step."""
    op, reference = steps.op[step], steps.reference[step]
    if op in (SAVE, RELOAD):
        buffer = program.buffers[events.storage_buffer[reference]]
        loaded = op == RELOAD and events.storage_loader[reference] >= 0
        name = "spill save" if op == SAVE else ("load again" if loaded else "spill reload")
        return f"{name} {buffer.name or buffer.id}", buffer.line
    instruction = events.operations[op].instruction
    return str(instruction.opcode), instruction.line


def _critical_path(program: Program, events: Events, steps: Steps, timeline: Timeline) -> list[dict[str, Any]]:
    if not timeline.end:
        return []
    time: defaultdict[tuple[str, str, int], float] = defaultdict(float)
    times: Counter[tuple[str, str, int]] = Counter()
    step = max(range(len(timeline.end)), key=lambda number: timeline.end[number])
    end = timeline.end[step]
    for _ in range(len(timeline.end)):
        cause = timeline.cause[step]
        begin = min(timeline.end[cause], end) if cause >= 0 else 0.0
        label, line = step_label(program, events, steps, step)
        key = (label, ENGINE_NAMES[timeline.engine[step]], line)
        time[key] += end - begin
        times[key] += 1
        if cause < 0:
            break
        step, end = cause, begin
    ranked = sorted(time, key=lambda key: -time[key])[:TOP_INSTRUCTIONS]
    return [
        {"instruction": label, "engine": engine, "line": line, "time_ms": time[label, engine, line] / 1e3,
         "executions": times[label, engine, line]}
        for label, engine, line in ranked
    ]  # fmt: skip


def _traffic(program: Program, events: Events, steps: Steps) -> dict[str, dict[str, int]]:
    traffic: dict[str, dict[str, int]] = {}

    def entry(buffer_id: int) -> dict[str, int]:
        buffer = program.buffers[buffer_id]
        name = buffer.name or f"tensor {buffer_id} (line {buffer.line})"
        return traffic.setdefault(
            name, {"read_bytes": 0, "write_bytes": 0, "spill_save_bytes": 0, "spill_reload_bytes": 0}
        )

    for op, times in Counter(events.op).items():
        operation = events.operations[op]
        tally = operation.price.tally
        source = operation.instruction.operands.get("src")
        if tally.hbm_read_bytes and isinstance(source, Access):
            entry(source.buffer)["read_bytes"] += times * tally.hbm_read_bytes
        if tally.hbm_write_bytes:
            out = operation.instruction.outputs[0]
            entry(out.buffer)["write_bytes"] += times * tally.hbm_write_bytes
    for buffer_id, (saved, reloaded) in steps.spilled_buffers.items():
        if program.buffers[buffer_id].space is Space.SBUF:
            entry(buffer_id)["spill_save_bytes"] += saved
            entry(buffer_id)["spill_reload_bytes"] += reloaded
    for op, misses in steps.misses.items():
        operation = events.operations[op]
        source = operation.instruction.operands["src"]
        if isinstance(source, Access):
            entry(source.buffer)["read_bytes"] += misses
    return traffic
