"""Running the steps on engine timelines and a shared DMA pipe.

Steps are placed in program order. An instruction starts when its operands are there, its destination has space and its
engine is free; it may also fill one of the engine's last idle gaps, which stands for the reordering a compiler does
between neighbouring iterations. Transfers share the DMA engines' total rate and may overtake each other, since each
waits for its own semaphore in one of many queues. How far loads run ahead is limited by SBUF space alone.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from accelopt_ray.nki_sim.cost.constants import DeviceConstants
from accelopt_ray.nki_sim.cost.engines import DMA, GPSIMD, VECTOR
from accelopt_ray.nki_sim.cost.options import ModelOptions
from accelopt_ray.nki_sim.cost.residency import SAVE, Steps
from accelopt_ray.nki_sim.cost.value_numbering import Events

BIN_US = 0.5


@dataclass
class Timeline:
    """When every step ran.

    Attributes:
        total_us: From the first instruction's issue to the last result in HBM, without the kernel's launch time.
        start: Start of each step in microseconds.
        end: End of each step.
        engine: Engine of each step.
        cause: Step that each step waited for last (-1 when it waited for none).
        busy_us: Active time per engine; for the DMA pipe its time at full rate.
    """

    total_us: float
    start: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    engine: list[int] = field(default_factory=list)
    cause: list[int] = field(default_factory=list)
    busy_us: list[float] = field(default_factory=list)


class _Pipe:
    """The DMA engines' common rate, handed out in bins of time.

    Full bins are skipped through links to the next one that may have room, shortened on the way (union-find), so a
    transfer costs about as many steps as it needs bins.
    """

    def __init__(self) -> None:
        self._used: list[float] = [0.0]
        self._next: list[int] = [0, 1]

    def transfer(self, ready: float, need: float) -> tuple[float, float]:
        """Takes ``need`` microseconds of the full rate from ``ready`` on; returns start and end."""
        used, following = self._used, self._next
        index = int(ready / BIN_US)
        while len(used) <= index:
            used.append(0.0)
            following.append(len(used))
        start, remaining = -1.0, need
        while True:
            while following[index] != index:
                following[index] = following[following[index]]
                index = following[index]
            if index == len(used):
                used.append(0.0)
                following.append(len(used))
            base = index * BIN_US
            room = BIN_US - used[index]
            if ready > base:
                room = min(room, base + BIN_US - ready)
            if start < 0.0 and room > 0.0:
                start = max(ready, base)
            if remaining <= room:
                used[index] += remaining
                return start, max(start + need, base + used[index])
            used[index] += room
            remaining -= room
            if used[index] >= BIN_US - 1e-9:
                following[index] = index + 1
            index += 1


def schedule(events: Events, steps: Steps, device: DeviceConstants, options: ModelOptions) -> Timeline:
    """Places all steps in time.

    Args:
        events: What is executed.
        steps: The same with saves and reloads, in order.
        device: Device constants.
        options: Which rules are on.

    Returns:
        Starts, ends and causes of all steps.
    """
    operations = events.operations
    price_engine = [operation.price.engine for operation in operations]
    least = device.minimum_cycles / device.vector_ghz / 1e3
    duration = [
        price.busy_us + (device.vector_inefficiency - 1.0) * max(0.0, price.busy_us - least)
        if (price := operation.price).engine == VECTOR
        else price.busy_us
        for operation in operations
    ]
    span = [operation.price.span_us for operation in operations]
    lane = list(price_engine)
    if device.exclusive_vector_gpsimd:
        lane = [VECTOR if engine == GPSIMD else engine for engine in lane]  # they take turns at SBUF's shared port
    [operation.is_store for operation in operations]
    is_load = [operation.is_load for operation in operations]
    semaphore = device.semaphore_us if options.cross_engine_delay else 0.0
    latency = device.dma_latency_us if options.dma_latency else 0.0
    max_gaps = options.backfill_gaps
    size, transfer, space = steps.storage_size, steps.storage_transfer, events.storage_space
    event_reads, event_writes = events.reads, events.writes
    # A wide PSUM result is produced and consumed bank by bank.
    psum_size = [min(size_, device.psum_bank_bytes) for size_ in events.storage_bytes]

    count = len(steps.op)
    starts, ends = [0.0] * count, [0.0] * count
    engines, causes = [0] * count, [-1] * count
    storages = len(size)
    available = [0.0] * storages
    writer_lane = [-1] * storages
    writer_step = [-1] * storages
    touched = [0.0] * storages
    toucher = [-1] * storages
    placed = bytearray(storages)
    lane_free = [0.0] * 5
    lane_last = [-1] * 5
    gaps: list[list[tuple[float, float]]] = [[] for _ in range(5)]
    shortest = [
        min((duration[op] for op in set(steps.op) if op >= 0 and lane[op] == engine), default=0.0)
        for engine in range(5)
    ]  # no instruction fits into a shorter gap
    sbuf_free: list[tuple[float, int, int]] = [(0.0, -1, device.sbuf_bytes)]
    reserve: list[tuple[float, int, int]] = [(0.0, -1, device.sbuf_reserve_bytes)]
    psum_free: list[tuple[float, int, int]] = [(0.0, -1, device.psum_bytes)]
    pipe = _Pipe()
    dma_busy = 0.0
    push, pop = heapq.heappush, heapq.heappop
    unlimited_sbuf = options.infinite_sbuf
    unlimited_psum = not options.psum_limit
    total = 0.0

    debt = [0, 0]  # bytes taken beyond what was free: an output that replaces an operand of the same instruction

    def take(free: list[tuple[float, int, int]], kind: int, need: int) -> tuple[float, int]:
        """Takes the space that has been free longest; returns when it was freed and by which step."""
        when, by = 0.0, -1
        while need > 0 and free:
            when, by, chunk = pop(free)
            if chunk > need:
                push(free, (when, by, chunk - need))
                return when, by
            need -= chunk
        debt[kind] += need
        return when, by

    def give(free: list[tuple[float, int, int]], kind: int, storage: int, amount: int) -> None:
        """Returns a storage's space."""
        if debt[kind]:
            paid = min(debt[kind], amount)
            debt[kind] -= paid
            amount -= paid
        if amount:
            push(free, (touched[storage], toucher[storage], amount))

    def ahead(need: int) -> tuple[float, int]:
        """Space for a load, which may run ahead: the reserve lends it and gets what becomes free in exchange."""
        when, by = take(sbuf_free, 0, need)
        if need > device.sbuf_reserve_bytes:
            return when, by
        push(reserve, (when, by, need))
        return take(reserve, 0, need)

    for step in range(count):
        op = steps.op[step]
        reference = steps.reference[step]
        ready, cause = 0.0, -1
        if op >= 0:
            engine = lane[op]
            for storage in event_reads[reference]:
                time = available[storage]
                other = writer_lane[storage]
                if other not in (engine, DMA):
                    time += semaphore
                if time > ready:
                    ready, cause = time, writer_step[storage]
            for storage in event_writes[reference]:
                if placed[storage]:
                    if touched[storage] > ready:
                        ready, cause = touched[storage], toucher[storage]
                    continue
                placed[storage] = 1
                kind = space[storage]
                if kind == 0:
                    if unlimited_sbuf:
                        continue
                    time, by = ahead(size[storage]) if is_load[op] else take(sbuf_free, 0, size[storage])
                elif kind == 1:
                    if unlimited_psum:
                        continue
                    time, by = take(psum_free, 1, psum_size[storage])
                else:
                    continue
                if time > ready:
                    ready, cause = time, by
            if engine == DMA:
                need = duration[op]
                dma_busy += need
                start, end = pipe.transfer(ready, need)
                end = max(end, start + span[op]) + latency
                written = event_writes[reference]
            else:
                length = duration[op]
                start = -1.0
                engine_gaps = gaps[engine]
                for number, (gap_start, gap_end) in enumerate(engine_gaps):
                    begin = ready if ready > gap_start else gap_start
                    if begin + length <= gap_end:
                        start = begin
                        if begin - gap_start > length or gap_end - begin - length > 0.0:
                            replacement = []
                            if begin - gap_start >= shortest[engine]:
                                replacement.append((gap_start, begin))
                            if gap_end - begin - length >= shortest[engine]:
                                replacement.append((begin + length, gap_end))
                            engine_gaps[number : number + 1] = replacement
                        else:
                            del engine_gaps[number]
                        break
                if start < 0.0:
                    free = lane_free[engine]
                    if ready > free:
                        start = ready
                        if max_gaps and ready - free >= shortest[engine]:
                            engine_gaps.append((free, ready))
                            if len(engine_gaps) > max_gaps:
                                del engine_gaps[0]
                    else:
                        start = free
                        cause = lane_last[engine]
                    lane_free[engine] = start + length
                    lane_last[engine] = step
                end = start + length
                written = event_writes[reference]
            for storage in event_reads[reference]:
                if end > touched[storage]:
                    touched[storage], toucher[storage] = end, step
            for storage in written:
                available[storage] = end
                writer_lane[storage] = engine
                writer_step[storage] = step
                if end > touched[storage]:
                    touched[storage], toucher[storage] = end, step
        else:
            engine = DMA
            storage = reference
            need = max(transfer[storage] / device.dma_bytes_per_us, device.dma_minimum_us)
            dma_busy += need
            if op == SAVE:
                ready, cause = available[storage], writer_step[storage]
                start, end = pipe.transfer(ready, need)
                end += latency
            else:
                if not unlimited_sbuf:
                    again = events.storage_loader[storage] >= 0
                    ready, cause = ahead(size[storage]) if again else take(sbuf_free, 0, size[storage])
                if available[storage] > ready:
                    ready, cause = available[storage], writer_step[storage]
                start, end = pipe.transfer(ready, need)
                end += latency
                writer_lane[storage] = DMA
                writer_step[storage] = step
            available[storage] = end
            if end > touched[storage]:
                touched[storage], toucher[storage] = end, step
        total = max(total, end)
        freed = steps.frees[step]
        if freed is not None:
            for storage in freed:
                if space[storage] == 0:
                    if not unlimited_sbuf:
                        give(sbuf_free, 0, storage, size[storage])
                elif not unlimited_psum:
                    give(psum_free, 1, storage, psum_size[storage])
        starts[step], ends[step], engines[step], causes[step] = start, end, engine, cause
    busy = [0.0] * 5
    for op in steps.op:
        if op >= 0 and price_engine[op] != DMA:
            busy[price_engine[op]] += operations[op].price.busy_us
    busy[DMA] = dma_busy
    return Timeline(total, starts, ends, engines, causes, busy)
