"""Scans along the free axis: many rows at once, column by column, on transposed blocks.

``out[t] = (out[t - 1] op0 data0[t]) op1 data1[t]`` is sequential in ``t``. NumPy handles all rows of a column in one
call; transposed, a column is contiguous, and blocks of columns stay in the cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.numerics.operations import Operation

Array = NDArray[Any]

_BLOCK_ELEMENTS = 1 << 17


def scan(
    data0: Array,
    data1: Array,
    initial: Array,
    first: Operation,
    reverse_first: bool,
    second: Operation,
    reverse_second: bool,
    out: Array,
) -> None:
    """Scans along the last axis, in float32 and in the device's order.

    Args:
        data0: Shape (rows..., columns).
        data1: As ``data0``.
        initial: Shape (rows...): the value before the first column.
        first: The operation between the running value and ``data0``.
        reverse_first: Whether ``data0`` is its first operand.
        second: The operation between that and ``data1``.
        reverse_second: Whether ``data1`` is its first operand.
        out: As ``data0``; may share memory with the inputs.
    """
    columns = out.shape[-1]
    rows = out.size // columns if columns else 0
    if rows == 0:
        return
    block = max(16, min(columns, _BLOCK_ELEMENTS // rows))
    lead = out.ndim - 1
    to_columns = (lead, *range(lead))
    shape = out.shape[:-1]
    factors = np.empty((block, *shape), np.float32)
    terms = np.empty((block, *shape), np.float32)
    running = np.array(np.broadcast_to(initial, shape), dtype=np.float32)
    scratch = np.empty(shape, np.float32)
    for begin in range(0, columns, block):
        count = min(block, columns - begin)
        span = slice(begin, begin + count)
        np.copyto(factors[:count], data0[..., span].transpose(to_columns))
        np.copyto(terms[:count], data1[..., span].transpose(to_columns))
        for factor, term in zip(factors[:count], terms[:count], strict=False):
            if reverse_first:
                first(factor, running, scratch)
            else:
                first(running, factor, scratch)
            if reverse_second:
                second(term, scratch, term)
            else:
                second(scratch, term, term)
            running = term
        running = running.copy()
        np.copyto(out[..., span], terms[:count].transpose(*range(1, lead + 1), 0))
