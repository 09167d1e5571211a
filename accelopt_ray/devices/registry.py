"""Devices by the name given to ``--device``."""

from __future__ import annotations

import difflib

from accelopt_ray.devices.noisy import NoisyDevice
from accelopt_ray.devices.protocol import Device
from accelopt_ray.devices.simulator import SimulatorDevice
from accelopt_ray.outcome import UserError

SIMULATED = ("sim-trn1", "sim-trn2", "sim-trn3")


def get_device(name: str) -> Device:
    """Returns the device of that name.

    A simulator's name may be followed by noise to measure with, as in ``sim-trn1?relative=0.01&seed=3``; see
    :class:`~accelopt_ray.devices.noisy.Noise`.

    Raises:
        UserError: There is none, or this machine lacks what it needs.
    """
    if name in SIMULATED:
        return SimulatorDevice(name, name.removeprefix("sim-"))
    base, mark, options = name.partition("?")
    if mark and base in SIMULATED:
        return NoisyDevice.open(name, SimulatorDevice(base, base.removeprefix("sim-")), options)
    if name == "neuron":
        # Looked for on demand: most machines have no toolchain.
        from accelopt_ray.devices.neuron.opening import open_neuron  # noqa: PLC0415

        return open_neuron()
    close = difflib.get_close_matches(name, [*SIMULATED, "neuron"], n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(SIMULATED)}"
    raise UserError(f"unknown device '{name}': {hint}")
