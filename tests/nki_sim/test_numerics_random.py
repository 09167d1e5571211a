"""Random loop nests: the fast executor against the obvious one, whole and in slices."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from naive_numerics import Naive

from accelopt_ray.nki_sim.errors import KernelError
from accelopt_ray.nki_sim.numerics import Region, run_program, run_slice
from accelopt_ray.nki_sim.numerics.dependence import Batching
from accelopt_ray.nki_sim.numerics.execute import Executable
from accelopt_ray.nki_sim.tracer import TensorSpec, trace_kernel

TRIPS = 3
VARIABLES = ("i", "j", "k")


class Writer:
    """Writes a random kernel: tiles of 4 x 4, tensors with up to two block dimensions, nested loops."""

    def __init__(self, draw: st.DrawFn):
        self.draw = draw
        self.lines = [
            "import neuronxcc.nki as nki",
            "import neuronxcc.nki.language as nl",
            "import neuronxcc.nki.isa as nisa",
            "import numpy as np",
            "@nki.jit",
            "def kernel(x):",
            "    out = nl.ndarray((3, 3, 4, 4), dtype=nl.float32, buffer=nl.shared_hbm)",
            "    p, f = nl.arange(4)[:, None], nl.arange(4)[None, :]",
        ]
        self.tensors: dict[str, tuple[int, str]] = {}
        self.declare("    ", "sbuf")
        self.declare("    ", "sbuf")
        self.declare("    ", "psum")
        self.body("    ", ())

    def choice(self, *options: str) -> str:
        return self.draw(st.sampled_from(options))

    def declare(self, indent: str, space: str) -> None:
        name = f"t{len(self.tensors)}"
        blocks = self.draw(st.integers(0, 2))
        shape = "3, " * blocks + "nl.par_dim(4), 4"
        maker = "zeros" if space == "psum" else self.choice("ndarray", "zeros", "ndarray")
        self.lines.append(f"{indent}{name} = nl.{maker}(({shape}), dtype=nl.float32, buffer=nl.{space})")
        self.tensors[name] = (blocks, space)

    def index(self, open_loops: tuple[str, ...], blocks: int) -> str:
        parts = [self.choice(*open_loops, *open_loops, "0", "2") for _ in range(blocks)]
        return "".join(part + ", " for part in parts) + "p, f"

    def tile(self, open_loops: tuple[str, ...], space: str | None = None) -> str:
        names = [n for n, (_, where) in self.tensors.items() if space in (None, where)]
        name = self.choice(*names)
        return f"{name}[{self.index(open_loops, self.tensors[name][0])}]"

    def statement(self, indent: str, loops: tuple[str, ...]) -> None:
        kind = self.choice("load", "load", "scale", "add", "store", "store", "update", "product", "copy", "reduce")
        target, left, right = self.tile(loops, "sbuf"), self.tile(loops, "sbuf"), self.tile(loops, "sbuf")
        last = loops[-1] if loops else "none"
        line = {
            "load": f"{target} = nl.load(x[{self.index(loops, 2)}])",
            "scale": f"{target} = nl.multiply({self.tile(loops)}, 0.5)",
            "add": f"{target} = nl.add({self.tile(loops)}, {self.tile(loops, 'sbuf')})",
            "store": f"nl.store(out[{self.index(loops, 2)}], {self.tile(loops, 'sbuf')})",
            "update": f"{target} += {self.tile(loops)}",
            "product": f"{self.tile(loops, 'psum')} += nisa.nc_matmul({left}, {right})",
            "copy": f"{target} = nl.copy({self.tile(loops)})",
            "reduce": f"{target} = nl.loop_reduce({self.tile(loops)}, op=np.add, loop_indices=[{last}])",
        }[kind]
        if kind != "reduce" or loops:
            self.lines.append(indent + line)

    def body(self, indent: str, loops: tuple[str, ...]) -> None:
        known = dict(self.tensors)
        if loops and self.draw(st.booleans()):
            self.declare(indent, "sbuf")
        start = len(self.lines)
        for _ in range(self.draw(st.integers(1, 3))):
            if len(loops) < len(VARIABLES) and self.draw(st.booleans()):
                variable = VARIABLES[len(loops)]
                kind = self.choice("affine_range", "sequential_range", "sequential_range")
                self.lines.append(f"{indent}for {variable} in nl.{kind}({TRIPS}):")
                self.body(indent + "    ", (*loops, variable))
            else:
                self.statement(indent, loops)
        if len(self.lines) == start:
            self.lines.append(f"{indent}pass")
        self.tensors = known

    @property
    def source(self) -> str:
        return "\n".join([*self.lines, "    nl.store(out[0, 0, p, f], nl.load(x[0, 0, p, f]))", "    return out", ""])


@st.composite
def kernels(draw: st.DrawFn) -> str:
    return Writer(draw).source


def agree(found: np.ndarray, expected: np.ndarray) -> None:
    scale = float(np.nanmax(np.abs(expected), initial=1.0))
    assume(np.isfinite(scale) and scale < 1e12)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * scale)


@given(source=kernels(), low=st.integers(0, 2), column=st.integers(0, 3))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_random_kernels(source: str, low: int, column: int) -> None:
    x = np.random.default_rng(0).standard_normal((3, 3, 4, 4)).astype(np.float32)
    try:
        program = trace_kernel(source, [TensorSpec(x.shape, "float32")])
    except KernelError:
        assume(False)
    (expected,) = Naive(program, [x]).results
    agree(run_program(program, [x])[0], expected)
    plain = Executable(program, [x], None, batching=Batching(frozenset(), frozenset()))
    plain.run()
    agree(plain.results[0], expected)
    bounds = ((low, 3), (0, low + 1), (1, 4), (column, column + 1))
    (part,) = run_slice(program, [x], [Region(0, bounds)])
    agree(part, expected[tuple(slice(*bound) for bound in bounds)])
