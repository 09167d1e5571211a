"""What a trace is made of until it is frozen: buffers, instructions, loops and scopes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from accelopt_ray.nki_sim.loop_variables import LoopVariable
from accelopt_ray.nki_sim.program import Engine, Opcode, Role, Space
from accelopt_ray.nki_sim.symbolic import Index

if TYPE_CHECKING:
    from accelopt_ray.nki_sim.tile import Tensor


@dataclass(eq=False)
class TracedBuffer:
    """A buffer of the trace; see :class:`~accelopt_ray.nki_sim.program.Buffer` for the shared fields.

    Attributes:
        scopes: The loop scopes that must be open where it is used.
        producer: The instruction whose fresh, still unnamed result it holds.
        last_touch: Sequence number of the last instruction that read or wrote it.
        allocated: Whether the kernel placed it at an address of its own.
    """

    id: int
    name: str
    space: Space
    shape: tuple[int, ...]
    dtype: str
    role: Role
    block_dims: int = 0
    loops: tuple[LoopVariable, ...] = ()
    scopes: tuple[Scope, ...] = ()
    fill: float | None = None
    line: int = 0
    producer: Record | None = None
    last_touch: int = -1
    written: bool = False
    mutable: bool = False
    allocated: bool = False
    constant: np.ndarray[Any, Any] | None = None
    given_name: str = ""
    naming: Naming | None = None


@dataclass(eq=False)
class Naming:
    """How an instruction came to write a destination instead of its own result, so that it can be taken back.

    Attributes:
        record: The instruction.
        value: Its own result.
        destination: What it writes instead.
        after: The last node of the body when the assignment was made.
    """

    record: Record
    value: Tensor
    destination: Tensor
    after: Union[Record, LoopRecord]


@dataclass(eq=False)
class Scope:
    """The body of a loop, unrolled or not; ``depth`` counts the symbolic loops around it."""

    depth: int
    open: bool = True


@dataclass(eq=False)
class Record:
    """An instruction of the trace."""

    opcode: Opcode
    engine: Engine
    outputs: list[Tensor]
    operands: dict[str, Union[Tensor, float, int]]
    attributes: dict[str, Any]
    mask: list[Index]
    line: int
    sequence: int
    body: list[Union[Record, LoopRecord]]
    accumulate: bool = False
    explicit_dtype: bool = False


@dataclass(eq=False)
class LoopRecord:
    """A loop of the trace with its body."""

    variable: LoopVariable
    line: int
    body: list[Union[Record, LoopRecord]] = field(default_factory=list)
