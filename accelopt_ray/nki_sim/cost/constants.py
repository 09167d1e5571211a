"""Device constants of the cost model, as data, each with its source.

Clocks, memory sizes and documented instruction costs come from the AWS Neuron SDK documentation (architecture guides,
NKI instruction reference, DMA bandwidth guide). What the documents leave open is fitted to published trn1 profiles and
marked ``fitted``. trn2 and trn3 take the fitted overheads of trn1 unchanged; no measurement of them was used, so they
are marked uncalibrated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from accelopt_ray.outcome import UserError

_DOCUMENT = "AWS Neuron SDK architecture guide"
_NKI = "NKI instruction reference (nki.isa)"
_DMA = "NKI DMA bandwidth guide"
_FITTED = "fitted to published trn1 profiles"
_ASSUMED = "assumption"


@dataclass(frozen=True)
class DeviceConstants:
    """One hardware generation as the cost model sees it (one NeuronCore).

    Attributes:
        name: ``trn1``, ``trn2``, ``trn3`` or a device profile's name.
        generation: Hardware generation whose rules and peaks hold.
        calibrated: Whether the fitted constants come from measurements of this generation.
        tensor_ghz: Clock of the tensor engine.
        vector_ghz: Clock of the vector engine.
        scalar_ghz: Clock of the scalar engine.
        gpsimd_ghz: Clock of the GpSimd engine.
        sbuf_bytes: SBUF bytes per partition that tiles stay resident in.
        sbuf_reserve_bytes: Further bytes per partition that let transfers run ahead of their use.
        psum_bytes: PSUM bytes per partition.
        psum_bank_bytes: Bytes of one PSUM bank per partition.
        hbm_bytes_per_s: HBM peak bandwidth as the profiler states it (for the ratios it reports).
        dma_bytes_per_us: Achievable rate of all DMA engines together, reads plus writes.
        dma_latency_us: From trigger to usable data, beyond the transfer time.
        dma_minimum_us: Least time a transfer occupies its share of the queues (descriptor processing).
        dma_run_bytes: A contiguous run is never cheaper than this many bytes.
        dma_engines: DMA engines of one core; eight partitions each.
        minimum_cycles: Least initiation interval of an engine instruction.
        vector_overhead_cycles: Fixed cost of a vector instruction of at least 128 elements per partition.
        scalar_overhead_cycles: Fixed cost of a scalar instruction.
        gpsimd_overhead_cycles: Fixed cost of a GpSimd instruction.
        pe_inefficiency: Tensor engine time over its documented minimum.
        vector_inefficiency: Vector engine time over the time it reports as active.
        reciprocal_cycles: Vector cycles per element of a reciprocal.
        fp32_row_cycles: Tensor engine cycles per row of an fp32 matmul.
        semaphore_us: Delay until another engine may use a result.
        launch_us: Fixed time of a kernel before and after its instructions.
        vector_fast_modes: Whether 16-bit data runs at a multiple of the vector rate (trn2 and later).
        exclusive_vector_gpsimd: Whether VectorE and GpSimdE cannot use SBUF at the same time.
        sources: Where each number comes from.
    """

    name: str
    generation: str
    calibrated: bool
    tensor_ghz: float
    vector_ghz: float
    scalar_ghz: float
    gpsimd_ghz: float
    sbuf_bytes: int
    sbuf_reserve_bytes: int = 12 * 1024
    psum_bytes: int = 16384
    psum_bank_bytes: int = 2048
    hbm_bytes_per_s: float = 410e9
    dma_bytes_per_us: float = 255e3
    dma_latency_us: float = 2.0
    dma_minimum_us: float = 0.35
    dma_run_bytes: int = 256
    dma_engines: int = 16
    minimum_cycles: int = 64
    vector_overhead_cycles: float = 108.0
    scalar_overhead_cycles: float = 57.0
    gpsimd_overhead_cycles: float = 150.0
    pe_inefficiency: float = 1.17
    vector_inefficiency: float = 1.2
    reciprocal_cycles: float = 2.5
    fp32_row_cycles: int = 4
    semaphore_us: float = 0.2
    launch_us: float = 14.0
    vector_fast_modes: bool = False
    exclusive_vector_gpsimd: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def tensor_peak_flops(self) -> float:
        """Tensor engine peak in flop/s as the profiler counts it: two flops per cell and cycle."""
        return 2.0 * 128 * 128 * self.tensor_ghz * 1e9


_COMMON_SOURCES: dict[str, str] = {
    "tensor_ghz": _DOCUMENT,
    "vector_ghz": _DOCUMENT,
    "scalar_ghz": _DOCUMENT,
    "gpsimd_ghz": _DOCUMENT,
    "sbuf_reserve_bytes": "the compiler's limit less sbuf_bytes",
    "psum_bytes": _DOCUMENT,
    "psum_bank_bytes": _DOCUMENT,
    "dma_engines": _DMA,
    "minimum_cycles": _NKI,
    "fp32_row_cycles": _NKI,
    "vector_overhead_cycles": _FITTED,
    "scalar_overhead_cycles": _FITTED,
    "gpsimd_overhead_cycles": _NKI,
    "pe_inefficiency": _FITTED,
    "vector_inefficiency": _FITTED,
    "reciprocal_cycles": _FITTED,
    "dma_latency_us": _DMA,
    "dma_minimum_us": _FITTED,
    "dma_run_bytes": f"{_DMA}: severe loss below 256 bytes",
    "semaphore_us": _ASSUMED,
    "launch_us": _FITTED,
    "vector_fast_modes": _DOCUMENT,
    "exclusive_vector_gpsimd": _DOCUMENT,
}

TRN1 = DeviceConstants(
    name="trn1",
    generation="trn1",
    calibrated=True,
    tensor_ghz=2.8,
    vector_ghz=1.12,
    scalar_ghz=1.4,
    gpsimd_ghz=1.4,
    sbuf_bytes=164 * 1024,
    hbm_bytes_per_s=410e9,
    dma_bytes_per_us=255e3,
    exclusive_vector_gpsimd=True,
    sources={
        **_COMMON_SOURCES,
        "sbuf_bytes": f"{_FITTED}; the compiler's limit is 180,224 bytes",
        "hbm_bytes_per_s": "peak_flops_bandwidth_ratio in published trn1 profiles",
        "dma_bytes_per_us": f"{_FITTED}; {_DMA} gives 272 GB/s",
    },
)

TRN2 = DeviceConstants(
    name="trn2",
    generation="trn2",
    calibrated=False,
    tensor_ghz=2.4,
    vector_ghz=0.96,
    scalar_ghz=1.2,
    gpsimd_ghz=1.2,
    sbuf_bytes=196 * 1024,
    hbm_bytes_per_s=362.5e9,
    dma_bytes_per_us=345e3,
    vector_fast_modes=True,
    sources={
        **_COMMON_SOURCES,
        "sbuf_bytes": "compiler's limit 212,984 bytes, less the reserve fitted for trn1",
        "hbm_bytes_per_s": "Trainium2 specification, 2.9 TB/s for eight cores",
        "dma_bytes_per_us": f"{_DMA} gives 368 GB/s, scaled by the ratio fitted for trn1",
    },
)

TRN3 = DeviceConstants(
    name="trn3",
    generation="trn3",
    calibrated=False,
    tensor_ghz=2.4,
    vector_ghz=1.2,
    scalar_ghz=1.2,
    gpsimd_ghz=1.2,
    sbuf_bytes=228 * 1024,
    hbm_bytes_per_s=612.5e9,
    dma_bytes_per_us=495e3,
    vector_fast_modes=True,
    sources={
        **_COMMON_SOURCES,
        "sbuf_bytes": "compiler's limit 245,752 bytes, less the reserve fitted for trn1",
        "hbm_bytes_per_s": "Trainium3 specification, 4.9 TB/s for eight cores",
        "dma_bytes_per_us": f"{_DMA} gives 528 GB/s, scaled by the ratio fitted for trn1",
    },
)

DEVICES: Mapping[str, DeviceConstants] = {device.name: device for device in (TRN1, TRN2, TRN3)}


def device_constants(target: str | DeviceConstants) -> DeviceConstants:
    """Returns the constants of a target: a generation's name, a device profile's path or the constants themselves.

    Args:
        target: ``trn1``, ``trn2``, ``trn3``, a path of a file written by :func:`save_device_profile`, or constants.

    Raises:
        UserError: If the name is unknown or the file is not a device profile.
    """
    if isinstance(target, DeviceConstants):
        return target
    if target in DEVICES:
        return DEVICES[target]
    path = Path(target)
    if path.suffix == ".json":
        return load_device_profile(path)
    names = ", ".join(DEVICES)
    raise UserError(f"unknown device {target!r}; choose one of {names} or the path of a device profile (.json)")


def save_device_profile(constants: DeviceConstants, path: Path) -> None:
    """Writes constants as a JSON device profile that :func:`device_constants` accepts as a target."""
    document = {entry.name: getattr(constants, entry.name) for entry in fields(constants)}
    document["sources"] = dict(constants.sources)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def load_device_profile(path: Path) -> DeviceConstants:
    """Reads a device profile.

    Raises:
        UserError: If the file is missing, is not JSON or has unknown or wrongly typed fields.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the device profile {path}: {error}") from error
    if not isinstance(document, dict):
        raise UserError(f"the device profile {path} must hold a JSON object")
    base = DEVICES.get(str(document.get("based_on", "trn1")), TRN1)
    document.pop("based_on", None)
    known = {entry.name: getattr(base, entry.name) for entry in fields(base)}
    changes: dict[str, Any] = {}
    for name, value in document.items():
        if name not in known:
            raise UserError(f"the device profile {path} has an unknown field {name!r}")
        expected = type(known[name])
        if expected in (int, float):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
                raise UserError(f"field {name!r} of the device profile {path} must be a number that is not negative")
            changes[name] = int(value) if expected is int else float(value)
        elif isinstance(value, expected):
            changes[name] = value
        else:
            raise UserError(f"field {name!r} of the device profile {path} must be of type {expected.__name__}")
    return replace(base, **changes)
