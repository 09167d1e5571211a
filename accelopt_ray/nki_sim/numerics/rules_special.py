"""Steps of statistics, searches and shuffles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.numerics.geometry import SHUFFLE_KEEPS
from accelopt_ray.nki_sim.numerics.memory import Clip, Reader
from accelopt_ray.nki_sim.numerics.operations import operation
from accelopt_ray.nki_sim.numerics.site import Site, Step
from accelopt_ray.nki_sim.program import Access, Opcode

Array = NDArray[Any]

_LOWEST = np.float32(np.finfo(np.float32).min)
#: Partitions that a stream shuffle moves data among.
_QUADRANT = 32


def _whole_tile(site: Site, readers: list[Reader], compute: Callable[..., Array], number: int = 0) -> Step:
    """A step that computes an output at once; a mask may leave out whole partitions or the instruction."""
    commit, mask, batch = site.commit(number), site.mask, site.batch

    def step() -> None:
        clip: Clip = None
        if mask is not None:
            extent = mask.extent()
            if extent.empty:
                return
            clip = extent.clip
            if extent.where is not None or any(axis > batch for axis, _, _ in clip or ()):
                raise site.unsupported(f"a mask over free axes of '{site.instruction.opcode}' is not supported")
        commit(compute(*[read(clip) for read in readers]), clip, None)

    return step


def _rows(site: Site, *names: str) -> tuple[Reader, int]:
    tile = site.tile(site.access(*names))
    return site.values(tile), len(tile.shape) - site.batch - 1


def _flat(values: Array, free: int) -> Array:
    """Joins the free axes."""
    return values.reshape(*values.shape[: values.ndim - free], -1)


def bn_stats(site: Site) -> Step:
    """Per partition: count, mean and variance times count of the even and of the odd elements."""
    read, free = _rows(site, "data")

    def compute(values: Array) -> Array:
        rows = _flat(values, free)
        parts = []
        for half in (rows[..., 0::2], rows[..., 1::2]):
            count = half.shape[-1]
            mean = half.mean(axis=-1, dtype=np.float64) if count else np.zeros(rows.shape[:-1])
            spread = ((half - mean[..., None]) ** 2).sum(axis=-1)
            parts += [np.full(mean.shape, float(count)), mean, spread]
        return np.stack(parts, axis=-1).astype(np.float32)

    return _whole_tile(site, [read], compute)


def bn_aggr(site: Site) -> Step:
    """Joins (count, mean, variance times count) triples into mean and variance."""
    read, free = _rows(site, "data")

    def compute(values: Array) -> Array:
        triples = _flat(values, free).astype(np.float64)
        triples = triples.reshape(*triples.shape[:-1], -1, 3)
        count, mean, spread = triples[..., 0], triples[..., 1], triples[..., 2]
        total = count.sum(axis=-1)
        joint = (count * mean).sum(axis=-1) / total
        variance = (spread + count * (mean - joint[..., None]) ** 2).sum(axis=-1) / total
        return np.stack([joint, variance], axis=-1).astype(np.float32)

    return _whole_tile(site, [read], compute)


def max8(site: Site) -> Step:
    """The eight largest values per partition, largest first."""
    read, free = _rows(site, "data", "src")

    def compute(values: Array) -> Array:
        rows = _flat(values, free)
        return -np.sort(-rows, axis=-1)[..., :8]

    return _whole_tile(site, [read], compute)


def _positions(rows: Array, wanted: Array) -> Array:
    """Returns where each wanted value first occurs, equal values taking successive places; -1 where it does not."""
    result = np.full(wanted.shape, -1, np.int64)
    taken = np.zeros(rows.shape, bool)
    for slot in range(wanted.shape[-1]):
        hits = (rows == wanted[..., slot : slot + 1]) & ~taken
        place = hits.argmax(axis=-1)
        found = hits.any(axis=-1)
        result[..., slot] = np.where(found, place, -1)
        here = place[..., None]
        np.put_along_axis(taken, here, found[..., None] | np.take_along_axis(taken, here, -1), -1)
    return result


def find_index8(site: Site) -> Step:
    """The positions of eight values per partition."""
    read, free = _rows(site, "data")
    wanted, _ = _rows(site, "vals", "values")
    return _whole_tile(site, [read, wanted], lambda data, vals: _positions(_flat(data, free), vals))


def match_replace8(site: Site) -> Step:
    """Replaces the first occurrence of each of eight values by a constant; outputs[1]? receives the positions."""
    read, free = _rows(site, "data")
    wanted, _ = _rows(site, "vals", "values")
    replacement = np.float32(site.attribute("imm", site.operand("imm") or 0.0))

    def compute(data: Array, vals: Array) -> Array:
        rows = _flat(data, free).copy()
        places = _positions(rows, vals)
        for slot in range(places.shape[-1]):
            place = places[..., slot : slot + 1]
            index = np.maximum(place, 0)
            kept = np.take_along_axis(rows, index, -1)
            np.put_along_axis(rows, index, np.where(place >= 0, replacement, kept), -1)
        return np.asarray(rows.reshape(data.shape))

    if len(site.outputs) < 2:
        return _whole_tile(site, [read, wanted], compute)
    places = _whole_tile(site, [read, wanted], lambda data, vals: _positions(_flat(data, free), vals), 1)
    replaced = _whole_tile(site, [read, wanted], compute)

    def both() -> None:
        places()
        replaced()

    return both


def range_select(site: Site) -> Step:
    """``on_true`` where the element's number satisfies two comparisons, else the lowest float.

    ``outputs[1]``, where there is one, receives the maximum.
    """
    read, _ = _rows(site, "on_true", "on_true_tile")
    first = operation(site.attribute("comp_op0", "greater_equal"), site.line)
    second = operation(site.attribute("comp_op1", "less"), site.line)
    bound0, bound1 = site.aligned(site.access("bound0")), site.aligned(site.access("bound1"))
    start = float(site.attribute("range_start", 0.0))
    otherwise = np.float32(site.attribute("on_false_value", _LOWEST))

    def compute(values: Array, low: Any, high: Any) -> Array:
        numbers = np.broadcast_to(np.arange(values.shape[-1], dtype=np.float32) + np.float32(start), values.shape)
        holds0, holds1 = np.empty(values.shape, np.float32), np.empty(values.shape, np.float32)
        first(numbers, low, holds0)
        second(numbers, high, holds1)
        result: Array = np.where((holds0 != 0) & (holds1 != 0), values, otherwise).astype(np.float32)
        return result

    selected = _whole_tile(site, [read, bound0, bound1], compute)
    if len(site.outputs) < 2:
        return selected

    def largest(values: Array, low: Any, high: Any) -> Array:
        result: Array = compute(values, low, high).max(axis=-1, keepdims=True)
        return result

    reduced = _whole_tile(site, [read, bound0, bound1], largest, 1)

    def both() -> None:
        reduced()
        selected()

    return both


def stream_shuffle(site: Site) -> Step:
    """Moves partitions within each group of 32 as the pattern says; 255 leaves a partition unwritten."""
    tile = site.tile(site.access("src"))
    read = site.raw(tile)
    pattern = [int(entry) for entry in site.attribute("shuffle_mask", ())]
    rows = tile.shape[site.batch]
    chosen = [
        (target, target - target % _QUADRANT + pattern[target % _QUADRANT])
        for target in range(rows)
        if pattern[target % _QUADRANT] != SHUFFLE_KEEPS
    ]
    commit, mask = site.commit(), site.mask
    old = site.memory.reader(site.out)

    def step() -> None:
        if mask is not None and mask.extent().empty:
            return
        values, result = read(None), old(None).copy()
        for target, source in chosen:
            result[target] = values[source]
        commit(result, None, None)

    return step


def local_gather(site: Site) -> Step:
    """Gathers elements by an index list that the 16 partitions of a core share."""
    source = site.tile(site.access("src_buffer", "src"))
    index = site.tile(site.access("index"))
    read, numbers = site.raw(source), site.raw(index)
    per_index = int(site.attribute("num_elem_per_idx", 1))
    valid = site.attribute("num_valid_indices")
    commit, shape = site.commit(), site.out.shape
    if site.mask is not None:
        raise site.unsupported("a mask on 'local_gather' is not supported")

    def step() -> None:
        values = read(None)
        rows = values.reshape(values.shape[0], -1)
        lists = numbers(None).reshape(index.shape[0], -1).astype(np.int64)
        result = np.zeros((shape[0], int(np.prod(shape[1:]))), rows.dtype)
        for core in range(0, shape[0], 16):
            order = lists[core : core + 16].T.reshape(-1)
            order = order[: int(valid)] if valid is not None else order
            places = (order[:, None] * per_index + np.arange(per_index)).reshape(-1)
            count = min(places.size, result.shape[1])
            result[core : core + 16, :count] = rows[core : core + 16][:, places[:count]]
        commit(result.reshape(shape), None, None)

    return step


def dropout(site: Site) -> Step:
    """Replaces elements by 0 with a probability; others in each run, so that nothing can rely on which."""
    probability = site.operand("prob", "probability")
    read = site.aligned(site.access("data", "src"))
    chance = site.aligned(probability) if isinstance(probability, Access) else None
    fixed = np.float32(0.0 if probability is None or isinstance(probability, Access) else probability)
    generator = np.random.default_rng()

    def compute(out: Array, values: Array, *given: Array) -> None:
        drop = generator.random(out.shape, dtype=np.float32) < (given[0] if given else fixed)
        np.copyto(out, np.where(drop, np.float32(0.0), values))

    return site.elementwise(compute, [read] if chance is None else [read, chance], [])


def random(site: Site) -> Step:
    """Uniform values in [0, 1); others in each run, so that nothing can rely on them."""
    generator = np.random.default_rng()
    return site.elementwise(lambda out: np.copyto(out, generator.random(out.shape, dtype=np.float32)), [], [])


RULES: dict[Opcode, Callable[[Site], Step]] = {
    Opcode.BN_STATS: bn_stats,
    Opcode.BN_AGGR: bn_aggr,
    Opcode.MAX8: max8,
    Opcode.FIND_INDEX8: find_index8,
    Opcode.MATCH_REPLACE8: match_replace8,
    Opcode.RANGE_SELECT: range_select,
    Opcode.STREAM_SHUFFLE: stream_shuffle,
    Opcode.LOCAL_GATHER: local_gather,
    Opcode.DROPOUT: dropout,
    Opcode.RANDOM: random,
}
