"""Parallel search for faster accelerator kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelopt_ray.evaluation.profile import KernelProfile, profile_kernel

__all__ = ["KernelProfile", "profile_kernel"]


def __getattr__(name: str) -> Any:
    # Child processes import this package as well, and most need nothing that stands behind these names.
    if name in __all__:
        from accelopt_ray.evaluation import profile  # noqa: PLC0415

        return getattr(profile, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
