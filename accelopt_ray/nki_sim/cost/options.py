"""Switches of the cost model, one per modelling rule, so that each rule can be ablated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelOptions:
    """Which rules of the model are on.

    Attributes:
        deduplicate: Repeated loads, transposes and elementwise work on the same values are executed once.
        keep_thrashing_nests: Computed values are not hoisted out of a nest whose loads already thrash in SBUF.
        fuse_loops: A loop is fused with the sibling that consumes its tiles iteration by iteration.
        merge_short_loops: A short innermost affine loop of small instructions becomes one wider instruction each.
        sub_tile_units: SBUF is managed in pieces of tiles; off: whole tiles.
        infinite_sbuf: Nothing is ever spilled or dropped.
        backfill_gaps: Idle gaps per engine that a later instruction may fill (the compiler's software pipelining).
        cross_engine_delay: Results reach another engine only after a semaphore delay.
        dma_latency: Each transfer has a fixed latency.
        short_run_cost: A contiguous DMA run costs at least as much as a minimum number of bytes.
        psum_operands: A reduction or tensor_tensor may read a freshly evicted tile from PSUM instead of SBUF.
        psum_limit: PSUM has a finite number of bytes.
    """

    deduplicate: bool = True
    keep_thrashing_nests: bool = True
    fuse_loops: bool = True
    merge_short_loops: bool = True
    sub_tile_units: bool = True
    infinite_sbuf: bool = False
    backfill_gaps: int = 64
    cross_engine_delay: bool = True
    dma_latency: bool = True
    short_run_cost: bool = True
    psum_operands: bool = True
    psum_limit: bool = True
