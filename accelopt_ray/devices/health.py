"""Whether a device still computes: a known kernel with a known result."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from accelopt_ray.devices.child import ChildError
from accelopt_ray.devices.faults import DeviceFault
from accelopt_ray.devices.neuron.device import NeuronDevice
from accelopt_ray.devices.neuron.toolchain import Generation
from accelopt_ray.devices.protocol import Device, Failure, KernelRequest, Limits, TensorSpec

_SHAPE = (128, 128)
_LIMITS = Limits(timeout_s=60.0)

_GENERATION_A = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x[0:128, 0:128])
    nl.store(out[0:128, 0:128], value=nl.multiply(tile, 2.0))
    return out
"""

_GENERATION_B = """
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, 128), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x[0:128, 0:128])
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out[0:128, 0:128], src=tile)
    return out
"""


def check_health(device: Device, limits: Limits = _LIMITS) -> str:
    """Runs the known kernel and says what is wrong with the device; nothing if all is well.

    Args:
        device: The device, on the core of this process.
        limits: Bounds of each of the two stages.
    """
    is_b = isinstance(device, NeuronDevice) and device.toolchain.generation is Generation.B
    request = KernelRequest(_GENERATION_B if is_b else _GENERATION_A, (TensorSpec(_SHAPE),))
    with tempfile.TemporaryDirectory(prefix="accelopt-ray-health-") as name:
        folder = Path(name)
        values = np.arange(np.prod(_SHAPE), dtype=np.float32).reshape(_SHAPE)
        np.save(folder / "x.npy", values)
        try:
            artifact = device.compile(request, limits)
            ran = (
                artifact if isinstance(artifact, Failure) else device.run(artifact, [folder / "x.npy"], folder, limits)
            )
        except (DeviceFault, ChildError) as fault:
            return f"fault: {fault}"
        if isinstance(ran, Failure):
            return f"a known kernel failed: {ran.outcome}: {ran.error_text}"
        if len(ran.outputs) != 1 or not np.array_equal(np.load(ran.outputs[0]), values * 2):
            return "a known kernel gave a wrong result"
    return ""
