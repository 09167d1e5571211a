"""The profiler's counters, under its own field names.

The counting rules were derived from published trn1 profiles, which they reproduce to the byte where the executed
instructions are the same: DMA bytes count in full, engine accesses to SBUF and PSUM for one partition, an fp32 matmul
as two passes, and what is stored to or loaded from HBM also as an SBUF access.
"""

from __future__ import annotations

from collections import Counter

from accelopt_ray.nki_sim.cost.constants import DeviceConstants
from accelopt_ray.nki_sim.cost.engines import DMA, GPSIMD, SCALAR, TENSOR, VECTOR
from accelopt_ray.nki_sim.cost.residency import Steps
from accelopt_ray.nki_sim.cost.schedule import Timeline
from accelopt_ray.nki_sim.cost.value_numbering import Events
from accelopt_ray.nki_sim.program import Opcode, Program, Role, Space


def count(
    program: Program, events: Events, steps: Steps, timeline: Timeline, device: DeviceConstants, latency_us: float
) -> dict[str, float]:
    """Counters of one execution.

    Args:
        program: The rewritten program.
        events: What is executed.
        steps: The same with saves and reloads.
        timeline: When it ran.
        device: Device constants.
        latency_us: Predicted latency including the launch.

    Returns:
        Values by the profiler's field names, in its units (bytes, flops, fractions, seconds); fields that a profile of
        such a kernel would not have are absent.
    """
    totals: dict[str, int] = dict.fromkeys(
        ("hbm_read_bytes", "hbm_write_bytes", "psum_read_bytes", "psum_write_bytes", "sbuf_read_bytes",
         "sbuf_write_bytes", "hardware_flops", "transpose_flops"), 0,
    )  # fmt: skip
    scratch = {
        buffer.id for buffer in program.buffers.values() if buffer.space is Space.HBM and buffer.role is Role.TEMPORARY
    }
    save, reload = steps.spill_save_bytes, steps.spill_reload_bytes
    instructions = [0] * 5
    matmuls = 0
    for op, times in Counter(events.op).items():
        operation = events.operations[op]
        tally = operation.price.tally
        for name in totals:
            totals[name] += times * getattr(tally, name)
        instructions[operation.price.engine] += times
        if operation.instruction.opcode is Opcode.MATMUL:
            matmuls += times
        # A kernel's own HBM scratch tensor counts as spill in the published profiles.
        if any(access.buffer in scratch for access in operation.instruction.outputs):
            save += times * tally.hbm_write_bytes
        source = operation.instruction.operands.get("src")
        if tally.hbm_read_bytes and getattr(source, "buffer", None) in scratch:
            reload += times * tally.hbm_read_bytes
    read = totals["hbm_read_bytes"] + steps.reissued_bytes + steps.spill_reload_bytes
    written = totals["hbm_write_bytes"] + steps.spill_save_bytes
    seconds = latency_us * 1e-6
    counters: dict[str, float] = {
        "hbm_read_bytes": read,
        "hbm_write_bytes": written,
        "spill_save_bytes": save,
        "spill_reload_bytes": reload,
        "sbuf_read_bytes": totals["sbuf_read_bytes"] + written,
        "sbuf_write_bytes": totals["sbuf_write_bytes"] + read,
        "peak_flops_bandwidth_ratio": device.tensor_peak_flops / device.hbm_bytes_per_s,
        "scalar_engine_active_time_percent": timeline.busy_us[SCALAR] / latency_us,
        "vector_engine_active_time_percent": timeline.busy_us[VECTOR] / latency_us,
        "gpsimd_engine_active_time_percent": timeline.busy_us[GPSIMD] / latency_us,
        "total_time": seconds,
        "tensor_engine_active_time_percent": timeline.busy_us[TENSOR] / latency_us,
        "dma_active_time_percent": min(1.0, timeline.busy_us[DMA] / latency_us),
        "mbu_estimated_percent": (read + written) / seconds / device.hbm_bytes_per_s,
        "tensor_engine_instruction_count": instructions[TENSOR],
        "vector_engine_instruction_count": instructions[VECTOR],
        "scalar_engine_instruction_count": instructions[SCALAR],
        "gpsimd_engine_instruction_count": instructions[GPSIMD],
    }
    for name in ("psum_read_bytes", "psum_write_bytes", "hardware_flops", "transpose_flops"):
        if totals[name]:
            counters[name] = totals[name]
    useful = totals["hardware_flops"] - totals["transpose_flops"]
    counters["mm_arithmetic_intensity"] = useful / (read + written) if read + written else 0.0
    counters["hfu_estimated_percent"] = totals["hardware_flops"] / (device.tensor_peak_flops * seconds)
    if matmuls:
        counters["matmul_instruction_count"] = matmuls
    transfers = instructions[DMA] + sum(1 for op in steps.op if op < 0)
    if transfers:
        counters["dma_transfer_count"] = transfers
        counters["dma_transfer_average_bytes"] = (read + written) / transfers
    return counters
