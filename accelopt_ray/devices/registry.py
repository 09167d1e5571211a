"""Devices by the name given to ``--device``."""

from __future__ import annotations

import difflib
from pathlib import Path

from accelopt_ray.devices.noisy import NoisyDevice
from accelopt_ray.devices.protocol import Device
from accelopt_ray.devices.simulator import SimulatorDevice
from accelopt_ray.nki_sim.cost.constants import load_device_profile
from accelopt_ray.outcome import UserError

SIMULATED = ("sim-trn1", "sim-trn2", "sim-trn3")
_UNCALIBRATED = frozenset({"sim-trn2", "sim-trn3"})
_PROFILE_SUFFIX = ".json"


def latency_kind(device: str, simulated: bool) -> str:
    """Says what a latency is, wherever one is shown: ``measured``, ``simulated`` or ``simulated, uncalibrated``."""
    if not simulated:
        return "measured"
    return "simulated, uncalibrated" if device.partition("?")[0] in _UNCALIBRATED else "simulated"


def get_device(name: str) -> Device:
    """Returns the device of that name.

    A simulator's name may be followed by noise to measure with, as in ``sim-trn1?relative=0.01&seed=3``; see
    :class:`~accelopt_ray.devices.noisy.Noise`. The path of a device profile (``.json``), as ``calibrate`` writes it, is
    a simulator with that profile's constants.

    Raises:
        UserError: There is none, or this machine lacks what it needs.
    """
    if name in SIMULATED:
        return SimulatorDevice(name, name.removeprefix("sim-"))
    base, mark, options = name.partition("?")
    if mark and base in SIMULATED:
        return NoisyDevice.open(name, SimulatorDevice(base, base.removeprefix("sim-")), options)
    if name.endswith(_PROFILE_SUFFIX):
        path = Path(name).absolute()
        return SimulatorDevice(str(path), load_device_profile(path).generation, path)
    if name == "neuron":
        # Looked for on demand: most machines have no toolchain.
        from accelopt_ray.devices.neuron.opening import open_neuron  # noqa: PLC0415

        return open_neuron()
    close = difflib.get_close_matches(name, [*SIMULATED, "neuron"], n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(SIMULATED)}"
    raise UserError(f"unknown device '{name}': {hint}")
