"""What a model costs that runs on GPUs paid for by the hour.

At each moment the calls in flight share the price of the GPUs evenly. Time in which the model worked for nobody is paid
for all the same: the call that ends such a pause bears it, so that budgets count it. The costs of all calls then add up
to the price of the whole time but for what came after the last call, which :attr:`GpuMeter.idle_usd` tells.
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

    def __init__(
        self,
        price: GpuTimePrice,
        clock: Callable[[], float] = time.monotonic,
        *,
        since_s: float | None = None,
        charge_idle: bool = True,
    ) -> None:
        """Starts metering.

        Args:
            price: The price.
            clock: Seconds from some moment on.
            since_s: When the GPUs began to be paid for, by the clock; now by default.
            charge_idle: Whether a call bears the pause before it; False where somebody else may have used the model
                meanwhile.
        """
        self._usd_per_s = price.usd_per_s
        self._clock = clock
        self._charge_idle = charge_idle
        self._charges: set[GpuCharge] = set()
        self._told_s = clock() if since_s is None else since_s
        self._idle_usd = 0.0

    @property
    def idle_usd(self) -> float:
        """Price of the time with no call in flight, until now, that no call bears."""
        self.settle()
        return self._idle_usd

    @contextmanager
    def charged(self) -> Iterator[GpuCharge]:
        """Charges a call for its share while the block runs."""
        self.settle()
        charge = GpuCharge()
        if self._charge_idle:
            charge.cost_usd, self._idle_usd = self._idle_usd, 0.0
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
