"""Cost model: latency and profiler counters of a traced program, without running it.

The stages follow what a compiler and a device would do, one module each: loops are fused and merged (:mod:`.fusion`,
:mod:`.rewriting`), the loop nest is unrolled into a stream of instructions (:mod:`.stream`, :mod:`.engines`) over
pieces of tiles (:mod:`.pieces`), repeated work is removed (:mod:`.value_numbering`, :mod:`.thrashing`), SBUF is filled
and spilled (:mod:`.residency`), the engines and the DMA pipe are scheduled (:mod:`.schedule`), and the result is
counted and explained (:mod:`.counters`, :mod:`.explain`, :mod:`.confidence`, :mod:`.trace`). Of very long programs the
steady state is simulated and extended (:mod:`.steady_state`).
"""

from __future__ import annotations

from accelopt_ray.nki_sim.cost.constants import DEVICES, DeviceConstants, device_constants
from accelopt_ray.nki_sim.cost.options import ModelOptions
from accelopt_ray.nki_sim.cost.predict import Prediction, faster, predict

__all__ = ["DEVICES", "DeviceConstants", "ModelOptions", "Prediction", "device_constants", "faster", "predict"]
