"""The benchmark's own correctness check, kept for comparability with published results.

A kernel passes when the relative L2 error over each whole output stays below the task's tolerance,
``|out - ref| < tolerance * |ref|`` in double precision, and its text without comments does not contain ``float16``
(nor, therefore, ``bfloat16``). The check is known to be too weak: see :mod:`accelopt_ray.verify.strict`.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SEEDS = (0, 21, 42, 63, 84)
BANNED_TEXT = "float16"

# Elements per step: three buffers of this many doubles stay in a core's cache.
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Comparison:
    """Result of comparing outputs with references.

    Attributes:
        passed: Whether every output is close enough.
        relative_l2: Per output ``|out - ref| / |ref|``; NaN or infinity where the outputs are not finite.
        text: Empty, or what is wrong, in words.
    """

    passed: bool
    relative_l2: tuple[float, ...]
    text: str = ""


def compare(
    outputs: Sequence[npt.NDArray[Any]],
    references: Sequence[npt.NDArray[Any]],
    tolerance: float,
    reference_norms: Sequence[float] | None = None,
) -> Comparison:
    """Compares outputs with references in double precision, a chunk at a time.

    Args:
        outputs: Kernel outputs in the reference's layout; memory maps are read once and not copied as a whole.
        references: Reference outputs.
        tolerance: Bound of the relative L2 error, exclusive.
        reference_norms: L2 norms of the references when they are known already.

    Returns:
        The comparison; a different number or shape of outputs is a comparison that has not passed.
    """
    if len(outputs) != len(references):
        return Comparison(False, (), f"{len(outputs)} outputs where the reference has {len(references)}")
    errors: list[float] = []
    for position, (output, reference) in enumerate(zip(outputs, references, strict=True)):
        if output.shape != reference.shape:
            text = f"output {position} has shape {output.shape}, the reference {reference.shape}"
            return Comparison(False, tuple(errors), text)
        known = None if reference_norms is None else reference_norms[position]
        errors.append(_relative_l2(output, reference, known))
    for position, error in enumerate(errors):
        # Written so that NaN does not pass.
        if not error < tolerance:
            text = f"output {position}: relative L2 error {error:.3g}, allowed is less than {tolerance:g}"
            return Comparison(False, tuple(errors), text)
    return Comparison(True, tuple(errors))


def norm(array: npt.NDArray[Any]) -> float:
    """Returns the L2 norm of all elements in double precision."""
    flat = array.reshape(-1)
    total = 0.0
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK].astype(np.float64)
        total += _sum_of_squares(chunk)
    return float(np.sqrt(total))


def _relative_l2(output: npt.NDArray[Any], reference: npt.NDArray[Any], known_norm: float | None) -> float:
    flat_output, flat_reference = output.reshape(-1), reference.reshape(-1)
    difference = np.empty(min(_CHUNK, flat_output.size), dtype=np.float64)
    expected = np.empty_like(difference)
    squared_error = squared_norm = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat_output.size, _CHUNK):
            size = min(_CHUNK, flat_output.size - start)
            error, wanted = difference[:size], expected[:size]
            error[:] = flat_output[start : start + size]
            wanted[:] = flat_reference[start : start + size]
            if known_norm is None:
                squared_norm += _sum_of_squares(wanted)
            error -= wanted
            squared_error += _sum_of_squares(error)
    wanted_norm = float(np.sqrt(squared_norm)) if known_norm is None else known_norm
    if wanted_norm == 0.0:
        return 0.0 if squared_error == 0.0 else float("inf")
    return float(np.sqrt(squared_error)) / wanted_norm


def _sum_of_squares(values: npt.NDArray[np.float64]) -> float:
    # Not a BLAS product: its threads would wait for each other at every chunk.
    return float(np.einsum("i,i->", values, values))


def banned_text(source: str) -> bool:
    """Whether the source, with its comments taken out, contains the text that the published check forbids."""
    return BANNED_TEXT in _without_comments(source)


def _without_comments(source: str) -> str:
    lines = source.splitlines(keepends=True)
    try:
        comments = [
            token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT
        ]
    except (tokenize.TokenError, SyntaxError):
        # Not Python: it will fail to compile; until then all of its text counts.
        return source
    for token in comments:
        row, column = token.start
        lines[row - 1] = lines[row - 1][:column] + "\n"
    return "".join(lines)
