"""Kernels to rewrite: short elementwise programs in three styles, and running them in the simulator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from accelopt_ray.devices.protocol import TensorSpec
from accelopt_ray.nki_sim.numerics.execute import run_program
from accelopt_ray.nki_sim.tracer import trace_kernel

HEADER = """import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
"""

#: ``(destination, operation, arguments ...)``; x and z are tiles, v is a (P, 1) vector, ``y`` is the result.
Program = Sequence[tuple[object, ...]]


def hand_style(program: Program) -> str:
    """One loop over row tiles, slices, results bound to names."""
    lines = [
        HEADER,
        "",
        "@nki.jit",
        "def kernel(x, z, v):",
        '    """Some rows."""',
        "    rows, columns = x.shape",
        "    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)",
        "    for tile in nl.affine_range(rows // 128):",
        "        first = tile * 128",
        "        x_tile = nl.load(x[first : first + 128, 0:columns])  # the input",
        "        z_tile = nl.load(z[first : first + 128, 0:columns])",
        "        v_tile = nl.load(v[first : first + 128, 0:1])",
    ]
    names = {"x": "x_tile", "z": "z_tile", "v": "v_tile"}
    for step in program:
        lines.append("        " + _hand(step, names))
    lines += ["        nl.store(out[first : first + 128, 0:columns], value=y_tile)", "    return out"]
    return "\n".join(lines) + "\n"


def _hand(step: tuple[object, ...], names: dict[str, str]) -> str:
    destination = str(step[0])
    names[destination] = f"{destination}_tile"
    return f"{names[destination]} = {_call(step, names)}"


def nested_style(program: Program) -> str:
    """Other names, two loops, 64 partitions, column tiles, two-space indentation, results bound to names."""
    lines = [
        HEADER,
        "@nki.jit",
        "def optimized_kernel(first_input, second_input, per_row):",
        "  total, width = first_input.shape",
        "  answer = nl.ndarray((total, width), dtype=first_input.dtype, buffer=nl.shared_hbm)",
        "  for band in nl.affine_range(total // 64):",
        "    weight = nl.load(per_row[nl.ds(band * 64, 64), 0:1])",
        "    for strip in nl.affine_range(width // 128):",
        "      part = nl.load(first_input[nl.ds(band * 64, 64), nl.ds(strip * 128, 128)])",
        "      other = nl.load(second_input[nl.ds(band * 64, 64), nl.ds(strip * 128, 128)])",
    ]
    names = {"x": "part", "z": "other", "v": "weight"}
    for step in program:
        names[str(step[0])] = f"q_{step[0]}"
        lines.append(f"      q_{step[0]} = {_call(step, names)}")
    lines += ["      nl.store(answer[nl.ds(band * 64, 64), nl.ds(strip * 128, 128)], value=q_y)", "  return answer"]
    return "\n".join(lines) + "\n"


def compiler_style(program: Program) -> str:
    """Buffers with block dimensions at the top, index grids, as a compiler writes it; rows are 256, columns 512."""
    grid = "[i0, i1, nl.arange(128)[:, None], nl.arange(256)[None, :]]"
    vector = "[i0, nl.arange(128)[:, None], 0]"
    narrow: list[str] = []
    for step in program:
        if step[1] == "reduce" or (step[1] == "tensor_scalar" and step[2] in narrow):
            narrow.append(str(step[0]))
    wide = ["x", "z", *(str(step[0]) for step in program if step[0] not in narrow)]
    lines = [HEADER, "@nki.jit", "def kernel(v1, v2, v3):"]
    lines.append("    v4 = nl.ndarray((256, 512), dtype=np.float32, buffer=nl.shared_hbm)")
    for name in dict.fromkeys(wide):
        lines.append(
            f"    b_{name} = nl.ndarray((2, 2, nl.par_dim(128), 256), dtype=np.float32, name='', buffer=nl.sbuf)"
        )
    lines.append("    b_v = nl.ndarray((2, nl.par_dim(128), 1), dtype=np.float32, buffer=nl.sbuf)")
    for name in narrow:
        lines.append(f"    b_{name} = nl.ndarray((2, 2, nl.par_dim(128), 1), dtype=np.float32, buffer=nl.sbuf)")
    rows, columns = "128 * i0 + nl.arange(128)[:, None]", "256 * i1 + nl.arange(256)[None, :]"
    lines += [
        "    for i0 in nl.affine_range(2):",
        f"        b_v{vector} = nl.load(v3[{rows}, nl.arange(1)[None, :]], dtype=np.float32)",
        "        for i1 in nl.affine_range(2):",
        f"            b_x{grid} = nl.load(v1[{rows}, {columns}], dtype=np.float32, mask=None)",
        f"            b_z{grid} = nl.load(v2[{rows}, {columns}], dtype=np.float32, mask=None)",
    ]
    names = {name: f"b_{name}{grid}" for name in wide}
    names["v"] = f"b_v{vector}"
    names |= {name: f"b_{name}[i0, i1, nl.arange(128)[:, None], 0]" for name in narrow}
    for step in program:
        lines.append(f"            {names[str(step[0])]} = {_call(step, names)}")
    lines += [
        f"            nl.store(v4[{rows}, {columns}], value=b_y{grid}, mask=None)",
        "            ' end loop i1 '",
        "        ' end loop i0 '",
        "    return v4",
    ]
    return "\n".join(lines) + "\n"


STYLES = {"hand": hand_style, "nested": nested_style, "compiler": compiler_style}


def _call(step: tuple[object, ...], names: dict[str, str]) -> str:
    operation, arguments = str(step[1]), step[2:]

    def operand(value: object) -> str:
        return names.get(value, value) if isinstance(value, str) else repr(value)

    if operation == "activation":
        function, data, *rest = arguments
        more = "".join(f", {name}={operand(value)}" for name, value in (rest[0].items() if rest else ()))  # type: ignore[attr-defined]
        return f"nisa.activation(op=nl.{function}, data={operand(data)}{more})"
    if operation == "tensor_scalar":
        data, op0, operand0, *rest = arguments
        more = "".join(f", {name}={value}" for name, value in (rest[0].items() if rest else ()))  # type: ignore[attr-defined]
        return f"nisa.tensor_scalar(data={operand(data)}, op0=nl.{op0}, operand0={operand(operand0)}{more})"
    if operation == "tensor_tensor":
        a, b, op = arguments
        return f"nisa.tensor_tensor({operand(a)}, {operand(b)}, op=nl.{op})"
    if operation == "reduce":
        data, op = arguments
        return f"nisa.tensor_reduce(nl.{op}, data={operand(data)}, axis=[1], keepdims=True)"
    if operation == "reciprocal":
        return f"nisa.reciprocal(data={operand(arguments[0])})"
    if operation == "copy":
        return f"nl.copy({operand(arguments[0])})"
    return f"nl.{operation}({', '.join(operand(value) for value in arguments)})"


ROWS, COLUMNS = 256, 512


def run(source: str, *shapes: tuple[int, ...], seed: int = 0, positive: bool = False) -> list[np.ndarray]:
    """Outputs of a kernel on normal (or positive) random inputs of the given shapes."""
    shapes = shapes or ((ROWS, COLUMNS), (ROWS, COLUMNS), (ROWS, 1))
    stream = np.random.default_rng(seed)
    inputs = [stream.standard_normal(shape).astype(np.float32) for shape in shapes]
    if positive:
        inputs = [np.abs(value) + np.float32(0.5) for value in inputs]
    program = trace_kernel(source, [TensorSpec(shape, "float32") for shape in shapes])
    return run_program(program, inputs)


def assert_equal_results(before: str, after: str, *shapes: tuple[int, ...], positive: bool = False) -> None:
    """Both kernels compute the same to fp32 rounding, on two draws."""
    for seed in (0, 1):
        expected = run(before, *shapes, seed=seed, positive=positive)
        actual = run(after, *shapes, seed=seed, positive=positive)
        assert len(expected) == len(actual)
        for one, other in zip(expected, actual, strict=False):
            assert one.shape == other.shape
            np.testing.assert_allclose(other, one, rtol=2e-5, atol=3e-6 * float(np.max(np.abs(one))))
