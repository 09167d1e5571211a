"""Opening the device ``neuron`` with whichever toolchain this machine has."""

from __future__ import annotations

from accelopt_ray.devices.neuron.device import NeuronDevice
from accelopt_ray.devices.neuron.generation_a import GenerationADevice
from accelopt_ray.devices.neuron.generation_b import GenerationBDevice
from accelopt_ray.devices.neuron.toolchain import Generation, detect_toolchain


def open_neuron() -> NeuronDevice:
    """Opens the core that was assigned to this process.

    Raises:
        UserError: Toolchain, Trainium or core are missing; the message says what to do.
    """
    toolchain = detect_toolchain()
    kind = GenerationADevice if toolchain.generation is Generation.A else GenerationBDevice
    return kind.open(toolchain)
