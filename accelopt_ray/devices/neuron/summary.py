"""Profile summaries: what ``neuron-profile view --output-format summary-json`` says about one run.

The program prints one JSON object whose values are objects of metrics, one for each profiled core; kernels here run on
one core, so the first value counts. Field names and units are the profiler's own: times in seconds, ``*_percent`` as
fractions. A field that does not apply to a kernel is left out by the profiler and stays absent here.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from accelopt_ray.devices.faults import DeviceFault

_TOTAL_TIME = "total_time"
_SECONDS_TO_MS = 1e3
_SHOWN_CHARACTERS = 1000


@dataclass(frozen=True)
class ProfileSummary:
    """One run.

    Attributes:
        latency_ms: Total time on the device.
        counters: Every numeric field, by the profiler's name.
        output: What the profiler printed beside the summary.
    """

    latency_ms: float
    counters: Mapping[str, float]
    output: str = ""


def parse_summary(text: str) -> ProfileSummary:
    """Reads the profiler's output.

    Raises:
        DeviceFault: It is not JSON of that form, or lacks the total time.
    """
    try:
        summaries = json.loads(text)
    except ValueError as error:
        raise DeviceFault(f"the profiler printed no JSON ({error}): {text[:_SHOWN_CHARACTERS]!r}") from None
    metrics = next(iter(summaries.values()), None) if isinstance(summaries, dict) else None
    if not isinstance(metrics, dict):
        raise DeviceFault(f"the profiler's summary holds no metrics: {text[:_SHOWN_CHARACTERS]!r}")
    counters = {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    }
    total_s = counters.get(_TOTAL_TIME, 0.0)
    if total_s <= 0:
        raise DeviceFault(f"the profiler's summary has no {_TOTAL_TIME}; its fields are {', '.join(sorted(metrics))}")
    return ProfileSummary(total_s * _SECONDS_TO_MS, counters)


def summarise(profiler: Path, neff: Path, ntff: Path, timeout_s: float) -> ProfileSummary:
    """Has the profiler summarise one run.

    Args:
        profiler: ``neuron-profile``, or ``neuron-explorer``, which takes the folder that holds the two files.
        neff: Compiled kernel.
        ntff: Trace of the run.
        timeout_s: Time the program may take.

    Raises:
        DeviceFault: It crashes, hangs or prints something else than a summary.
    """
    command = [str(profiler), "view", "--output-format", "summary-json"]
    command += ["-d", str(neff.parent)] if profiler.name == "neuron-explorer" else ["-n", str(neff), "-s", str(ntff)]
    try:
        done = subprocess.run(
            command, cwd=neff.parent, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeviceFault(f"{profiler.name} did not end within {timeout_s:g} s") from None
    except OSError as error:
        raise DeviceFault(f"{profiler.name} could not be started: {error}") from None
    if done.returncode != 0:
        raise DeviceFault(
            f"{profiler.name} failed with exit code {done.returncode}: {done.stderr.strip()[-_SHOWN_CHARACTERS:]}"
        )
    return replace(parse_summary(done.stdout), output=done.stderr.strip())


def summarise_runs(argument: bytes) -> bytes:
    """Summarises several runs; called in a child process, so that a profiler that hangs is killed with its children.

    Args:
        argument: JSON with ``profiler``, ``timeout_s`` and ``runs``, a list of (NEFF, NTFF) paths.

    Returns:
        JSON object: ``summaries``, a list of (latency in milliseconds, counters), and ``output``; or the ``fault``.
    """
    request = json.loads(argument)
    try:
        summaries = [
            summarise(Path(request["profiler"]), Path(neff), Path(ntff), request["timeout_s"])
            for neff, ntff in request["runs"]
        ]
    except DeviceFault as fault:
        return json.dumps({"fault": str(fault)}).encode()
    answer = {
        "summaries": [(summary.latency_ms, dict(summary.counters)) for summary in summaries],
        "output": "\n".join(dict.fromkeys(summary.output for summary in summaries if summary.output)),
    }
    return json.dumps(answer).encode()
