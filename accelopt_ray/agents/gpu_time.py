"""What a model costs that runs on GPUs paid for by the hour.

At each moment the calls in flight share the price of the GPUs evenly, so the costs of all calls add up to the price of
the time in which the model worked. Time in which it worked for nobody belongs to no call; :attr:`GpuMeter.idle_usd`
tells it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class GpuTimePrice:
    """A price of GPU time.

    Attributes:
        gpu_hour_usd: US dollars for one GPU and hour.
        gpus: GPUs that serve the model, all replicas together.
    """

    gpu_hour_usd: float
    gpus: int = 1

    @property
    def usd_per_s(self) -> float:
        """US dollars for a second of all of them."""
        return self.gpu_hour_usd * self.gpus / _SECONDS_PER_HOUR


class GpuCharge:
    """What one call has cost so far; final once its ``with`` block has ended."""

    def __init__(self) -> None:
        self.cost_usd = 0.0


class GpuMeter:
    """Splits the price of a model's GPUs among the calls in flight. Belongs to one event loop."""

    def __init__(self, price: GpuTimePrice, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts metering.

        Args:
            price: The price.
            clock: Seconds from some moment on.
        """
        self._usd_per_s = price.usd_per_s
        self._clock = clock
        self._charges: set[GpuCharge] = set()
        self._told_s = clock()
        self._idle_usd = 0.0

    @property
    def idle_usd(self) -> float:
        """Price of the time with no call in flight, from the start until now."""
        self.settle()
        return self._idle_usd

    @contextmanager
    def charged(self) -> Iterator[GpuCharge]:
        """Charges a call for its share while the block runs."""
        self.settle()
        charge = GpuCharge()
        self._charges.add(charge)
        try:
            yield charge
        finally:
            self.settle()
            self._charges.discard(charge)

    def settle(self) -> None:
        """Charges everything up to this moment."""
        now = self._clock()
        usd = (now - self._told_s) * self._usd_per_s
        self._told_s = now
        if not self._charges:
            self._idle_usd += usd
            return
        for charge in self._charges:
            charge.cost_usd += usd / len(self._charges)
