"""A readable text listing of a program, for debugging and documentation."""

from __future__ import annotations

from collections.abc import Iterator

from accelopt_ray.nki_sim.program import Access, Affine, DimIndex, Instruction, Loop, MaskTerm, Node, Program, Role

_AXES = "pxyzuvw"


def format_program(program: Program) -> str:
    """Returns the listing: buffers, then the loop nest with one instruction per line.

    Loop indices print as ``i<id>``, the coordinates of a tile as ``p`` (partition axis), ``x``, ``y``, ``z`` ….
    """
    return "\n".join([*_buffers(program), "", *_nodes(program, program.body, 0)])


def _buffers(program: Program) -> Iterator[str]:
    for buffer in program.buffers.values():
        shape = ", ".join(
            f"par({size})" if buffer.space != "hbm" and position == buffer.block_dims else str(size)
            for position, size in enumerate(buffer.shape)
        )
        details = [] if buffer.role is Role.TEMPORARY else [str(buffer.role)]
        if buffer.fill is not None:
            details.append(f"fill {buffer.fill:g}")
        if buffer.loops:
            details.append("per " + " ".join(f"i{loop}" for loop in buffer.loops))
        suffix = f"  ; {', '.join(details)}" if details else ""
        yield f"%{buffer.id} {buffer.name} = {buffer.space} {buffer.dtype}[{shape}]{suffix}  @{buffer.line}"


def _nodes(program: Program, nodes: tuple[Node, ...], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for node in nodes:
        if isinstance(node, Loop):
            yield f"{indent}for i{node.id} in {node.kind}({node.trips}):  @{node.line}"
            yield from _nodes(program, node.body, depth + 1)
        else:
            yield indent + format_instruction(program, node)


def format_instruction(program: Program, instruction: Instruction) -> str:
    """One instruction on one line."""
    outputs = ", ".join(_access(program, access) for access in instruction.outputs)
    operands = [
        f"{name}={_access(program, value) if isinstance(value, Access) else f'{value:g}'}"
        for name, value in instruction.operands.items()
    ]
    attributes = [
        f"{name}={_attribute(value)}" for name, value in instruction.attributes.items() if value not in (False, None)
    ]
    arrow = "+=" if instruction.accumulate else "="
    mask = " where " + " & ".join(_mask(term) for term in instruction.mask) if instruction.mask else ""
    arguments = ", ".join(operands + attributes)
    return f"{outputs} {arrow} {instruction.opcode}.{instruction.engine}({arguments}){mask}  @{instruction.line}"


def _access(program: Program, access: Access) -> str:
    index = ", ".join(_dim(program, dim) for dim in access.index)
    buffer = program.buffers[access.buffer]
    view = "" if access.view_shape == buffer.shape else f".view{list(access.view_shape)}"
    shape = "x".join(str(size) for size in access.shape)
    return f"{buffer.name}%{access.buffer}{view}[{index}]:{shape}"


def _dim(program: Program, dim: DimIndex) -> str:
    parts = [_term(stride, _AXES[axis]) for axis, stride in dim.strides]
    parts += [f"table({_AXES[axis]})" for axis, _ in dim.tables]
    if dim.indirect is not None:
        parts.append(_access(program, dim.indirect))
    start = _affine(dim.start)
    if start != "0" or not parts:
        parts.insert(0, start)
    return " + ".join(parts)


def _affine(affine: Affine) -> str:
    parts = [_term(coefficient, f"i{loop}") for loop, coefficient in affine.terms]
    if affine.constant or not parts:
        parts.append(str(affine.constant))
    return " + ".join(parts)


def _term(coefficient: int, name: str) -> str:
    return name if coefficient == 1 else f"{coefficient}*{name}"


def _mask(term: MaskTerm) -> str:
    parts = [_term(stride, _AXES[axis]) for axis, stride in term.strides]
    return f"{' + '.join([_affine(term.start), *parts])} >= 0"


def _attribute(value: object) -> str:
    if isinstance(value, MaskTerm):
        return f"({_mask(value)})"
    if isinstance(value, Affine):
        return _affine(value)
    if isinstance(value, tuple):
        return "(" + ", ".join(_attribute(entry) for entry in value) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)
