"""Peak rates of the accelerators, the constants of the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """Peak rates of one NeuronCore.

    Attributes:
        name: Short name, as in the device names (``sim-trn1``).
        label: What people call it.
        hbm_bytes_per_s: HBM bandwidth available to the core, reads and writes together.
        matmul_flops_per_s: fp32 rate of the tensor engine; a multiply-add counts as two.
        vector_flops_per_s: Rate of the vector and scalar engines together.
        source: Where the constants come from.
    """

    name: str
    label: str
    hbm_bytes_per_s: float
    matmul_flops_per_s: float
    vector_flops_per_s: float
    source: str


_TRN1 = Hardware(
    name="trn1",
    label="Trainium 1 (NeuronCore-v2)",
    hbm_bytes_per_s=410 * GIB,
    matmul_flops_per_s=23.75e12,
    vector_flops_per_s=2 * 128 * 1.12e9,  # two engines, 128 lanes each, 1.12 GHz
    source="AccelOpt's published roofline; 820 GiB/s per device shared by two cores",
)
_TRN2 = Hardware(
    name="trn2",
    label="Trainium 2 (NeuronCore-v3)",
    hbm_bytes_per_s=640e9,
    matmul_flops_per_s=19.75e12,
    vector_flops_per_s=550e9,
    source="AccelOpt paper, per-core constants for Trainium 2",
)

HARDWARE: Mapping[str, Hardware] = MappingProxyType({hardware.name: hardware for hardware in (_TRN1, _TRN2)})
