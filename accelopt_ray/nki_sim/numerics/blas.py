"""Matrix products with a number of BLAS threads that suits the machine's load.

The threads of one BLAS product wait for each other actively. On idle cores that halves the time; on cores that other
processes keep busy, a product of tenths of a millisecond takes tens of milliseconds. Small products run on one thread,
and large ones on all cores only as long as that is faster. Products never run concurrently from several Python threads:
OpenBLAS gives wrong results there after its number of threads was lowered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]

Array = NDArray[Any]

#: Multiplications of a product (about 1.5 ms of one core) from which several threads may pay.
_LARGE = 1 << 27
#: Products that several threads may make slower, at first and per faster one, before the run stays on one thread.
_PATIENCE = 2
_TOLERATED_SHARE = 0.05


class Products:
    """Computes the products of one run.

    Attributes:
        threads: Threads that large products may use: what BLAS was configured for, at most the cores at hand.
    """

    def __init__(self) -> None:
        self.threads = 1
        self._libraries: list[Any] = []
        self._seconds_per_multiplication = 0.0
        self._losses = 0
        self._gains = 0

    def matmul(self, left: Array, right: Array, out: Array) -> None:
        """Computes ``left @ right`` into ``out``; the arrays may be stacks of matrices."""
        matrix = out.shape[-1] * out.shape[-2] * left.shape[-1]
        allowed = _PATIENCE + _TOLERATED_SHARE * self._gains
        if matrix < _LARGE or self.threads < 2 or self._losses >= allowed:
            np.matmul(left, right, out=out)
            return
        count = out.size * left.shape[-1]
        started = time.perf_counter()
        if not self._seconds_per_multiplication:
            np.matmul(left, right, out=out)
            self._seconds_per_multiplication = (time.perf_counter() - started) / count
            return
        self._use(self.threads)
        try:
            np.matmul(left, right, out=out)
        finally:
            self._use(1)
        if time.perf_counter() - started > self._seconds_per_multiplication * count:
            self._losses += 1
        else:
            self._gains += 1

    def _use(self, threads: int) -> None:
        for library in self._libraries:
            library.set_num_threads(threads)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keeps BLAS on one thread between large products, and restores its threads at the end."""
        controller = ThreadpoolController().select(user_api="blas")
        self._libraries = controller.lib_controllers
        configured = max((library.num_threads for library in self._libraries), default=1)
        self.threads = min(configured, _usable_cores())
        with controller.limit(limits=1), np.errstate(all="ignore"):
            yield


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
