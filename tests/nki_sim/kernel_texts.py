"""Kernels as text, for the tests of the tracer: statements wrapped into a kernel file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from accelopt_ray.devices.protocol import TensorSpec
from accelopt_ray.nki_sim.program import Instruction, Opcode, Program
from accelopt_ray.nki_sim.tracer import trace_kernel

IMPORTS = """
import math
import numpy as np
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.typing as nt
from neuronxcc.nki.language import par_dim
"""


def kernel_text(body: str, parameters: str = "x", out: str = "x.shape", dtype: str = "nl.float32") -> str:
    """A kernel file: ``out`` is its output, ``body`` what it does."""
    return (
        f"{IMPORTS}\n@nki.jit\ndef kernel({parameters}):\n"
        f"    out = nl.ndarray({out}, dtype={dtype}, buffer=nl.shared_hbm)\n"
        + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
        + "\n    return out\n"
    )


def specs(*arrays: object) -> list[TensorSpec | float | int]:
    """Input specifications: shapes, arrays or numbers."""
    found: list[TensorSpec | float | int] = []
    for array in arrays:
        if isinstance(array, np.ndarray):
            found.append(TensorSpec(array.shape, array.dtype.name))
        elif isinstance(array, tuple):
            found.append(TensorSpec(array))
        else:
            assert isinstance(array, (int, float, TensorSpec))
            found.append(array)
    return found


def trace(
    body: str,
    *inputs: object,
    parameters: str = "x",
    out: str = "x.shape",
    dtype: str = "nl.float32",
    target: str = "trn1",
) -> Program:
    """Traces statements; without ``inputs`` the parameter ``x`` has shape (128, 512)."""
    return trace_kernel(kernel_text(body, parameters, out, dtype), specs(*(inputs or ((128, 512),))), target=target)


def instructions(program: Program, opcode: Opcode | None = None) -> list[Instruction]:
    """The program's instructions, in order."""
    return [node for _, node in program.walk() if opcode is None or node.opcode is opcode]


def opcodes(program: Program) -> list[Opcode]:
    """The program's opcodes, in order."""
    return [node.opcode for _, node in program.walk()]


def only(program: Program, opcode: Opcode) -> Instruction:
    """The one instruction with this opcode."""
    (found,) = instructions(program, opcode)
    return found


def trips(program: Program, instruction: Instruction) -> Sequence[int]:
    """Iterations of the loops around an instruction, outermost first."""
    for loops, node in program.walk():
        if node is instruction:
            return [loop.trips for loop in loops]
    raise AssertionError("the instruction is not in the program")
