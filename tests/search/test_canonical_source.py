"""When two sources are the same kernel, and when they must not be taken for it."""

from __future__ import annotations

import pytest

from accelopt_ray.search.canonical import KernelSource, canonical_sha256

KERNEL = '''import neuronxcc.nki.language as nl
import neuronxcc.nki.isa as nisa


@nki.jit
def kernel(x, w):
    """Computes."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(8):
        tile = nl.load(x[i])
        res = nisa.activation(op=nl.exp, data=tile, scale=2.0)
        nl.store(out[i], value=res)
    return out
'''


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("comment", "    return out", "    # done\n    return out"),
        ("docstring", '"""Computes."""', '"""Something else."""'),
        ("no docstring", '    """Computes."""\n', ""),
        ("marker", "    return out", "    ' end loop '\n    return out"),
        ("layout", "nl.ndarray(x.shape, dtype", "nl.ndarray(\n        x.shape,\n        dtype"),
        ("blank lines", "    return", "\n\n    return"),
        ("local", "tile", "loaded"),
        ("loop index", "for i in", "for i in"),
        ("quotes and parentheses", "return out", "return (out)"),
        ("number's spelling", "2.0", "2.00"),
    ],
)
def test_the_same_kernel(what: str, old: str, new: str) -> None:
    assert old in KERNEL, what
    assert canonical_sha256(KERNEL.replace(old, new)) == canonical_sha256(KERNEL), what


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("number", "range(8)", "range(16)"),
        ("integer for float", "2.0", "2"),
        ("function", "nl.exp", "nl.square"),
        ("range kind", "affine_range", "sequential_range"),
        ("keyword", "scale=", "bias="),
        ("order of arguments", "kernel(x, w)", "kernel(w, x)"),
        ("module alias in use", "nl.load", "nisa.load"),
        ("operand", "data=tile", "data=out"),
        ("decorator", "@nki.jit\n", ""),
        ("entry", "def kernel", "def optimized_kernel"),
        ("buffer", "nl.shared_hbm", "nl.hbm"),
        ("a word the check looks for", "tile", "tile_float16"),
        ("default", "kernel(x, w)", "kernel(x, w=None)"),
    ],
)
def test_another_kernel(what: str, old: str, new: str) -> None:
    assert old in KERNEL, what
    assert canonical_sha256(KERNEL.replace(old, new)) != canonical_sha256(KERNEL), what


def test_renaming_is_consistent_not_blind() -> None:
    one = "def kernel(a, b):\n    return a - b\n"
    assert canonical_sha256(one) == canonical_sha256("def kernel(u, v):\n    return u - v\n")
    assert canonical_sha256(one) != canonical_sha256("def kernel(u, v):\n    return v - u\n")
    assert canonical_sha256(one) != canonical_sha256("def kernel(u, v):\n    return u - u\n")
    # A local must not be taken for a global of the same place in the order.
    free = "def kernel(a):\n    return helper(a)\n"
    assert canonical_sha256(free) != canonical_sha256("def kernel(a):\n    return other(a)\n")


def test_names_that_keywords_refer_to_are_kept() -> None:
    one = "def kernel(x):\n    def f(a, b):\n        return a - b\n    return f(a=x, b=1)\n"
    two = "def kernel(x):\n    def f(b, a):\n        return b - a\n    return f(a=x, b=1)\n"
    assert canonical_sha256(one) != canonical_sha256(two)


def test_none_is_not_absent() -> None:
    assert canonical_sha256("def kernel(a):\n    f(None)\n") != canonical_sha256("def kernel(a):\n    f()\n")
    assert canonical_sha256("x = [None]\n") != canonical_sha256("x = []\n")


@pytest.mark.parametrize("text", ["def kernel(", "\x00", "(" * 5000])
def test_what_does_not_parse_is_the_same_as_itself_alone(text: str) -> None:
    assert canonical_sha256(text) == canonical_sha256(text)
    assert canonical_sha256(text) != canonical_sha256(text + " ")


def test_both_hashes() -> None:
    one, two = KernelSource.of(KERNEL), KernelSource.of(KERNEL + "# more\n")
    assert one.sha256 != two.sha256
    assert one.canonical_sha256 == two.canonical_sha256
