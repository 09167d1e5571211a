"""What of the Neuron toolchain this machine has: generation, versions, tools, and the core that is ours."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accelopt_ray.outcome import StrEnum, UserError

TOOLS_FOLDER = Path("/opt/aws/neuron/bin")
"""Where the package aws-neuronx-tools puts its programs."""

CORES_VARIABLE = "NEURON_RT_VISIBLE_CORES"
TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")
"""Holds the instance type on EC2, such as ``trn1.32xlarge``."""

_TIMEOUT_S = 15.0
_DISTRIBUTIONS = ("neuronx-cc", "nki", "nkipy", "spike", "nrtpy", "torch-neuronx")


class Generation(StrEnum):
    """Which of the two incompatible NKI languages kernels are written in."""

    A = "A"
    B = "B"


@dataclass(frozen=True)
class Toolchain:
    """The toolchain as found.

    Attributes:
        generation: ``A`` where ``neuronxcc.nki`` can be imported, else ``B``.
        hardware: ``trn1``, ``trn2`` or ``trn3``.
        profiler: ``neuron-profile``, or ``neuron-explorer`` where only that is there.
        runner: For generation B, the module that loads and runs a compiled kernel: ``nrtpy`` or ``spike``.
        versions: Installed distributions, by name, and what the profiler says of itself.
    """

    generation: Generation
    hardware: str
    profiler: Path
    runner: str
    versions: Mapping[str, str]


@dataclass(frozen=True)
class NeuronDevices:
    """What ``neuron-ls`` lists: chips and the cores on them together."""

    chips: int
    cores: int


def detect_toolchain() -> Toolchain:
    """Looks for the toolchain without importing any of it.

    Raises:
        UserError: A part of it is missing.
    """
    generation = detect_generation()
    runner = ""
    if generation is Generation.B:
        runner = next((name for name in ("nrtpy", "spike") if importlib.util.find_spec(name)), "")
        if not runner:
            raise UserError(
                "the module nki is installed but nothing that runs compiled kernels: install nkipy's spike (or nrtpy)"
            )
    profiler = find_tool("neuron-profile") or find_tool("neuron-explorer")
    if profiler is None:
        raise UserError("neither neuron-profile nor neuron-explorer was found: install aws-neuronx-tools")
    return Toolchain(generation, detect_hardware(), profiler, runner, _versions(profiler))


def detect_generation() -> Generation:
    """Says which generation's compiler can be imported; with both, A, which the benchmark's kernels are written in.

    Raises:
        UserError: Neither can.
    """
    # Asking for neuronxcc.nki itself would import neuronxcc here.
    compiler = importlib.util.find_spec("neuronxcc")
    folders = compiler.submodule_search_locations if compiler else None
    if any((Path(folder) / "nki").exists() for folder in folders or ()):
        return Generation.A
    if importlib.util.find_spec("nki"):
        return Generation.B
    raise UserError(
        "device 'neuron' needs the Neuron compiler: install neuronx-cc (see docs/trainium.md), or use sim-trn1"
    )


def detect_hardware() -> str:
    """Says which chip generation this machine has.

    Raises:
        UserError: It is no Trainium instance and the target variable is not set.
    """
    named = os.environ.get(TARGET_VARIABLE, "")
    try:
        named = named or PRODUCT_NAME.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        named = ""
    for hardware in ("trn1", "trn2", "trn3"):
        if named.startswith(hardware):
            return hardware
    raise UserError(
        f"this machine does not say which Trainium it is ({PRODUCT_NAME}: {named or 'nothing'}): set {TARGET_VARIABLE} "
        "to trn1, trn2 or trn3"
    )


def visible_core() -> str:
    """Returns the one core that this process may use, as the Neuron runtime names it.

    Raises:
        UserError: None is set, so that the runtime would take every core of the machine, or several are.
    """
    cores = os.environ.get(CORES_VARIABLE, "").strip()
    if not cores:
        raise UserError(f"{CORES_VARIABLE} is not set and every core would be taken: set it to one core, such as 0")
    if not cores.isdigit():
        raise UserError(f"{CORES_VARIABLE}={cores} is not one core: kernels are measured on exactly one, such as 0")
    return cores


def find_tool(name: str) -> Path | None:
    """Finds a program of aws-neuronx-tools on the path or where the package installs it."""
    found = shutil.which(name) or shutil.which(name, path=str(TOOLS_FOLDER))
    return Path(found) if found else None


def list_devices() -> NeuronDevices:
    """Asks ``neuron-ls --json-output`` for the devices of this machine.

    Raises:
        UserError: The program is missing, fails or prints something else.
    """
    tool = find_tool("neuron-ls")
    if tool is None:
        raise UserError("neuron-ls was not found: install aws-neuronx-tools")
    try:
        done = subprocess.run(
            [str(tool), "--json-output"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        devices = json.loads(done.stdout)
        return NeuronDevices(len(devices), sum(int(device["nc_count"]) for device in devices))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        raise UserError(f"{tool} gives no device list: load the Neuron driver (modprobe neuron)") from None


def _versions(profiler: Path) -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        done = subprocess.run(
            [str(profiler), "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        found[profiler.name] = " ".join(done.stdout.split())[:200]
    except (OSError, subprocess.SubprocessError):
        found[profiler.name] = "unknown"
    return found
