"""Named random streams: every random choice of a search has its own.

A choice draws from the stream of its own name, never from a shared generator, so its value depends on the run's seed
and on what is being chosen, and not on the order in which replies and measurements happen to arrive.
"""

from __future__ import annotations

import hashlib
import random


def stream_seed(seed: int, *name: str | int) -> int:
    """Returns the 63-bit seed of a named stream.

    Args:
        seed: The run's seed.
        *name: Parts of the stream's name, for instance ``("memory", "silu", 3)``. Parts are kept apart: ``("ab", "c")``
            and ``("a", "bc")`` are different streams.
    """
    parts = [str(seed), *(str(part) for part in name)]
    framed = "".join(f"{len(part)}:{part}," for part in parts)
    digest = hashlib.sha256(framed.encode()).digest()
    # 63 bits: endpoints and Parquet columns take signed 64-bit integers.
    return int.from_bytes(digest[:8], "big") >> 1


def stream(seed: int, *name: str | int) -> random.Random:
    """Returns a fresh generator for a named stream; see :func:`stream_seed`."""
    return random.Random(stream_seed(seed, *name))
