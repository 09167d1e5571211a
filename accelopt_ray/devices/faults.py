"""Faults of a device, as opposed to failures of a kernel."""

from __future__ import annotations


class DeviceFault(RuntimeError):
    """The device, its driver or its tools failed; the same kernel may well succeed elsewhere or later.

    Never raised for what a kernel is known to have done: the profiling service retries on another core and checks this
    one's health.
    """
