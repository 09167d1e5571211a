"""Which tiles are in SBUF when: spills, reloads and loads that are issued again.

Units are freed at their last use and the least recently used one is evicted when space runs out. Published profiles of
kernels that cycle through more data than SBUF holds show nearly every reuse missing, which least-recently-used
replacement gives and replacement by furthest next use does not. A tile that holds loaded data is dropped and loaded
again (counted as an HBM read); a computed one is saved once and reloaded (counted as spill).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from accelopt_ray.nki_sim.cost.value_numbering import Events

SAVE, RELOAD = -1, -2
"""Numbers of the two inserted operations among a schedule's steps."""

QUADRANT = 32
HORIZON = 128
"""Instructions that a spill decision looks ahead: a computed value read again so soon is not the one to save."""


@dataclass
class Steps:
    """What the engines are given, in order; parallel lists.

    Attributes:
        op: Operation number, :data:`SAVE` or :data:`RELOAD`.
        reference: Event number, or the storage that is saved or reloaded.
        frees: Storages whose space is free again once this step has ended (None for none).
        storage_size: SBUF bytes per partition that each storage is charged.
        storage_transfer: HBM bytes of saving or reloading each storage.
        spill_save_bytes: HBM bytes written to make room.
        spill_reload_bytes: HBM bytes read back.
        reissued_bytes: HBM bytes read because loaded tiles had been dropped.
        misses: Re-issued bytes by number of the operation that loads them.
        spilled_buffers: Bytes saved and reloaded by buffer.
        peak_bytes: Largest SBUF use in bytes per partition.
        psum_peak_bytes: Largest PSUM use in bytes per partition.
        occupancy: Samples of (step number, SBUF bytes per partition in use).
        largest_unit_bytes: Largest single piece, charged bytes per partition.
    """

    op: list[int] = field(default_factory=list)
    reference: list[int] = field(default_factory=list)
    frees: list[list[int] | None] = field(default_factory=list)
    storage_size: list[int] = field(default_factory=list)
    storage_transfer: list[int] = field(default_factory=list)
    spill_save_bytes: int = 0
    spill_reload_bytes: int = 0
    reissued_bytes: int = 0
    misses: dict[int, int] = field(default_factory=dict)
    spilled_buffers: dict[int, list[int]] = field(default_factory=dict)
    peak_bytes: int = 0
    psum_peak_bytes: int = 0
    occupancy: list[tuple[int, int]] = field(default_factory=list)
    largest_unit_bytes: int = 0


def charged_bytes(unit_bytes: int, partitions: int) -> int:
    """SBUF columns a tile takes, in bytes per partition.

    A tile may start at partition 0, 32, 64 or 96 when it is narrow enough, so narrow tiles share columns.
    """
    quadrants = min(4, -(-partitions // QUADRANT))
    return unit_bytes * (4 if quadrants == 3 else quadrants) // 4


def allocate(events: Events, partitions_of: dict[int, int], capacity: int | None) -> Steps:
    """Simulates SBUF over the events.

    Args:
        events: What is executed, in order.
        partitions_of: Partition extent of each on-chip buffer.
        capacity: SBUF bytes per partition, or None for no limit.

    Returns:
        The steps with saves and reloads inserted, and what they move.
    """
    steps = Steps()
    for bytes_per_partition, buffer in zip(events.storage_bytes, events.storage_buffer, strict=True):
        partitions = partitions_of.get(buffer, 0)
        steps.storage_size.append(charged_bytes(bytes_per_partition, partitions) if partitions else 0)
        steps.storage_transfer.append(bytes_per_partition * max(partitions, 1))
    last_use = _last_uses(events)
    frees = _frees(events, last_use)
    peak = _peak(events, steps, frees)
    sbuf_sizes = [size for size, space in zip(steps.storage_size, events.storage_space, strict=True) if space == 0]
    steps.largest_unit_bytes = max(sbuf_sizes, default=0)
    if capacity is None or peak <= capacity:
        steps.op, steps.reference, steps.frees = events.op, list(range(len(events.op))), frees
        steps.peak_bytes = peak
        return steps
    steps.op, steps.reference, steps.frees, steps.occupancy = [], [], [], []
    _evict(events, steps, frees, capacity)
    return steps


def _last_uses(events: Events) -> list[int]:
    last_use = [-1] * len(events.storage_bytes)
    for position, (reads, writes) in enumerate(zip(events.reads, events.writes, strict=True)):
        for storage in reads:
            last_use[storage] = position
        for storage in writes:
            last_use[storage] = position
    return last_use


def _frees(events: Events, last_use: list[int]) -> list[list[int] | None]:
    frees: list[list[int] | None] = [None] * len(events.op)
    for storage, position in enumerate(last_use):
        if position >= 0 and events.storage_space[storage] != 2:
            freed = frees[position]
            if freed is None:
                frees[position] = [storage]
            else:
                freed.append(storage)
    return frees


def _peak(events: Events, steps: Steps, frees: list[list[int] | None]) -> int:
    """Largest SBUF use when nothing is evicted; inputs are freed before outputs are placed. Notes the PSUM peak too."""
    live = bytearray(len(events.storage_bytes))
    size, space = steps.storage_size, events.storage_space
    used = peak = psum_used = psum_peak = 0
    sample = max(1, len(events.op) // 256)
    for position, writes in enumerate(events.writes):
        freed = frees[position]
        late = 0
        if freed is not None:
            for storage in freed:
                if space[storage] == 0:
                    if live[storage]:
                        used -= size[storage]
                    else:
                        late += size[storage]
        for storage in writes:
            if not live[storage]:
                live[storage] = 1
                if space[storage] == 0:
                    used += size[storage]
                elif space[storage] == 1:
                    psum_used += events.storage_bytes[storage]
        peak = max(peak, used)
        psum_peak = max(psum_peak, psum_used)
        used -= late
        if freed is not None:
            for storage in freed:
                if space[storage] == 1:
                    psum_used -= events.storage_bytes[storage]
        if position % sample == 0:
            steps.occupancy.append((position, used))
    steps.psum_peak_bytes = psum_peak
    return peak


def _evict(events: Events, steps: Steps, frees: list[list[int] | None], capacity: int) -> None:
    size, transfer, space = steps.storage_size, steps.storage_transfer, events.storage_space
    loader, buffer_of = events.storage_loader, events.storage_buffer
    resident: OrderedDict[int, int] = OrderedDict()
    saved = bytearray(len(size))
    started = bytearray(len(size))
    used = peak = 0
    out_op, out_reference, out_frees = steps.op, steps.reference, steps.frees
    sample = max(1, len(events.op) // 256)

    uses: list[list[int]] = [[] for _ in size]
    for position in range(len(events.op) - 1, -1, -1):
        for storage in events.reads[position]:
            uses[storage].append(position)

    def needed_soon(storage: int, position: int) -> bool:
        """Whether a computed value is read again within the horizon."""
        if loader[storage] >= 0:
            return False
        upcoming = uses[storage]
        while upcoming and upcoming[-1] < position:
            upcoming.pop()
        return bool(upcoming) and upcoming[-1] < position + HORIZON

    def make_room(need: int, pinned: set[int], position: int) -> None:
        nonlocal used
        kept: list[int] = []
        patient = True
        while used + need > capacity:
            if not resident:
                if not patient:
                    break
                patient = False  # everything is needed soon: evict the least recently used after all
                for victim in kept:
                    resident[victim] = size[victim]
                kept.clear()
                continue
            victim, bytes_ = resident.popitem(last=False)
            if victim in pinned or (patient and needed_soon(victim, position)):
                kept.append(victim)
                continue
            used -= bytes_
            if loader[victim] < 0 and not saved[victim]:
                saved[victim] = 1
                steps.spill_save_bytes += transfer[victim]
                steps.spilled_buffers.setdefault(buffer_of[victim], [0, 0])[0] += transfer[victim]
                out_op.append(SAVE)
                out_reference.append(victim)
                out_frees.append([victim])
            elif out_frees:
                freed = out_frees[-1]
                if freed is None:
                    out_frees[-1] = [victim]
                else:
                    out_frees[-1] = [*freed, victim]
        for victim in reversed(kept):
            resident[victim] = size[victim]
            resident.move_to_end(victim, last=False)

    for position, (op, reads, writes) in enumerate(zip(events.op, events.reads, events.writes, strict=True)):
        pinned: set[int] | None = None
        for storage in (*reads, *writes):  # a partial write needs the rest of what it writes into
            if space[storage]:
                continue
            if storage in resident:
                resident.move_to_end(storage)
            elif started[storage]:
                if pinned is None:
                    pinned = {*reads, *writes}
                if used + size[storage] > capacity:
                    make_room(size[storage], pinned, position)
                if loader[storage] >= 0:
                    steps.reissued_bytes += transfer[storage]
                    steps.misses[loader[storage]] = steps.misses.get(loader[storage], 0) + transfer[storage]
                else:
                    steps.spill_reload_bytes += transfer[storage]
                    steps.spilled_buffers.setdefault(buffer_of[storage], [0, 0])[1] += transfer[storage]
                out_op.append(RELOAD)
                out_reference.append(storage)
                out_frees.append(None)
                resident[storage] = size[storage]
                used += size[storage]
        freed = frees[position]
        if freed is not None:
            for storage in freed:
                if storage in resident:
                    used -= resident.pop(storage)
                    started[storage] = 2
        for storage in writes:
            if space[storage]:
                continue
            if started[storage] == 0:
                if pinned is None:
                    pinned = {*reads, *writes}
                if used + size[storage] > capacity:
                    make_room(size[storage], pinned, position)
                started[storage] = 1
                resident[storage] = size[storage]
                used += size[storage]
            else:
                saved[storage] = 0  # what was saved before is out of date
        out_op.append(op)
        out_reference.append(position)
        out_frees.append(freed)
        peak = max(peak, used)
        if freed is not None:
            for storage in freed:
                if started[storage] == 1 and storage in resident:
                    used -= resident.pop(storage)
        if position % sample == 0:
            steps.occupancy.append((len(out_op) - 1, used))
    steps.peak_bytes = peak
