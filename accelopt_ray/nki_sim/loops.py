"""The loop iterators: symbolic, traced once, or unrolled where the kernel needs the index."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelopt_ray.nki_sim import builder as tracing
from accelopt_ray.nki_sim import errors
from accelopt_ray.nki_sim.loop_variables import ConcreteLoopsNeeded, OnlyIndex
from accelopt_ray.nki_sim.program import LoopKind
from accelopt_ray.nki_sim.symbolic import Index, as_int
from accelopt_ray.nki_sim.tile import Tensor


class LoopRange:
    """What ``nl.affine_range`` and its siblings return.

    A ``for`` statement of the kernel traces it symbolically (see :func:`iterate`); anything else that iterates over it,
    a comprehension say, gets the numbers.
    """

    def __init__(self, kind: LoopKind | None, bounds: tuple[Any, ...]) -> None:
        numbers = [as_int(bound) for bound in bounds]
        self.kind = kind
        self.values = range(*numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)


def _bounds(api: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if not 1 <= len(args) <= 3:
        raise TypeError(f"{api}() takes from 1 to 3 positional arguments but {len(args)} were given")
    return args


def affine_range(*args: Any, **_hints: Any) -> LoopRange:
    """Parallel iterations; only associative reductions may be carried."""
    return LoopRange(LoopKind.AFFINE, _bounds("affine_range", args))


def sequential_range(*args: Any, **_hints: Any) -> LoopRange:
    """Iterations in order."""
    return LoopRange(LoopKind.SEQUENTIAL, _bounds("sequential_range", args))


def static_range(*args: Any) -> LoopRange:
    """Unrolled while tracing."""
    return LoopRange(None, _bounds("static_range", args))


def iterate(iterable: Any, name: str, line: int, column: int) -> Any:
    """Replaces the iterable of every ``for`` statement of a kernel file.

    Args:
        iterable: What the statement iterates over.
        name: The loop variable's name.
        line: Line of the statement.
        column: Column of the statement; with the line it identifies the loop across traces.
    """
    if not tracing.is_tracing():
        return iterable
    if isinstance(iterable, range):
        loop = LoopRange(LoopKind.SEQUENTIAL, (iterable.start, iterable.stop, iterable.step))
    elif isinstance(iterable, LoopRange):
        loop = iterable
    else:
        return iterable
    if loop.kind is None:
        return iter(loop.values)
    if (line, column) in tracing.current().concrete_sites:
        return _unrolled(loop)
    return _symbolic(loop, loop.kind, name, (line, column))


def _unrolled(loop: LoopRange) -> Iterator[int]:
    builder = tracing.current()
    scope = builder.push_scope()
    try:
        yield from loop.values
    finally:
        if scope.open:
            builder.pop_scope(scope)


def _symbolic(loop: LoopRange, kind: LoopKind, name: str, site: tuple[int, int]) -> Iterator[Any]:
    builder = tracing.current()
    values = loop.values
    if not values:
        return
    buffers = len(builder.buffers)
    variable, token = builder.open_loop(len(values), kind, site, name)
    body = builder.body
    try:
        if len(values) == 1:
            yield OnlyIndex(values[0], variable)
        else:
            yield Index(values.start, {variable: values.step})
    except GeneratorExit:
        # A break or return within the body, or an error on its way out: only an unrolled loop can be left early.
        builder.pending.add(site)
        if variable.open:
            builder.close_loop(variable, token)
        raise
    builder.close_loop(variable, token)
    if not body and len(builder.buffers) == buffers and len(values) > 1:
        # Nothing but Python happened in the body, and its state must be that of all iterations.
        raise ConcreteLoopsNeeded([site])


@contextmanager
def branch() -> Iterator[None]:
    """Encloses the branches of an ``if`` on a loop index: tensors made there end with it."""
    if not tracing.is_tracing():
        yield
        return
    builder = tracing.current()
    scope = builder.push_scope()
    try:
        yield
    finally:
        if scope.open:
            builder.pop_scope(scope)


def while_condition(condition: Any) -> Any:
    """Replaces the test of every ``while`` statement of a kernel file."""
    if isinstance(condition, Tensor):
        raise errors.while_loop_entry()
    return condition


def annotated(name: str, value: Any, annotation: Any) -> Any:
    """Replaces the value of an annotated assignment ``name: nt.tensor[shape] = value``."""
    expected = tuple(getattr(annotation, "shape", ()))
    if isinstance(value, Tensor) and expected and value.shape != expected:
        raise errors.annotation_shape(name, value.shape, expected)
    return value
