"""Local rules: they fire in kernels of any style, keep the result, and leave near misses alone."""

from __future__ import annotations

import pytest
from rewrite_kernels import HEADER, STYLES, Program, assert_equal_results, hand_style

from accelopt_ray.rewrite.catalogue import PEEPHOLES
from accelopt_ray.rewrite.steps import Step, carry_out, sites_of

SILU: Program = [
    ("e", "activation", "exp", "x", {"scale": -1.0}),
    ("d", "tensor_scalar", "e", "add", 1.0),
    ("r", "reciprocal", "d"),
    ("y", "tensor_tensor", "x", "r", "multiply"),
]

FIRES: dict[str, list[Program]] = {
    "recognise-silu": [
        SILU,
        [*SILU[:3], ("y", "multiply", "r", "x")],
        [
            ("n", "tensor_scalar", "x", "multiply", -1.0),
            ("e", "exp", "n"),
            ("d", "add", "e", 1.0),
            ("y", "divide", "x", "d"),
        ],
        [("s", "activation", "sigmoid", "x"), ("y", "tensor_tensor", "x", "s", "multiply")],
    ],
    "recognise-sigmoid": [[*SILU[:3], ("y", "tensor_tensor", "z", "r", "multiply")]],
    "factor-scaled-self": [
        [("t", "tensor_scalar", "x", "multiply", 0.01), ("y", "tensor_tensor", "x", "t", "subtract")],
        [("t", "tensor_scalar", "x", "multiply", 0.25), ("y", "add", "t", "x")],
    ],
    "rsqrt": [
        [("s", "activation", "sqrt", "x", {"scale": 3.0}), ("y", "reciprocal", "s")],
        [("s", "sqrt", "x"), ("y", "divide", "z", "s")],
    ],
    "reciprocal-of-vector": [[("y", "divide", "x", "v")]],
    "scale-into-activation": [
        [("t", "tensor_scalar", "x", "multiply", 0.5), ("y", "activation", "exp", "t")],
        [("t", "multiply", "x", "v"), ("y", "activation", "tanh", "t")],
        [("t", "tensor_scalar", "x", "multiply", 0.5), ("y", "activation", "exp", "t", {"scale": 0.25, "bias": "v"})],
    ],
    "bias-into-activation": [
        [("t", "add", "x", "v"), ("y", "activation", "sigmoid", "t")],
        [
            ("t", "tensor_scalar", "x", "multiply", 0.5, {"op1": "nl.add", "operand1": "@v"}),
            ("y", "activation", "tanh", "t"),
        ],
    ],
    "constant-through-activation": [
        [("s", "activation", "square", "x"), ("y", "tensor_scalar", "s", "multiply", 0.25)],
        [("s", "activation", "rsqrt", "x", {"scale": 2.0}), ("y", "tensor_scalar", "s", "multiply", 3.0)],
    ],
    "constant-through-sum": [
        [
            ("a", "tensor_scalar", "x", "multiply", 0.9),
            ("b", "tensor_scalar", "z", "multiply", 0.1),
            ("s", "tensor_tensor", "a", "b", "add"),
            ("y", "tensor_scalar", "s", "multiply", 0.5),
        ]
    ],
    "square-activation": [
        [("y", "tensor_tensor", "x", "x", "multiply")],
        [("t", "tensor_scalar", "x", "multiply", 0.001), ("y", "multiply", "t", "x")],
    ],
    "reciprocal-activation": [[("y", "reciprocal", "x")]],
    "subtract-negated": [
        [("n", "tensor_scalar", "z", "multiply", -1.0), ("y", "tensor_tensor", "x", "n", "add")],
        [("n", "tensor_scalar", "z", "multiply", -1.0), ("y", "subtract", "x", "n")],
    ],
    "negated-reduce": [
        [
            ("m", "reduce", "x", "max"),
            ("k", "tensor_scalar", "m", "multiply", -1.0),
            ("y", "activation", "exp", "x", {"bias": "k"}),
        ]
    ],
    "two-op-tensor-scalar": [
        [("t", "tensor_scalar", "x", "multiply", 2.0), ("y", "tensor_scalar", "t", "add", 1.0)],
        [("t", "subtract", 1.0, "x"), ("y", "multiply", "t", "v")],
        [("t", "tensor_scalar", "x", "multiply", 2.0), ("y", "tensor_scalar", "t", "multiply", 3.0)],
    ],
    "scalar-tensor-tensor": [
        [("t", "tensor_scalar", "x", "multiply", 0.9), ("y", "tensor_tensor", "t", "z", "add")],
        [("t", "tensor_scalar", "x", "add", 2.0), ("y", "tensor_tensor", "z", "t", "subtract")],
        [("t", "multiply", "x", "v"), ("y", "multiply", "t", "z")],
    ],
    "activation-reduce": [
        [
            ("e", "activation", "exp", "x"),
            ("s", "reduce", "e", "add"),
            ("i", "reciprocal_of", "s"),
            ("y", "multiply", "e", "s"),
        ]
    ],
    "tensor-scalar-reduce": [
        [
            ("e", "tensor_scalar", "x", "multiply", 0.5),
            ("m", "reduce", "e", "max"),
            ("y", "subtract", "e", "m"),
        ]
    ],
    "scale-inside-exponential": [
        [
            ("s", "tensor_scalar", "x", "multiply", 0.125),
            ("m", "reduce", "s", "max"),
            ("k", "tensor_scalar", "m", "multiply", -1.0),
            ("y", "activation", "exp", "s", {"bias": "k"}),
        ],
        [
            ("s", "tensor_scalar", "z", "multiply", 3.0),
            ("m", "reduce", "s", "max"),
            ("e", "activation", "exp", "s", {"scale": 0.5}),
            ("y", "subtract", "e", "m"),
        ],
    ],
    "remove-copy": [[("t", "copy", "x"), ("y", "activation", "tanh", "t")]],
    "drop-dead-result": [[("t", "tensor_scalar", "x", "multiply", 2.0), ("y", "activation", "tanh", "x")]],
}

POSITIVE = {"rsqrt", "reciprocal-of-vector", "constant-through-activation", "reciprocal-activation"}

MISSES: dict[str, list[Program]] = {
    "recognise-silu": [
        # The denominator belongs to another tile, the constant is not 1, or a temporary is used twice.
        [*SILU[:3], ("y", "tensor_tensor", "z", "r", "multiply")],
        [SILU[0], ("d", "tensor_scalar", "e", "add", 2.0), *SILU[2:]],
        [("e", "activation", "exp", "x", {"scale": 1.0}), *SILU[1:]],
        [("e", "activation", "exp", "x", {"scale": -1.0, "bias": "v"}), *SILU[1:]],
        [*SILU[:3], ("p", "tensor_tensor", "x", "r", "multiply"), ("y", "tensor_tensor", "p", "d", "add")],
    ],
    "recognise-sigmoid": [
        [SILU[0], ("d", "tensor_scalar", "e", "subtract", 1.0), SILU[2], ("y", "multiply", "z", "r")]
    ],
    "factor-scaled-self": [
        [("t", "tensor_scalar", "x", "multiply", 0.01), ("y", "tensor_tensor", "z", "t", "subtract")],
        [
            ("t", "tensor_scalar", "x", "multiply", 0.01),
            ("d", "tensor_tensor", "x", "t", "subtract"),
            ("y", "tensor_tensor", "d", "t", "multiply"),
        ],
        [("t", "multiply", "x", "v"), ("y", "tensor_tensor", "x", "t", "subtract")],
    ],
    "rsqrt": [
        [("s", "sqrt", "x"), ("d", "tensor_scalar", "s", "add", 1e-8), ("y", "reciprocal", "d")],
        [("s", "sqrt", "x"), ("r", "reciprocal", "s"), ("y", "tensor_tensor", "r", "s", "add")],
    ],
    "reciprocal-of-vector": [[("y", "divide", "x", "z")], [("y", "divide", "v", "x")]],
    "scale-into-activation": [
        [("t", "tensor_scalar", "x", "add", 0.5), ("y", "activation", "exp", "t")],
        [("t", "tensor_tensor", "x", "z", "multiply"), ("y", "activation", "exp", "t")],
        [
            ("t", "tensor_scalar", "x", "multiply", 0.5),
            ("e", "activation", "exp", "t"),
            ("y", "tensor_tensor", "e", "t", "add"),
        ],
    ],
    "bias-into-activation": [
        [("t", "tensor_tensor", "x", "z", "add"), ("y", "activation", "exp", "t")],
        [("t", "add", "x", "v"), ("y", "activation", "exp", "t", {"scale": 2.0})],
        [("t", "add", "x", "v"), ("y", "activation", "exp", "t", {"bias": "v"})],
        [("t", "subtract", "v", "x"), ("y", "activation", "exp", "t")],
    ],
    "constant-through-activation": [
        [("s", "activation", "exp", "x"), ("y", "tensor_scalar", "s", "multiply", 0.25)],
        [("s", "activation", "square", "x"), ("y", "tensor_scalar", "s", "multiply", -0.25)],
        [("s", "activation", "square", "x", {"bias": "v"}), ("y", "tensor_scalar", "s", "multiply", 0.25)],
    ],
    "constant-through-sum": [
        [
            ("a", "tensor_scalar", "x", "multiply", 0.9),
            ("s", "tensor_tensor", "a", "z", "add"),
            ("y", "tensor_scalar", "s", "multiply", 0.5),
        ]
    ],
    "square-activation": [[("y", "tensor_tensor", "x", "z", "multiply")]],
    "reciprocal-activation": [[("y", "activation", "reciprocal", "x")]],
    "subtract-negated": [
        [("n", "tensor_scalar", "z", "multiply", -2.0), ("y", "tensor_tensor", "x", "n", "add")],
        [("n", "tensor_scalar", "z", "multiply", -1.0), ("y", "tensor_tensor", "n", "x", "subtract")],
    ],
    "negated-reduce": [
        [
            ("m", "reduce", "x", "max"),
            ("k", "tensor_scalar", "m", "multiply", -1.0),
            ("e", "activation", "exp", "x", {"bias": "k"}),
            ("y", "subtract", "e", "m"),
        ]
    ],
    "two-op-tensor-scalar": [
        [("t", "tensor_tensor", "x", "z", "multiply"), ("y", "tensor_scalar", "t", "add", 1.0)],
        [
            ("t", "tensor_scalar", "x", "multiply", 2.0),
            ("u", "tensor_scalar", "t", "add", 1.0),
            ("y", "tensor_tensor", "u", "t", "add"),
        ],
    ],
    "scalar-tensor-tensor": [
        [("t", "activation", "exp", "x"), ("y", "tensor_tensor", "t", "z", "add")],
        [
            ("t", "tensor_scalar", "x", "multiply", 0.9),
            ("u", "tensor_tensor", "t", "z", "add"),
            ("y", "tensor_tensor", "u", "t", "multiply"),
        ],
    ],
    "activation-reduce": [
        [("e", "activation", "exp", "x"), ("s", "reduce", "e", "max"), ("y", "multiply", "e", "s")],
        [("e", "tensor_tensor", "x", "z", "add"), ("s", "reduce", "e", "add"), ("y", "multiply", "e", "s")],
    ],
    "tensor-scalar-reduce": [
        [("e", "activation", "exp", "x"), ("m", "reduce", "e", "max"), ("y", "subtract", "e", "m")],
    ],
    "scale-inside-exponential": [
        [
            ("s", "tensor_scalar", "x", "multiply", -0.125),
            ("m", "reduce", "s", "max"),
            ("y", "activation", "exp", "s", {"bias": "m"}),
        ],
        [
            ("s", "tensor_scalar", "x", "multiply", 0.125),
            ("m", "reduce", "s", "max"),
            ("e", "activation", "exp", "s", {"bias": "m"}),
            ("y", "tensor_tensor", "e", "s", "add"),
        ],
        [
            ("s", "tensor_scalar", "x", "add", 0.125),
            ("m", "reduce", "s", "max"),
            ("y", "activation", "exp", "s", {"bias": "m"}),
        ],
        [("s", "tensor_scalar", "x", "multiply", 0.125), ("y", "activation", "exp", "s")],
    ],
    "remove-copy": [[("t", "copy", "x"), ("u", "activation", "tanh", "t"), ("y", "multiply", "u", "t")]],
    "drop-dead-result": [[("t", "multiply", "x", "z"), ("u", "multiply", "t", "v"), ("y", "activation", "tanh", "u")]],
}


def _source(style: str, program: Program) -> str:
    # ``@v`` stands for the vector inside keyword text; ``reciprocal_of`` is a filler on the vector.
    steps = [step for step in program if step[1] != "reciprocal_of"]
    source = STYLES[style](steps)
    name = {"hand": "v_tile", "nested": "weight", "compiler": "b_v[i0, nl.arange(128)[:, None], 0]"}[style]
    return source.replace("@v", name)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("rule", FIRES)
def test_a_rule_fires_in_every_style_and_keeps_the_result(rule: str, style: str) -> None:
    for program in FIRES[rule]:
        source = _source(style, program)
        outcome = carry_out(source, [Step(rule)])
        assert outcome.changed, f"{rule} does not fire on\n{source}"
        assert outcome.source != source
        assert_equal_results(source, outcome.source, positive=rule in POSITIVE)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("rule", MISSES)
def test_a_rule_leaves_near_misses_alone(rule: str, style: str) -> None:
    for program in MISSES[rule]:
        source = _source(style, program)
        assert sites_of(source, rule) == (), f"{rule} fires on\n{source}"


def test_every_peephole_is_tested_both_ways() -> None:
    tested = {"epilogue-from-psum", "share-load", "hoist-invariant", "one-zero-hint"}  # Tested below.
    assert {rule.id for rule in PEEPHOLES} == set(FIRES) | tested == set(MISSES) | tested


def test_different_masks_are_not_merged() -> None:
    source = hand_style([("t", "tensor_scalar", "x", "multiply", 2.0), ("y", "tensor_scalar", "t", "add", 1.0)])
    masked = source.replace(
        "op0=nl.multiply, operand0=2.0)", "op0=nl.multiply, operand0=2.0, mask=nl.arange(128)[:, None] < 64)"
    )
    assert masked != source
    assert sites_of(source, "two-op-tensor-scalar")
    assert not sites_of(masked, "two-op-tensor-scalar")


def test_an_input_overwritten_in_between_blocks_the_rewrite() -> None:
    source = hand_style(
        [("t", "tensor_scalar", "x", "multiply", 2.0), ("u", "copy", "z"), ("y", "tensor_scalar", "t", "add", 1.0)]
    )
    overwritten = source.replace("u_tile = nl.copy(z_tile)", "x_tile[...] = nl.copy(z_tile)")
    assert not sites_of(overwritten, "two-op-tensor-scalar")


PRODUCT = """
@nki.jit
def kernel(a, b, c):
    k, m = a.shape
    _, n = b.shape
    out = nl.ndarray((m, n), dtype=a.dtype, buffer=nl.shared_hbm)
    left = nl.load(a[0:k, 0:m])
    right = nl.load(b[0:k, 0:n])
    add = nl.load(c[0:m, 0:n])
    product = nisa.nc_matmul(left, right)
    {middle}
    nl.store(out[0:m, 0:n], value=result)
    return out
"""


@pytest.mark.parametrize(
    ("middle", "fires"),
    [
        ("moved = nl.copy(product)\n    result = nisa.activation(op=nl.exp, data=moved, scale=0.1)", True),
        ("moved = nl.copy(product)\n    result = nisa.tensor_tensor(moved, add, op=nl.add)", True),
        (
            "moved = nisa.tensor_copy(product)\n    result = nisa.tensor_scalar(data=moved, op0=nl.add, operand0=1.0)",
            True,
        ),
        # Both operands would be in PSUM; the copy has two readers; the copy is of an SBUF tile.
        (
            "other = nisa.nc_matmul(left, right)\n    moved = nl.copy(product)\n"
            "    result = nisa.tensor_tensor(moved, other, op=nl.add)",
            False,
        ),
        ("moved = nl.copy(product)\n    result = nisa.tensor_tensor(moved, moved, op=nl.add)", False),
        ("moved = nl.copy(add)\n    result = nisa.activation(op=nl.exp, data=moved)", False),
    ],
)
def test_epilogue_reads_psum(middle: str, fires: bool) -> None:
    source = HEADER + PRODUCT.format(middle=middle)
    outcome = carry_out(source, [Step("epilogue-from-psum")])
    assert outcome.changed is fires
    if fires:
        assert "moved" not in outcome.source
        assert_equal_results(source, outcome.source, (64, 128), (64, 256), (128, 256))


HINTED = """
@nki.jit
def kernel(x):
    k, m = x.shape
    out = nl.ndarray((m, k), dtype=x.dtype, buffer=nl.shared_hbm)
    unit = {unit}
    tile = nl.load(x[0:k, 0:m])
    nl.store(out[0:m, 0:k], value=nl.copy(nisa.nc_matmul({operands})))
    return out
"""


@pytest.mark.parametrize(
    ("unit", "operands", "hint"),
    [
        ("nl.load(nl.shared_constant(np.identity(k, dtype=np.float32)))", "tile, unit", "is_moving_onezero"),
        ("nl.ones((nl.par_dim(k), k), dtype=nl.float32, buffer=nl.sbuf)", "tile, moving=unit", "is_moving_onezero"),
        ("nisa.memset((k, 64), 1.0, dtype=nl.float32)", "unit, tile", "is_stationary_onezero"),
        # Told already; twos; an input; scaled afterwards.
        ("nl.load(nl.shared_constant(np.eye(k, dtype=np.float32)))", "tile, unit, is_moving_onezero=True", ""),
        ("nl.load(nl.shared_constant(2 * np.eye(k, dtype=np.float32)))", "tile, unit", ""),
        ("nl.full((nl.par_dim(k), k), 2.0, dtype=nl.float32, buffer=nl.sbuf)", "tile, unit", ""),
        ("nl.load(x[0:k, 0:k])", "tile, unit", ""),
        ("nl.ones((nl.par_dim(k), k), dtype=nl.float32)\n    unit[...] = nl.load(x[0:k, 0:k])", "tile, unit", ""),
    ],
)
def test_operands_of_zeros_and_ones_are_hinted(unit: str, operands: str, hint: str) -> None:
    source = HEADER + HINTED.format(unit=unit, operands=operands)
    outcome = carry_out(source, [Step("one-zero-hint")])
    assert outcome.changed is bool(hint)
    if hint:
        assert f"{hint}=True" in outcome.source
        if "memset" not in unit:
            assert_equal_results(source, outcome.source, (64, 128))


TWICE = """
@nki.jit
def kernel(x, w):
    rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    for r in nl.affine_range(rows // 128):
        for c in nl.affine_range(columns // 128):
            scale = nl.load(w[nl.ds(r * 128, 128), 0:1])
            one = nl.load(x[nl.ds(r * 128, 128), nl.ds(c * 128, 128)])
            grown = nisa.activation(op=nl.exp, data=one, scale=scale)
            two = nl.load(x[nl.ds(128 * r, 128), nl.ds(c * 128, 128)])
            both = nisa.tensor_tensor(grown, two[0:128, 0:128], op=nl.add)
            nl.store(out[nl.ds(r * 128, 128), nl.ds(c * 128, 128)], value=both)
    return out
"""
TWICE_GRIDS = TWICE.replace(
    "nl.ds(128 * r, 128), nl.ds(c * 128, 128)", "r * 128 + nl.arange(128)[:, None], c * 128 + nl.arange(128)[None, :]"
)
TWICE_RENAMED = TWICE.replace("two", "again").replace("one", "tile").replace("scale = nl", "factor = nl")
TWICE_RENAMED = TWICE_RENAMED.replace("scale=scale", "scale=factor")


@pytest.mark.parametrize("source", [TWICE, TWICE_GRIDS, TWICE_RENAMED])
@pytest.mark.parametrize(("rule", "gone"), [("share-load", "= nl.load(x"), ("hoist-invariant", "")])
def test_repeated_work_is_done_once(source: str, rule: str, gone: str) -> None:
    outcome = carry_out(HEADER + source, [Step(rule)])
    assert outcome.applied and outcome.applied[0][1] == 1
    if gone:
        assert outcome.source.count(gone) == source.count(gone) - 1
    else:
        lines = [line.strip() for line in outcome.source.splitlines()]
        assert lines.index(next(x for x in lines if "nl.load(w" in x)) < lines.index(
            "for c in nl.affine_range(columns // 128):"
        )
    assert_equal_results(HEADER + source, outcome.source, (256, 384), (256, 1))


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("share-load", ("nl.ds(128 * r, 128)", "nl.ds(128 * c, 128)")),
        (
            "share-load",
            ("nl.ds(c * 128, 128)])\n            both", "nl.ds(c * 128, 128)], mask=c < 2)\n            both"),
        ),
        ("share-load", ("two = nl.load(x", "one[...] = nl.exp(one)\n            two = nl.load(x")),
        ("hoist-invariant", ("w[nl.ds(r * 128, 128), 0:1]", "w[nl.ds(c * 128, 128), 0:1]")),
        ("hoist-invariant", ("for c in nl.affine_range", "for c in nl.static_range")),
        ("hoist-invariant", ("one = nl.load", "scale[...] = nl.exp(scale)\n            one = nl.load")),
    ],
)
def test_work_that_differs_is_not_shared(rule: str, change: tuple[str, str]) -> None:
    source = HEADER + TWICE.replace(*change)
    assert source != HEADER + TWICE
    assert sites_of(source, rule) == ()


def test_comments_and_layout_outside_the_change_survive() -> None:
    source = hand_style(SILU)
    changed = carry_out(source, [Step("recognise-silu")]).source
    kept = [line for line in source.splitlines() if not any(f"{name}_tile =" in line for name in "edry")]
    assert [line for line in changed.splitlines() if "y_tile = " not in line] == kept
    assert "# the input" in changed
