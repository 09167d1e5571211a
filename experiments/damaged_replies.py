"""Model replies damaged at random, and what must hold of any kernel taken from one."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass

_KERNEL = """import neuronxcc.nki as nki
import neuronxcc.nki.language as nl


@nki.jit
def kernel(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range({tiles}):
        tile = nl.load(a[nl.ds(i * 128, 128), :])
        nl.store(out[nl.ds(i * 128, 128), :], value=nl.{function}(tile))
    return out
"""
_PROSE = ("Here is the kernel.\n", "It loads every tile once.\n", "1. Fuse\n2. Tile\n", "```x``` is slow.\n", "\n")
_PIECES = (
    "```\n",
    "```python\n",
    "~~~\n",
    "````\n",
    "\r\n",
    "\ufffd",
    "\x00",
    "    ",
    "def kernel(",
    '"""',
    "> ",
    "{",
    '"}',
)


@dataclass(frozen=True)
class DamagedReply:
    """A damaged reply.

    Attributes:
        text: The reply.
        finish_reason: As its endpoint would give it.
        kernels: The kernels that went into it, before the damage.
    """

    text: str
    finish_reason: str
    kernels: tuple[str, ...]


def damaged_replies(count: int, seed: int = 0) -> Iterator[DamagedReply]:
    """Yields replies with one to three kernels in fences, damaged in up to six places; the same for the same seed."""
    draw = random.Random(seed)
    for _ in range(count):
        kernels = [
            _KERNEL.format(tiles=draw.choice([2, 4, 8, 16]), function=draw.choice(["exp", "silu", "gelu", "tanh"]))
            for _ in range(draw.randint(1, 3))
        ]
        text = ""
        for kernel in kernels:
            fence = draw.choice(["```", "```", "````", "~~~"])
            text += draw.choice(_PROSE) + f"{fence}{draw.choice(['python', 'py', ''])}\n{kernel}{fence}\n"
        text += draw.choice(_PROSE)
        for _ in range(draw.randint(0, 6)):
            text = _damaged(text, draw)
        yield DamagedReply(text, draw.choice(["stop", "stop", "length"]), tuple(kernels))


def violation(reply: DamagedReply, code: str | None) -> str | None:
    """Says what is wrong with a kernel that was taken from a reply, or None.

    It must parse, stand in the reply line by line and unbroken, and must not be a piece of a longer text of code: what
    follows it in the reply is no indented line.
    """
    if code is None:
        return None
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return "it does not parse"
    wanted = [_bare(line) for line in code.rstrip("\n").split("\n")]
    lines = _normal(reply.text).split("\n")
    bare = [_bare(line) for line in lines]
    ends = [
        start + len(wanted)
        for start in range(len(bare) - len(wanted) + 1)
        if bare[start + 1 : start + len(wanted) - 1] == wanted[1:-1]
        # Fences may stand on the first and the last line of the code.
        and bare[start].endswith(wanted[0])
        and bare[start + len(wanted) - 1].startswith(wanted[-1])
    ]
    if not ends:
        return "it does not stand in the reply"
    whole = any(_normal(kernel).strip() in code for kernel in reply.kernels)
    if not whole and all(_continues(lines[end:]) for end in ends):
        return "it is a piece of a longer kernel"
    return None


def _damaged(text: str, draw: random.Random) -> str:
    start = draw.randrange(len(text) + 1)
    end = min(len(text), start + draw.randint(1, 40))
    kind = draw.randrange(7)
    if kind == 0:
        return text[:start] + text[end:]
    if kind == 1:
        return text[:end] + text[start:]
    if kind == 2:
        return text[:start] + draw.choice(_PIECES) + text[start:]
    if kind == 3:
        return text[: max(start, len(text) // 3)]
    if kind == 4:
        lines = text.split("\n")
        del lines[draw.randrange(len(lines))]
        return "\n".join(lines)
    if kind == 5:
        return text[:start] + chr(draw.choice([0xFFFD, 0x200B, 0xDC80, 9, 12])) + text[start:]
    return text.replace("\n", "\r\n")


def _normal(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _bare(line: str) -> str:
    return line.lstrip("> \t\ufeff").rstrip()


def _continues(lines: list[str]) -> bool:
    for line in lines:
        if line.strip() and not line.strip().startswith(("```", "~~~")):
            return line[0] in " \t" and any(sign in line for sign in ("(", "=", "return"))
    return False
