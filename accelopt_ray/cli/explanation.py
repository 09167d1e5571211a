"""A simulated kernel's bottleneck explanation as text, and its predicted schedule as a trace file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from accelopt_ray.evaluation.records import EvaluationJob

_BARS = " ▁▂▃▄▅▆▇█"
_SLOTS = 60
_TOP_TENSORS = 8


def lines(explanation: Mapping[str, Any], latency_ms: float, source: str) -> list[str]:
    """Renders an explanation for a terminal.

    Args:
        explanation: What the cost model's ``explain`` returns.
        latency_ms: Predicted latency, for shares.
        source: Kernel text, to show the lines on the critical path.
    """
    kind = "simulated" if explanation["calibrated"] else "simulated, uncalibrated"
    text = [f"bottleneck       {explanation['bottleneck']} ({kind})", "", f"busy ({kind})"]
    for engine, busy_ms in explanation["busy_ms"].items():
        share = busy_ms / latency_ms if latency_ms else 0.0
        text.append(f"  {engine:<8}{busy_ms:10.4f} ms  {share:6.1%}  {'█' * round(share * 40)}")
    text += ["", f"critical path ({kind}): what the end of the kernel waited for"]
    source_lines = source.splitlines()
    for item in explanation["critical_path"]:
        line = int(item["line"])
        code = source_lines[line - 1].strip() if 0 < line <= len(source_lines) else ""
        text.append(
            f"  {item['time_ms']:9.4f} ms  {item['executions']:>6} x {item['instruction']:<24}"
            f"{item['engine']:<8}line {line:<5}{code[:70]}"
        )
    text += ["", f"HBM traffic by tensor ({kind})          read      written      spilled     reloaded"]
    by_bytes = sorted(explanation["hbm_bytes"].items(), key=lambda item: -sum(item[1].values()))
    for name, moved in by_bytes[:_TOP_TENSORS]:
        columns = (moved[key] for key in ("read_bytes", "write_bytes", "spill_save_bytes", "spill_reload_bytes"))
        text.append(f"  {name:<28}" + "".join(f"{value / 1e6:10.2f} MB" for value in columns))
    if len(by_bytes) > _TOP_TENSORS:
        text.append(f"  and {len(by_bytes) - _TOP_TENSORS} more")
    sbuf = explanation["sbuf"]
    text += [
        "",
        f"SBUF             {sbuf['peak_bytes_per_partition'] / 1024:.1f} of "
        f"{sbuf['capacity_bytes_per_partition'] / 1024:.1f} KiB per partition at most ({kind}); over time:",
        "  " + _sparkline(sbuf["occupancy"], latency_ms, sbuf["capacity_bytes_per_partition"]),
    ]
    return text


def _sparkline(occupancy: Sequence[Mapping[str, float]], latency_ms: float, capacity: float) -> str:
    """One character per slot of time: the highest use within it, against the capacity."""
    highest = [0.0] * _SLOTS
    current = 0.0
    filled = 0
    for sample in sorted(occupancy, key=lambda item: item["time_ms"]):
        slot = min(_SLOTS - 1, int(sample["time_ms"] / latency_ms * _SLOTS)) if latency_ms else 0
        for passed in range(filled, slot):
            highest[passed] = max(highest[passed], current)
        filled = slot
        current = sample["bytes_per_partition"]
        highest[slot] = max(highest[slot], current)
    steps = len(_BARS) - 1
    return "".join(_BARS[min(steps, round(used / capacity * steps))] for used in highest)


def write_schedule(job: EvaluationJob, path: Path) -> None:
    """Writes the predicted schedule of a job's kernel as a trace file for Perfetto.

    Raises:
        UserError: The device predicts no schedule, the kernel does not compile, or the file cannot be written.
    """
    from accelopt_ray.devices.protocol import Failure, KernelRequest, TensorSpec
    from accelopt_ray.devices.registry import get_device
    from accelopt_ray.devices.simulator import SimulatorDevice
    from accelopt_ray.nki_sim import serialize
    from accelopt_ray.nki_sim.cost.trace import write_trace
    from nkibench.task import load_task

    device = get_device(job.device)
    if not isinstance(device, SimulatorDevice):
        raise UserError(f"{device.name} predicts no schedule: give --trace with a simulated device")
    task = load_task(job.task.location, dict(job.task.parameters))
    inputs = tuple(TensorSpec(*spec) if isinstance(spec, tuple) else spec for spec in task.input_specs())
    artifact = device.compile(KernelRequest(job.source, inputs, task.entry), job.limits)
    if isinstance(artifact, Failure):
        raise UserError(f"no trace: the kernel ends with {artifact.outcome}; mend it first")
    try:
        write_trace(serialize.loads(artifact.payload), path, device.cost_target)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another file with --trace") from None
