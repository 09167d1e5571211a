"""The precision tier of a traced program: what its arithmetic is, whatever its text calls it.

* ``fp32``: every floating-point tile is fp32;
* ``compensated``: lower precision only as the operands of matrix products, each value split into a high part and a low
  part (``low = x - high``), and every product formed from at least ``high*high + high*low + low*high``;
* ``reduced``: anything else.

Compensated products reach fp32-like errors, so no numeric test tells them apart: whether they are allowed is a policy.
"""

from __future__ import annotations

from accelopt_ray.nki_sim.program import Access, Instruction, Opcode, Program
from accelopt_ray.outcome import StrEnum


class PrecisionTier(StrEnum):
    """Tiers from the most to the least precise."""

    FP32 = "fp32"
    COMPENSATED = "compensated"
    REDUCED = "reduced"


_REDUCED_TYPES = frozenset({"bfloat16", "float16", "tfloat32", "float8_e4m3", "float8_e5m2"})
# These keep a value as it is, up to the cast to the destination's type.
_MOVES = frozenset({Opcode.LOAD, Opcode.COPY, Opcode.DMA_COPY, Opcode.TRANSPOSE})
_HIGH = "high"
_LOW = "low"
# At least these three of the four partial products.
_NEEDED_PRODUCTS = frozenset({(_HIGH, _HIGH), (_HIGH, _LOW), (_LOW, _HIGH)})


def precision_tier(program: Program) -> PrecisionTier:
    """Classifies a program by the types of all tiles that its instructions read or write."""
    touched = {
        access.buffer for _, instruction in program.walk() for access in (*instruction.outputs, *_accesses(instruction))
    }
    reduced = {buffer for buffer in touched if program.buffers[buffer].dtype in _REDUCED_TYPES}
    if not reduced:
        return PrecisionTier.FP32
    return PrecisionTier.COMPENSATED if _is_compensated(program, reduced) else PrecisionTier.REDUCED


def _is_compensated(program: Program, reduced: set[int]) -> bool:
    parts = _split_parts(program, reduced)
    if parts is None or set(parts) != reduced:
        return False
    sources_of = {part: {source for source, kind in parts.values() if kind == part} for part in (_HIGH, _LOW)}
    if sources_of[_HIGH] != sources_of[_LOW]:
        return False
    products: dict[int, set[tuple[str, str]]] = {}
    for _, instruction in program.walk():
        operands = [access.buffer for access in _accesses(instruction)]
        if instruction.opcode is Opcode.MATMUL and not instruction.attributes.get("is_transpose"):
            kinds = [parts[buffer][1] for buffer in operands if buffer in parts]
            if len(kinds) == 1:
                return False  # one operand in full precision, the other one not: nothing makes up for that
            if kinds:
                products.setdefault(instruction.outputs[0].buffer, set()).add((kinds[0], kinds[1]))
    return all(formed >= _NEEDED_PRODUCTS for formed in products.values())


def _split_parts(program: Program, reduced: set[int]) -> dict[int, tuple[int, str]] | None:
    """Says for each reduced buffer of which fp32 buffer it is the high or the low part; None when one is neither."""
    parts: dict[int, tuple[int, str]] = {}
    upcast: dict[int, int] = {}  # fp32 copy of a high part -> the fp32 buffer that was split
    remainders: dict[int, int] = {}  # fp32 buffer that holds x - high -> the buffer that holds x
    for _, instruction in program.walk():
        target = instruction.outputs[0].buffer
        operands = [access.buffer for access in _accesses(instruction)]
        if instruction.opcode in _MOVES or _is_transposing_matmul(instruction):
            source = operands[-1] if _is_transposing_matmul(instruction) else operands[0]
            if target in reduced:
                if source in parts:
                    parts[target] = parts[source]
                elif source in remainders:
                    parts[target] = (remainders[source], _LOW)
                else:
                    parts[target] = (source, _HIGH)
            elif source in parts and parts[source][1] == _HIGH:
                upcast[target] = parts[source][0]
        elif instruction.opcode is Opcode.TENSOR_TENSOR and instruction.attributes.get("op") == "subtract":
            whole, high = (_buffer(instruction, name) for name in ("a", "b"))
            high_of = upcast.get(high, parts[high][0] if high in parts else -1)
            if high_of != whole or high_of < 0:
                if target in reduced or set(operands) & reduced:
                    return None
            elif target in reduced:
                parts[target] = (whole, _LOW)
            else:
                remainders[target] = whole
        elif instruction.opcode is not Opcode.MATMUL and (target in reduced or set(operands) & reduced):
            return None
    return parts


def _is_transposing_matmul(instruction: Instruction) -> bool:
    return instruction.opcode is Opcode.MATMUL and bool(instruction.attributes.get("is_transpose"))


def _accesses(instruction: Instruction) -> list[Access]:
    return [operand for operand in instruction.operands.values() if isinstance(operand, Access)]


def _buffer(instruction: Instruction, name: str) -> int:
    operand = instruction.operands.get(name)
    return operand.buffer if isinstance(operand, Access) else -1
