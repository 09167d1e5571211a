"""Matrix products on several cores without the BLAS library's own threads.

The BLAS threads of one product wait for each other actively. On a machine that other processes keep busy, a product of
tenths of a milliseconds then takes tens of milliseconds. So BLAS runs single-threaded here, and large products are
divided among threads of our own, which sleep while they wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

Array = NDArray[Any]

#: Multiplications from which dividing a product pays for waking a thread (about half a millisecond of one core).
_WORTHWHILE = 1 << 25
#: Parts narrower than this lose BLAS efficiency.
_NARROWEST = 128


def _multiply(left: Array, right: Array, out: Array) -> None:
    with np.errstate(all="ignore"):  # NumPy keeps this setting per thread
        np.matmul(left, right, out=out)


class Workers:
    """Threads that share large products.

    Args:
        count: Number of threads that compute, the caller included.
    """

    def __init__(self, count: int):
        self._count = count
        self._pool: ThreadPoolExecutor | None = None

    def matmul(self, left: Array, right: Array, out: Array) -> None:
        """Computes ``left @ right`` into ``out``; the arrays may be stacks of matrices."""
        columns = out.shape[-1]
        parts = min(self._count, columns // _NARROWEST)
        if parts < 2 or out.size * left.shape[-1] < _WORTHWHILE or not self._start():
            np.matmul(left, right, out=out)
            return
        assert self._pool is not None
        edges = [columns * part // parts for part in range(parts + 1)]
        pending: list[Future[Any]] = [
            self._pool.submit(_multiply, left, right[..., low:high], out[..., low:high])
            for low, high in zip(edges[1:-1], edges[2:], strict=True)
        ]
        try:
            np.matmul(left, right[..., : edges[1]], out=out[..., : edges[1]])
        finally:
            for future in pending:
                future.result()

    def _start(self) -> bool:
        """Starts the threads on first use; tells whether there are any."""
        if self._pool is None and self._count > 1:
            pool = ThreadPoolExecutor(self._count - 1, thread_name_prefix="matmul")
            try:
                pool.submit(int).result()
            except RuntimeError:  # the process may not start threads (a limit on its number of tasks)
                self._count = 1
                return False
            self._pool = pool
        return self._pool is not None

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def usable_cores() -> int:
    """Returns the number of cores that this process may use, at most 4."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(4, len(affinity(0)) if affinity is not None else os.cpu_count() or 1)


@contextmanager
def computing(workers: Workers) -> Iterator[None]:
    """Keeps BLAS single-threaded and ends the workers' threads afterwards."""
    with threadpool_limits(limits=1, user_api="blas"), np.errstate(all="ignore"):
        try:
            yield
        finally:
            workers.close()
