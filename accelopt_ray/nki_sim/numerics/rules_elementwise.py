"""Steps of the instructions that compute each output element from matching input elements."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelopt_ray.nki_sim.dtypes import is_integer, storage
from accelopt_ray.nki_sim.numerics.activations import ACTIVATIONS
from accelopt_ray.nki_sim.numerics.casts import cast
from accelopt_ray.nki_sim.numerics.masks import evaluate
from accelopt_ray.nki_sim.numerics.memory import Clip
from accelopt_ray.nki_sim.numerics.operations import BITVECTOR, OPERATIONS, operation, reduce_into, reduction
from accelopt_ray.nki_sim.numerics.site import Site, Step, clipped_shape
from accelopt_ray.nki_sim.program import Access, Affine, Engine, MaskTerm, Operand

Array = NDArray[Any]


def move(site: Site) -> Step:
    """Load, store, copy, DMA and partition broadcast: the elements as they are, cast to the output's type."""
    operand = site.access("src", "data", "value")
    reduce_op = site.attribute("rmw_op")
    if reduce_op is not None:
        combine = operation(reduce_op, site.line)
        if reduce_op == "add" and site.out.indirect and site.mask is None:
            add, values = site.memory.adder(site.out), site.aligned(operand)
            return lambda: add(values(None))
        own = site.aligned(site.instruction.outputs[0])
        return site.elementwise(lambda out, old, new: combine(old, new, out), [own, site.aligned(operand)], [])
    source = site.tile(operand)
    is_strided = site.out.scatter is None and not site.out.indirect
    if source.dtype == site.out.dtype and site.mask is None and not site.instruction.accumulate and is_strided:
        source_view, out_view = site.aligned(operand, exact=True), site.memory.reader(site.out)

        def step() -> None:
            np.copyto(out_view(None), source_view(None))

        return step
    read = site.aligned(operand, exact=True)
    commit = site.commit()
    mask = site.mask
    shape = site.out.shape

    def general() -> None:
        clip: Clip = None
        where = None
        if mask is not None:
            extent = mask.extent()
            if extent.empty:
                return
            clip, where = extent.clip, extent.where
        commit(np.broadcast_to(read(clip), clipped_shape(shape, clip)), clip, where)

    return general


def tensor_tensor(site: Site) -> Step:
    """``op(a, b)``."""
    name = site.attribute("op")
    first, second = site.access("a", "data1"), site.access("b", "data2")
    if name in BITVECTOR or _is_exact_arithmetic(site, name):
        return _integer_step(site, [(str(name), False)], first, [second])
    apply = operation(name, site.line)
    return site.elementwise(lambda out, a, b: apply(a, b, out), [site.aligned(first), site.aligned(second)], [])


def tensor_scalar(site: Site) -> Step:
    """``(data op0 operand0) op1 operand1`` with scalars or per-partition vectors; also the two-tensor form."""
    data = site.access("data")
    operands: list[Operand] = []
    chain: list[tuple[str, bool]] = []
    for number in ("0", "1"):
        name = site.attribute("op" + number)
        operand = site.operand("operand" + number)
        if name is None:
            continue
        chain.append((str(name), bool(site.attribute("reverse" + number, False))))
        operands.append(0.0 if operand is None else operand)
    if chain[0][0] in BITVECTOR or _is_exact_arithmetic(site, chain[0][0]):
        return _integer_step(site, chain, data, operands)
    operations = [(operation(name, site.line), reverse) for name, reverse in chain]

    def compute(out: Array, values: Array, *others: Any) -> None:
        current = values
        for (apply, reverse), other in zip(operations, others, strict=False):
            if reverse:
                apply(other, current, out)
            else:
                apply(current, other, out)
            current = out

    readers = [site.aligned(data), *(site.aligned(operand) for operand in operands)]
    step = site.elementwise(compute, readers, list(operands[1:]))
    return _then_reduce(site, step)


def _is_exact_arithmetic(site: Site, name: object) -> bool:
    """GpSimd adds, subtracts and multiplies 32-bit integers exactly; every other engine goes through float32."""
    return (
        site.instruction.engine is Engine.GPSIMD
        and name in ("add", "subtract", "multiply")
        and site.is_exact_integer
        and all(isinstance(o, (Access, int)) for o in site.instruction.operands.values())
    )


def _integer_step(site: Site, chain: list[tuple[str, bool]], data: Access, operands: list[Operand]) -> Step:
    """Integer operations without a conversion; bit operations wrap, arithmetic saturates."""
    readers = [site.aligned(data, exact=True), *(site.aligned(operand, exact=True) for operand in operands)]
    commit, mask, shape = site.commit(), site.mask, site.out.shape
    dtype = site.out.dtype
    width = storage(dtype).itemsize * 8

    def step() -> None:
        clip: Clip = None
        where = None
        if mask is not None:
            extent = mask.extent()
            if extent.empty:
                return
            clip, where = extent.clip, extent.where
        current = np.asarray(readers[0](clip)).astype(np.int64)
        for (name, reverse), read in zip(chain, readers[1:], strict=False):
            other = np.asarray(read(clip)).astype(np.int64)
            first, second = (other, current) if reverse else (current, other)
            if name == "right_shift":
                first = first & ((1 << width) - 1)
            result = np.empty(np.broadcast_shapes(first.shape, second.shape), np.int64)
            OPERATIONS[name](first, second, result)
            current = result
        if chain[-1][0] in BITVECTOR and is_integer(dtype):
            current = current.astype(storage(dtype))
        commit(np.broadcast_to(current, clipped_shape(shape, clip)), clip, where)

    return step


def activation(site: Site) -> Step:
    """``op(data * scale + bias)``."""
    name = str(site.attribute("op", "copy"))
    function = ACTIVATIONS.get(name)
    if function is None:
        raise site.unsupported(f"activation function '{name}' is not supported")
    data = site.access("data")
    scale, bias = site.operand("scale"), site.operand("bias")
    readers = [site.aligned(data)]
    has_scale = scale is not None and (isinstance(scale, Access) or scale != 1.0)
    has_bias = bias is not None and (isinstance(bias, Access) or bias != 0.0)
    if has_scale and scale is not None:
        readers.append(site.aligned(scale))
    if has_bias and bias is not None:
        readers.append(site.aligned(bias))

    def compute(out: Array, values: Array, *others: Any) -> None:
        position = 0
        if has_scale:
            np.multiply(values, others[position], out=out)
            values, position = out, position + 1
        if has_bias:
            np.add(values, others[position], out=out)
            values = out
        function(values, out)

    step = site.elementwise(compute, readers, [bias] if has_scale else [])
    return _then_reduce(site, step)


def reciprocal(site: Site) -> Step:
    """``1 / data``."""
    return site.elementwise(lambda out, x: np.reciprocal(x, out=out), [site.aligned(site.access("data"))], [])


def _then_reduce(site: Site, step: Step) -> Step:
    """Adds the reduction over the free axes, which goes to a second output, to the engine's registers, or both."""
    command = site.attribute("reduce_cmd")
    if len(site.outputs) < 2 and command in (None, "idle"):
        return step
    ufunc = reduction(site.attribute("reduce_op", "add"), site.line)
    read = site.values(site.out)
    write = site.commit(1) if len(site.outputs) > 1 else None
    target_shape = site.outputs[1].shape if len(site.outputs) > 1 else ()
    registers = site.memory if site.plan.nest.has_registers else None
    axes = tuple(range(site.batch + 1, len(site.out.shape)))
    scratch = site.memory.scratch
    mask = site.mask
    batch = site.batch

    def reduce() -> None:
        step()
        clip: Clip = None
        if mask is not None:
            extent = mask.extent()
            if extent.empty:
                return
            clip = extent.clip
        values = read(clip)
        results = scratch(values.shape[: batch + 1], 1)
        reduce_into(ufunc, values, axes, results)
        if command == "reduce" and registers is not None and registers.registers.shape == results.shape:
            results = ufunc(registers.registers, results)
        if registers is not None:
            registers.registers = np.zeros_like(results) if command == "reset" else results.copy()
        if write is not None:
            rows = tuple(entry for entry in clip or () if entry[0] <= batch) or None
            write(results.reshape(clipped_shape(target_shape, rows)), rows, None)

    return reduce


def memset(site: Site) -> Step:
    """A constant."""
    value = np.asarray(site.attribute("value", 0.0))
    if is_integer(site.out.dtype):
        value = cast(value.reshape(1), site.out.dtype)[0]
        commit, mask, shape = site.commit(), site.mask, site.out.shape

        def step() -> None:
            extent = mask.extent() if mask is not None else None
            if extent is None:
                commit(np.broadcast_to(value, shape), None, None)
            elif not extent.empty:
                commit(np.broadcast_to(value, clipped_shape(shape, extent.clip)), extent.clip, extent.where)

        return step
    constant = np.float32(value)
    return site.elementwise(lambda out: np.copyto(out, constant), [], [])


def iota(site: Site) -> Step:
    """An affine function of the coordinates."""
    term = site.attribute("expression", site.attribute("start"))
    strides = site.attribute("strides", ())
    if isinstance(term, Affine):
        pairs = tuple(strides) if strides and isinstance(strides[0], tuple) else tuple(enumerate(strides))
        term = MaskTerm(term, pairs)
    elif isinstance(term, int):
        term = MaskTerm(Affine(term), tuple(enumerate(strides)))
    if not isinstance(term, MaskTerm):
        raise site.unsupported("'iota' needs an affine expression")
    start, grid = site.term_grid(term, site.out.shape)
    commit, mask, shape, indices = site.commit(), site.mask, site.out.shape, site.memory.indices
    full = np.broadcast_to(grid, shape)

    def step() -> None:
        values = full + evaluate(start, indices)
        extent = mask.extent() if mask is not None else None
        if extent is None:
            commit(values, None, None)
        elif not extent.empty:
            slices = [slice(None)] * len(shape)
            for axis, low, high in extent.clip or ():
                slices[axis] = slice(low, high)
            commit(values[tuple(slices)], extent.clip, extent.where)

    return step


def select(site: Site) -> Step:
    """``on_true`` where the predicate is not 0, else ``on_false``."""
    predicate = site.access("predicate", "condition")
    on_true, on_false = site.operand("on_true"), site.operand("on_false")
    if on_true is None or on_false is None:
        raise site.unsupported("'select' needs two sources")

    def compute(out: Array, chosen: Array, yes: Any, no: Any) -> None:
        np.copyto(out, np.where(chosen != 0, yes, no))

    readers = [site.aligned(predicate, exact=True), site.aligned(on_true), site.aligned(on_false)]
    return site.elementwise(compute, readers, [])


def affine_select(site: Site) -> Step:
    """``on_true`` where affine conditions on the coordinates hold, else ``on_false``."""
    predicate = site.attribute("predicate", site.attribute("pred"))
    terms = predicate if isinstance(predicate, tuple) else (predicate,)
    grids = [site.term_grid(term, site.out.shape) for term in terms]
    on_true = site.operand("on_true", "on_true_tile")
    on_false = site.operand("on_false", "on_false_value")
    if on_false is None:
        on_false = site.attribute("on_false", 0.0)
    if on_true is None:
        raise site.unsupported("'affine_select' needs a source")
    indices = site.memory.indices
    shape = site.out.shape

    def holds() -> Array:
        result = np.ones((1,) * len(shape), bool)
        for start, grid in grids:
            result = result & (grid + evaluate(start, indices) >= 0)
        return result

    def chosen(clip: Clip) -> Array:
        whole = np.broadcast_to(holds(), shape)
        slices = [slice(None)] * len(shape)
        for axis, low, high in clip or ():
            slices[axis] = slice(low, high)
        return whole[tuple(slices)]

    def compute(out: Array, condition: Array, yes: Any, no: Any) -> None:
        np.copyto(out, np.where(condition, yes, no))

    return site.elementwise(compute, [chosen, site.aligned(on_true), site.aligned(on_false or 0.0)], [])


def copy_predicated(site: Site) -> Step:
    """Copies where the predicate is not 0."""
    source, predicate = site.operand("src"), site.access("predicate")
    if source is None:
        raise site.unsupported("'copy_predicated' needs a source")
    own = site.aligned(site.instruction.outputs[0])
    reverse = bool(site.attribute("reverse_pred", False))

    def compute(out: Array, old: Array, new: Any, condition: Array) -> None:
        holds = condition == 0 if reverse else condition != 0
        np.copyto(out, np.where(holds, new, old))

    readers = [own, site.aligned(source), site.aligned(predicate, exact=True)]
    return site.elementwise(compute, readers, [])
