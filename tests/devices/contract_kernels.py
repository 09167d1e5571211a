"""The contract tests' kernels, in the language of each device's generation."""

from __future__ import annotations

import textwrap

_A = """
import neuronxcc.nki as nki
import neuronxcc.nki.language as nl

@nki.jit
def kernel(x, factor):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x[0:128, 0:256])
    nl.store(out[0:128, 0:256], value=nl.multiply(tile, factor))
    return out
"""

_B = """
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def kernel(x, factor):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.ndarray((128, 256), dtype=x.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x[0:128, 0:256])
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=out[0:128, 0:256], src=tile)
    return out
"""

SCALING = {"A": _A, "B": _B}
"""Multiplies a (128, 256) tensor by a number."""

SHAPE = (128, 256)


def scaling(generation: str, attack: str = "") -> str:
    """The kernel, with statements added at the start of its body."""
    body = textwrap.indent(textwrap.dedent(attack).strip(), "    ")
    return SCALING[generation].replace("def kernel(x, factor):\n", f"def kernel(x, factor):\n{body}\n")
