"""The doctor's look at the Neuron toolchain, one finding for each step of ``docs/trainium.md``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from accelopt_ray.cli.finding import Finding


def neuron_findings() -> Iterator[Finding]:
    """Goes through the steps in order; on a machine without any part of the toolchain that is one line.

    Yields:
        ``problem`` for a step that fails where an earlier one shows that this is meant to be a Trainium node.
    """
    from accelopt_ray.devices.neuron import toolchain

    nodes = sorted(Path("/dev").glob("neuron*"))
    if not nodes and toolchain.find_tool("neuron-ls") is None and not _has_compiler():
        yield Finding("neuron", "absent", "no Neuron device, compiler or tool: see docs/trainium.md for Trainium nodes")
        return
    yield _step("neuron devices", lambda: "{0.chips} chips, {0.cores} NeuronCores".format(toolchain.list_devices()))
    yield _step("neuron compiler", lambda: f"generation {toolchain.detect_generation()}")
    yield _step("neuron hardware", toolchain.detect_hardware)
    found = _step("neuron toolchain", lambda: _describe(toolchain.detect_toolchain()))
    yield found
    if found.state != "ok":
        return
    if toolchain.CORES_VARIABLE not in os.environ:
        detail = f"not assigned here; Ray assigns cores to profilers. Set {toolchain.CORES_VARIABLE}=0 to try one"
        yield Finding("neuron core", "absent", detail)
        return
    core = _step("neuron core", lambda: f"core {toolchain.visible_core()}")
    yield core
    if core.state == "ok":
        yield _known_kernel()


def _known_kernel() -> Finding:
    from accelopt_ray.devices.child import ChildError
    from accelopt_ray.devices.faults import DeviceFault
    from accelopt_ray.devices.health import check_health
    from accelopt_ray.devices.registry import get_device
    from accelopt_ray.outcome import UserError

    try:
        trouble = check_health(get_device("neuron"))
    except (UserError, DeviceFault, ChildError) as error:
        trouble = str(error)
    if trouble:
        return Finding("neuron kernel", "problem", " ".join(trouble.split())[:600])
    return Finding("neuron kernel", "ok", "a known kernel compiled, ran and gave the right values")


def _has_compiler() -> bool:
    from accelopt_ray.devices.neuron.toolchain import detect_generation
    from accelopt_ray.outcome import UserError

    try:
        detect_generation()
    except UserError:
        return False
    return True


def _describe(found: object) -> str:
    from accelopt_ray.devices.neuron.toolchain import Toolchain

    assert isinstance(found, Toolchain)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return f"{versions}; profiler {found.profiler}" + (f"; runner {found.runner}" if found.runner else "")


def _step(subject: str, look: Callable[[], str]) -> Finding:
    from accelopt_ray.outcome import UserError

    try:
        return Finding(subject, "ok", str(look()))
    except UserError as error:
        return Finding(subject, "problem", str(error))
