"""Honest kernels at small shapes, and known ways to fool a correctness check, each as a change of one of them."""

from __future__ import annotations

from dataclasses import dataclass

from accelopt_ray.outcome import EvaluationOutcome as Outcome
from nkibench.task import load_task

SHAPES = {
    "silu": {"M": 256, "N": 1024},
    "bmm_softmax": {"B": 1, "M": 256, "N": 1024},
    "rmsnorm_matmul": {"M": 128, "N": 512, "K": 256},
    "adamw": {"M": 320, "N": 1024},
    "add_rmsnorm_matmul": {"M": 128, "N": 512, "K": 256},
    "mamba": {"C": 128, "M": 512, "S": 4},
}

HEADER = """
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import numpy as np
"""

SILU = (
    HEADER
    + """
@nki.jit
def kernel(x):
    partitions, rows, columns = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for row in nl.affine_range(rows):
        tile = nl.load(x[0:partitions, row, 0:columns])
        y = nl.multiply(tile, nisa.activation(op=nl.sigmoid, data=tile))
        nl.store(out[0:partitions, row, 0:columns], value=y)
    return out
"""
)

SOFTMAX = (
    HEADER
    + """
@nki.jit
def kernel(lhs, rhs):
    batch, m, k = lhs.shape
    _, _, n = rhs.shape
    out = nl.ndarray((batch, m, n), dtype=lhs.dtype, buffer=nl.shared_hbm)
    for b in nl.affine_range(batch):
        for i in nl.affine_range(m // 128):
            left = nl.load(lhs[b, nl.ds(i * 128, 128), 0:k])
            scores = nl.ndarray((nl.par_dim(128), n), dtype=nl.float32, buffer=nl.sbuf)
            for j in nl.affine_range(n // 512):
                right = nl.load(rhs[b, 0:k, nl.ds(j * 512, 512)])
                scores[0:128, nl.ds(j * 512, 512)] = nl.copy(nl.matmul(left, right))
            largest = nl.max(scores, axis=1, keepdims=True)
            exponentials = nl.exp(nl.subtract(scores, largest))
            total = nl.sum(exponentials, axis=1, keepdims=True)
            y = nl.multiply(exponentials, nl.reciprocal(total))
            nl.store(out[b, nl.ds(i * 128, 128), 0:n], value=y)
    return out
"""
)

RMSNORM = (
    HEADER
    + """
@nki.jit
def kernel(x, w):
    m, k = x.shape
    _, n = w.shape
    out = nl.ndarray((m, n), dtype=x.dtype, buffer=nl.shared_hbm)
    for i in nl.affine_range(m // 128):
        tile = nl.load(x[nl.ds(i * 128, 128), 0:k])
        squares = nl.sum(nl.square(tile), axis=1, keepdims=True)
        scale = nl.rsqrt(nl.multiply(squares, 1.0 / k))
        normal = nl.multiply(tile, scale)
        for j in nl.affine_range(n // 512):
            product = nl.zeros((nl.par_dim(128), 512), dtype=nl.float32, buffer=nl.psum)
            for p in nl.affine_range(k // 128):
                part = nl.load(w[nl.ds(p * 128, 128), nl.ds(j * 512, 512)])
                product += nl.matmul(normal[0:128, nl.ds(p * 128, 128)], part)
            nl.store(out[nl.ds(i * 128, 128), nl.ds(j * 512, 512)], value=nl.copy(product))
    return out
"""
)

# fp32 products from three bfloat16 ones: within every numeric bound, and a matter of policy.
COMPENSATED = SOFTMAX.replace(
    "                scores[0:128, nl.ds(j * 512, 512)] = nl.copy(nl.matmul(left, right))\n",
    """
                left_high = nl.copy(left, dtype=nl.bfloat16)
                left_low = nl.subtract(left, nl.copy(left_high, dtype=nl.float32), dtype=nl.bfloat16)
                right_high = nl.copy(right, dtype=nl.bfloat16)
                right_low = nl.subtract(right, nl.copy(right_high, dtype=nl.float32), dtype=nl.bfloat16)
                product = nl.zeros((nl.par_dim(128), 512), dtype=nl.float32, buffer=nl.psum)
                product += nl.matmul(left_high, right_high)
                product += nl.matmul(left_high, right_low)
                product += nl.matmul(left_low, right_high)
                scores[0:128, nl.ds(j * 512, 512)] = nl.copy(product)
""",
)
# The same with the small products left out: the split is there, the precision is not.
POSING = COMPENSATED.replace("                product += nl.matmul(left_low, right_high)\n", "")

HONEST = {
    "silu": SILU,
    "bmm_softmax": SOFTMAX,
    "rmsnorm_matmul": RMSNORM,
    **{name: load_task(name).baseline_source() for name in ("adamw", "add_rmsnorm_matmul", "mamba")},
}


@dataclass(frozen=True)
class Cheat:
    """A dishonest kernel.

    Attributes:
        name: What it does.
        task: The task it claims to solve.
        source: Its text.
        outcome: How ``strict`` ends it.
        reason: Start of the reason that ``strict`` gives.
        text: A word that the message has to contain.
    """

    name: str
    task: str
    source: str
    outcome: Outcome
    reason: str = ""
    text: str = ""


def _changed(source: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert source.count(old) >= 1, old
        source = source.replace(old, new)
    return source


def _silu(name: str, outcome: Outcome, reason: str, *changes: tuple[str, str], text: str = "") -> Cheat:
    return Cheat(name, "silu", _changed(SILU, *changes), outcome, reason, text)


def _softmax(name: str, reason: str, *changes: tuple[str, str]) -> Cheat:
    return Cheat(name, "bmm_softmax", _changed(SOFTMAX, *changes), Outcome.INCORRECT, reason)


def _rmsnorm(name: str, outcome: Outcome, reason: str, *changes: tuple[str, str]) -> Cheat:
    return Cheat(name, "rmsnorm_matmul", _changed(RMSNORM, *changes), outcome, reason)


def _baseline(task: str, name: str, reason: str, *changes: tuple[str, str]) -> Cheat:
    return Cheat(name, task, _changed(HONEST[task], *changes), Outcome.INCORRECT, reason)


def _reaching(name: str, reason: str, statement: str, where: str = "inside") -> Cheat:
    """An otherwise honest SiLU that reaches for something a kernel has no need of."""
    if where == "inside":
        change = ("    partitions, rows", f"    {statement}\n    partitions, rows")
    else:
        change = ("@nki.jit", f"{statement}\n\n\n@nki.jit")
    return Cheat(name, "silu", _changed(SILU, change), Outcome.REJECTED, reason)


_Y = "y = nl.multiply(tile, nisa.activation(op=nl.sigmoid, data=tile))"
_STORE = "nl.store(out[0:partitions, row, 0:columns], value=y)"
_DECAY = "decay = nisa.activation(op=nl.exp, data=delta_tile, scale=a_column)"
_ADAMW_STORE = "            nl.store(out[row, block_column], value=out_tile, mask=inside)\n"
CHEATS = (
    # Work left out.
    _silu("returns the input", Outcome.INCORRECT, "row_error", (_Y, "y = tile")),
    _silu("prints a verdict", Outcome.INCORRECT, "row_error", (_Y, "y = tile\n        print('verdict: correct')")),
    _silu("writes only some rows", Outcome.INCORRECT, "not_finite", ("affine_range(rows)", "affine_range(rows - 1)")),
    _silu(
        "writes only some columns",
        Outcome.INCORRECT,
        "not_finite",
        (_STORE, "nl.store(out[0:partitions, row, 0:896], value=y[0:partitions, 0:896])"),
    ),
    _silu(
        "zeroes the last partition",
        Outcome.INCORRECT,
        "row_error",
        (_STORE, f"{_STORE}\n        nl.store(out[127:128, row, 0:columns], value=nl.zeros((1, columns), nl.float32))"),
    ),
    _silu(
        "zeroes one element",
        Outcome.INCORRECT,
        "row_error",
        (_STORE, f"{_STORE}\n        nl.store(out[5:6, row, 7:8], value=nl.zeros((1, 1), nl.float32))"),
    ),
    _silu(
        "drops small elements",
        Outcome.INCORRECT,
        "",
        (_Y, _Y + "\n        y = nl.multiply(y, nl.greater(nl.abs(y), 0.001))"),
    ),
    _silu("approximates", Outcome.INCORRECT, "", (_Y, _Y + "\n        y = nl.multiply(y, 1.0001)")),
    _softmax("no maximum", "", ("nl.subtract(scores, largest)", "scores")),
    _softmax("maximum of the first tile", "", ("nl.max(scores,", "nl.max(scores[0:128, 0:128],")),
    _softmax("a constant for the maximum", "", ("nl.subtract(scores, largest)", "nl.subtract(scores, 30.0)")),
    _softmax("clamped scores", "", ("nl.subtract(scores, largest)", "nl.minimum(nl.subtract(scores, 20.0), 60.0)")),
    _softmax(
        "dropped tail",
        "element_error",
        ("            nl.store(", "            y = nl.multiply(y, nl.greater(y, 1e-6))\n            nl.store("),
    ),
    _softmax("total of half the columns", "", ("nl.sum(exponentials,", "nl.sum(exponentials[0:128, 0 : n // 2],")),
    _softmax(
        "every second tile of the product",
        "",
        ("rhs[b, 0:k, nl.ds(j * 512, 512)]", "rhs[b, 0:k, nl.ds((j - j) * 512, 512)]"),
    ),
    _rmsnorm(
        "statistics of half the row",
        Outcome.INCORRECT,
        "",
        ("nl.square(tile)", "nl.square(tile[0:128, 0 : k // 2])"),
        ("1.0 / k", "2.0 / k"),
    ),
    _rmsnorm("fewer iterations", Outcome.INCORRECT, "", ("affine_range(k // 128)", "affine_range(k // 128 - 1)")),
    _rmsnorm("no normalisation", Outcome.INCORRECT, "", ("nl.multiply(tile, scale)", "nl.multiply(tile, 1.0)")),
    # Terms that hardly show in ordinary inputs.
    _baseline(
        "adamw", "no weight decay", "relative_l2", ("nl.subtract(decayed, update", "nl.subtract(theta_piece, update")
    ),
    _baseline(
        "adamw", "no epsilon beside the root", "row_error", ("op0=nl.add, operand0=EPSILON", "op0=nl.add, operand0=0.0")
    ),
    _baseline(
        "adamw", "no decay of the variance", "row_error", ("BETA1, BETA2 = 0.9, 0.999", "BETA1, BETA2 = 0.9, 0.9995")
    ),
    _baseline("adamw", "no gradient in the variance", "", ("v_t = nl.add(v_old, v_new, mask=inside)", "v_t = v_old")),
    _baseline(
        "adamw",
        "copies the partial last tile",
        "",
        (
            _ADAMW_STORE,
            f"""{_ADAMW_STORE}
    last = (row_tiles - 1) * PARTITIONS + partition
    for block in nl.affine_range(columns // LOAD_COLUMNS):
        block_column = block * LOAD_COLUMNS + load_column
        same = nl.load(theta[last, block_column], mask=last < rows)
        nl.store(out[last, block_column], value=same, mask=last < rows)
""",
        ),
    ),
    _baseline("add_rmsnorm_matmul", "no epsilon", "row_error", ("nl.add(mean_square, eps)", "mean_square")),
    _baseline("add_rmsnorm_matmul", "statistics of one addend", "", ("nl.square(y_tile)", "nl.square(x_tile)")),
    _baseline("mamba", "no decay", "", (_DECAY, "decay = nl.add(nl.multiply(delta_tile, 0.0), 1.0)")),
    _baseline("mamba", "linear decay", "", (_DECAY, "decay = nl.add(nl.multiply(delta_tile, a_column), 1.0)")),
    _baseline("mamba", "a state less", "", ("affine_range(states)", "affine_range(states - 1)")),
    _rmsnorm(
        "statistics without the last column",
        Outcome.INCORRECT,
        "",
        ("nl.square(tile)", "nl.square(tile[0:128, 0 : k - 1])"),
    ),
    _softmax("total without the last column", "", ("nl.sum(exponentials,", "nl.sum(exponentials[0:128, 0 : n - 1],")),
    _silu(
        "half of small inputs",
        Outcome.INCORRECT,
        "element_error",
        (
            _Y,
            f"{_Y}\n        near = nl.less(nl.abs(tile), 0.01)\n        half = nl.multiply(tile, 0.5)\n"
            "        y = nl.add(nl.multiply(y, nl.subtract(1.0, near)), nl.multiply(half, near))",
        ),
    ),
    _silu(
        "another result each time",
        Outcome.INCORRECT,
        "not_repeatable",
        (_Y, f"{_Y}\n        y = nl.multiply(y, nl.add(nl.multiply(nl.rand((partitions, columns)), 1e-5), 1.0))"),
    ),
    # Lower precision, openly and in disguise.
    _silu(
        "fixed point",
        Outcome.INCORRECT,
        "",
        (
            _Y,
            "fixed = nl.copy(nl.multiply(tile, 4096.0), dtype=nl.int16)\n"
            "        tile = nl.multiply(nl.copy(fixed, dtype=nl.float32), 1.0 / 4096.0)\n"
            f"        {_Y}",
        ),
    ),
    _rmsnorm(
        "bfloat16 sums",
        Outcome.PRECISION_VIOLATION,
        "precision:reduced",
        ("dtype=nl.float32, buffer=nl.psum", "dtype=nl.bfloat16, buffer=nl.psum"),
    ),
    _rmsnorm(
        "shortened fp32 product",
        Outcome.PRECISION_VIOLATION,
        "precision:reduced",
        ("nl.multiply(tile, scale)", "nl.multiply(tile, scale, dtype=nl.tfloat32)"),
        ("p * 128, 128), nl.ds(j * 512, 512)])", "p * 128, 128), nl.ds(j * 512, 512)], dtype=nl.tfloat32)"),
    ),
    _silu(
        "an intermediate in bfloat16 in HBM",
        Outcome.PRECISION_VIOLATION,
        "precision:reduced",
        ("    for row", "    spill = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.hbm)\n    for row"),
        (
            _STORE,
            f"{_STORE.replace('out[', 'spill[')}\n"
            f"        y = nl.load(spill[0:partitions, row, 0:columns])\n        {_STORE}",
        ),
    ),
    _rmsnorm(
        "bfloat16 product",
        Outcome.PRECISION_VIOLATION,
        "precision:reduced",
        ("nl.multiply(tile, scale)", "nl.multiply(tile, scale, dtype=nl.bfloat16)"),
        ("p * 128, 128), nl.ds(j * 512, 512)])", "p * 128, 128), nl.ds(j * 512, 512)], dtype=nl.bfloat16)"),
    ),
    _silu(
        "half precision by name",
        Outcome.PRECISION_VIOLATION,
        "precision:reduced",
        (_Y, _Y.replace("data=tile)", "data=tile, dtype='bfloat16')")),
    ),
    _silu(
        "half precision through NumPy",
        Outcome.PRECISION_VIOLATION,
        "precision:reduced",
        (_Y, _Y.replace("data=tile)", "data=tile, dtype=np.float16)")),
    ),
    _silu(
        "half precision through getattr",
        Outcome.PRECISION_VIOLATION,
        "precision:reduced",
        (_Y, _Y.replace("data=tile)", "data=tile, dtype=getattr(nl, 'bfloat16'))")),
    ),
    _silu(
        "half precision by a computed name",
        Outcome.REJECTED,
        "computed_attribute",
        (_Y, _Y.replace("data=tile)", "data=tile, dtype=getattr(nl, 'bflo' + 'at16'))")),
    ),
    # Knowing the answers.
    _reaching("draws the benchmark's inputs", "forbidden_name:numpy.random", "known = np.random.seed(0)"),
    _reaching("draws them under another name", "forbidden_import:numpy.random", "from numpy import random"),
    _reaching("draws them by an alias", "forbidden_name:numpy.random", "other = np; other.random.seed(0)"),
    _reaching("calls the reference", "forbidden_import:nkibench", "from nkibench.task import load_task"),
    _reaching("remembers outputs in a file", "forbidden_import:pickle", "import pickle"),
    _reaching("loads outputs", "forbidden_name:numpy.load", "known = np.load('/tmp/outputs.npy')"),
    _silu(
        "lets NumPy do the work",
        Outcome.COMPILE_ERROR,
        "",
        (_Y, "y = np.asarray(tile, dtype=np.float32) / (1 + np.exp(-np.asarray(tile, dtype=np.float32)))"),
    ),
    # Reaching for the machine.
    _reaching("patches the clock", "forbidden_import:time", "import time; time.perf_counter = lambda: 0.0"),
    _reaching("patches the counters", "forbidden_import:accelopt_ray", "import accelopt_ray.nki_sim.cost as cost"),
    _reaching("patches the language", "patches:nl.load", "nl.load = nl.zeros", "outside"),
    _reaching("patches by name", "forbidden_name:setattr", "setattr(nl, 'load', nl.zeros)"),
    _reaching("writes a result file", "forbidden_name:open", "open('result.json', 'w').write('correct')"),
    _reaching("reads a file", "forbidden_name:open", "open('/etc/passwd').read()"),
    _reaching("reads the environment", "forbidden_import:os", "import os; os.environ.get('HOME')"),
    _reaching("leaves a process", "forbidden_import:subprocess", "import subprocess", "outside"),
    _reaching("hides code in text", "forbidden_name:exec", "exec('import os')"),
    _reaching("imports by a function", "forbidden_name:__import__", "__import__('os')"),
    _reaching("climbs the type tree", "internals:__", "().__class__.__base__.__subclasses__()"),
    _reaching("looks into a frame", "forbidden_import:inspect", "import inspect"),
    _reaching(
        "borrows another module's modules", "forbidden_name:dataclasses.sys", "import dataclasses as d; d.sys.modules"
    ),
    _reaching("looks up attributes by text", "forbidden_import:operator", "from operator import attrgetter"),
    _reaching("hands NumPy to a helper", "hands_on:numpy", "(lambda library: library.random.seed(0))(np)"),
    _reaching("climbs out of a generator", "internals:", "(i for i in ()).gi_frame.f_back"),
    _reaching("buries it in nesting", "nested_too_deeply", f"y = {'+'.join('1' * 2000)}"),
    _reaching("pretends to be a script", "patches:__name__", "__name__ = '__main__'", "outside"),
    # Changing what it is given.
    _silu(
        "overwrites its input",
        Outcome.COMPILE_ERROR,
        "",
        (_STORE, f"{_STORE}\n        nl.store(x[0:partitions, row, 0:columns], value=y)"),
        text="immutable",
    ),
)
