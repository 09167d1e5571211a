"""The syntax tree and the analysis: what survives printing, and what is known about a kernel."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rewrite_kernels import HEADER, STYLES, hand_style

from accelopt_ray.rewrite.analysis import Kernel
from accelopt_ray.rewrite.normalise import normalise
from accelopt_ray.rewrite.poly import Poly
from accelopt_ray.rewrite.syntax import KernelSyntaxError, SourceTree
from nkibench.task import list_tasks, load_task

PROGRAM = [("t", "tensor_scalar", "x", "multiply", 2.0), ("y", "tensor_tensor", "t", "z", "add")]


@pytest.mark.parametrize("task", list_tasks())
def test_untouched_source_is_printed_as_it_was(task: str) -> None:
    source = load_task(task).baseline_source()
    assert SourceTree(source).source() == source
    assert Kernel.parse(source).source() == source


@pytest.mark.parametrize("style", STYLES)
def test_styles_read_alike(style: str) -> None:
    kernel = Kernel.parse(STYLES[style](PROGRAM))
    assert kernel.understood
    assert [op.kind for op in kernel.ops if op.kind not in ("load", "store")] == ["tensor_scalar", "tensor_tensor"]
    scaled, total = (op for op in kernel.ops if op.kind.startswith("tensor_"))
    assert kernel.private_source(total.ref("data1"), total) is scaled
    assert scaled.number("operand0") == 2.0


def test_comments_blank_lines_and_indentation_survive_edits_elsewhere() -> None:
    source = hand_style(PROGRAM).replace("    for tile", "    # rows\n\n    for tile").replace("    ", "  ")
    tree = SourceTree(source)
    loop = next(node for node in tree.entry.body if isinstance(node, ast.For))
    del loop.body[-1]
    printed = tree.source()
    assert "  # rows\n\n  for tile" in printed and "# the input" in printed
    assert printed.splitlines() == [line for line in source.splitlines() if "nl.store" not in line]


def test_statements_that_share_a_line_are_printed_once() -> None:
    source = "def kernel(a):\n    x = 1; y = 2; z = x\n    for i in range(3): y = i; z = y\n    return z\n"
    tree = SourceTree(source)
    assert ast.dump(ast.parse(tree.source())) == ast.dump(ast.parse(source))
    del tree.entry.body[1]
    assert "y = 2" not in tree.source() and tree.source().count("x = 1") == 1


def test_long_generated_statements_are_wrapped() -> None:
    tree = SourceTree(hand_style(PROGRAM))
    text = f"t = nisa.activation(op=nl.exp, data={'a' * 60}, scale=1.0, bias={'b' * 60})"
    tree.entry.body.insert(0, ast.parse(text).body[0])
    printed = tree.source()
    assert max(map(len, printed.splitlines())) <= 120
    assert ast.dump(ast.parse(printed)) == ast.dump(tree.module)


@pytest.mark.parametrize("text", ["", "def kernel(:", "x = 1", "def helper(a):\n    return a\n", "\0"])
def test_text_without_a_kernel_is_refused(text: str) -> None:
    with pytest.raises(KernelSyntaxError):
        Kernel.parse(text)


def _refs(body: str, arguments: str = "x") -> Kernel:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return Kernel.parse(f"{HEADER}\n@nki.jit\ndef kernel({arguments}):\n{lines}\n")


@pytest.mark.parametrize(
    "index",
    [
        "t * 128 : t * 128 + 128, 0:64",
        "nl.ds(t * 128, 128), 0:64",
        "128 * t + nl.arange(128)[:, None], nl.arange(64)[None, :]",
        "nl.arange(128)[:, None] + t * P, nl.arange(64)[None, :]",
        "first + rows, columns",
        "t * 128 + grid[0], grid[1]",
        "t * P : (t + 1) * P, :64",
    ],
)
def test_index_styles_name_the_same_region(index: str) -> None:
    kernel = _refs(
        f"""
P = 128
rows = nl.arange(128)[:, None]
columns = nl.arange(64)[None, :]
grid = nl.mgrid[0:128, 0:64]
for t in nl.affine_range(4):
    first = t * 128
    one = nl.load(x[t * 128 : t * 128 + 128, 0:64])
    other = nl.load(x[{index}])
"""
    )
    one, other = (op.ref("src") for op in kernel.ops)
    assert one is not None and other is not None and one.same_region(other)
    assert one.shape == (Poly.of(128), Poly.of(64))


def test_sibling_loops_with_one_index_name_are_told_apart() -> None:
    kernel = _refs(
        "for i in nl.affine_range(2):\n    a = nl.load(x[i])\nfor i in nl.affine_range(2):\n    b = nl.load(x[i])"
    )
    first, second = (op.ref("src") for op in kernel.ops)
    assert first is not None and second is not None and not first.same_region(second)
    assert "i_1" in normalise(kernel).source()


def test_shapes_come_from_unpacking_and_assertions() -> None:
    kernel = _refs("assert x.shape == (256, 64)\nm, _ = y.shape\na = nl.load(x)\nb = nl.load(y[0:m, 0:8])", "x, y")
    assert [op.dest.shape for op in kernel.ops if op.dest] == [
        (Poly.of(256), Poly.of(64)),
        (Poly.symbol("m"), Poly.of(8)),
    ]


def test_what_is_not_understood_touches_all_it_names() -> None:
    kernel = _refs("a = nl.load(x[0:128, 0:64])\nb = mystery(a)\nc = nl.exp(a)")
    assert any(op.kind == "unknown" for op in kernel.ops)
    exp = kernel.ops[-1]
    assert kernel.definition(exp.args["data"], exp) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "limit", "holds"),
    [
        ("w = max(v for v in range(1, 513) if n % v == 0)", 512, True),
        ("w = n // 2", 512, False),
        ("w = 512", 512, True),
    ],
)
def test_sizes_with_a_known_limit(text: str, limit: int, holds: bool) -> None:
    kernel = _refs(f"n = x.shape[1]\n{text}\na = nl.load(x[0:128, 0:w])")
    value = kernel.names.values["w"]
    assert isinstance(value, Poly) and kernel.names.at_most(value, limit) is holds


_POLYS = st.recursive(
    st.integers(-9, 9).map(Poly.of) | st.sampled_from("abc").map(Poly.symbol),
    lambda inner: (
        st.tuples(inner, inner).map(lambda pair: pair[0] + pair[1])
        | st.tuples(inner, inner).map(lambda pair: pair[0] * pair[1])
    ),
    max_leaves=6,
)


@given(_POLYS, _POLYS, st.fixed_dictionaries({name: st.integers(-5, 5) for name in "abc"}))
def test_polynomials_compute_and_print_what_they_mean(one: Poly, other: Poly, values: dict[str, int]) -> None:
    def value(poly: Poly) -> int:
        return int(eval(poly.text(), {}, dict(values)))

    assert value(one + other) == value(one) + value(other)
    assert value(one - other) == value(one) - value(other)
    assert value(one * other) == value(one) * value(other)
    assert (one - one) == Poly() and one + other == other + one


def test_rewriting_reads_no_task_name_or_shape() -> None:
    names = {task for task in list_tasks() if task not in ("silu", "matmul", "rope", "mamba")}
    folder = Path(__file__).parents[2] / "accelopt_ray" / "rewrite"
    for path in folder.rglob("*.py"):
        text = path.read_text()
        assert not [name for name in names if name in text], path
        assert not [size for size in ("10944", "12288", "7168", "5120") if size in text], path
