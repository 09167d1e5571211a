"""Memory spaces and element types as kernels name them, and the sizes of tiles."""

from __future__ import annotations

from typing import Any

import numpy as np

from accelopt_ray.nki_sim import dtypes, errors
from accelopt_ray.nki_sim.builder import current
from accelopt_ray.nki_sim.symbolic import as_int

#: Bytes per partition that the compiler can use.
SBUF_USABLE_BYTES = {"trn1": 180_224, "trn2": 212_984, "trn3": 245_752}


PSUM_BYTES = 16_384


class MemorySpace(str):
    """``nl.sbuf`` and the like: compares equal to its name."""

    allocated = False

    def __call__(self, *_args: Any, **_kwargs: Any) -> MemorySpace:
        return self


class AllocatedSpace(MemorySpace):
    """A memory space with an address chosen by the kernel."""

    allocated = True


sbuf = MemorySpace("sbuf")


psum = MemorySpace("psum")


hbm = MemorySpace("hbm")


private_hbm = MemorySpace("private_hbm")


shared_hbm = MemorySpace("shared_hbm")


float32 = dtypes.DType("float32")


tfloat32 = dtypes.DType("tfloat32")


bfloat16 = dtypes.DType("bfloat16")


float16 = dtypes.DType("float16")


float8_e4m3 = dtypes.DType("float8_e4m3")


float8_e5m2 = dtypes.DType("float8_e5m2")


int8 = dtypes.DType("int8")


int16 = dtypes.DType("int16")


int32 = dtypes.DType("int32")


uint8 = dtypes.DType("uint8")


uint16 = dtypes.DType("uint16")


uint32 = dtypes.DType("uint32")


bool_ = dtypes.DType("uint8")


class fp32:
    """Limits of fp32."""

    min = float(np.finfo(np.float32).min)
    max = float(np.finfo(np.float32).max)


class _TileSize:
    """``nl.tile_size``: the hardware's limits on tiles."""

    pmax = 128
    psum_fmax = 512
    gemm_stationary_fmax = 128
    gemm_moving_fmax = 512
    bn_stats_fmax = 512
    psum_num_banks = 8
    psum_bank_fmax = 512

    @property
    def total_available_sbuf_size(self) -> int:
        """Usable bytes of SBUF per partition."""
        return SBUF_USABLE_BYTES[current().target]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise errors.unsupported(f"nl.tile_size.{name}")


tile_size = _TileSize()


class ParDim(int):
    """A size marked as the partition dimension."""


def par_dim(size: Any) -> ParDim:
    """Marks a dimension of a shape as the partition dimension."""
    return ParDim(as_int(size))
