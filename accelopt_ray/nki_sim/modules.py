"""The modules that kernels import: ``neuronxcc``, ``neuronxcc.nki`` and what lies below.

They exist in ``sys.modules`` only while a kernel is traced (:func:`installed`). A name they do not have is reported
with its full path as unsupported.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from accelopt_ray.nki_sim import builder as tracing
from accelopt_ray.nki_sim import dtypes, errors, isa, isa_special, language, loops, mathematics, spaces
from accelopt_ray.nki_sim.program import Engine, LoopKind
from accelopt_ray.nki_sim.symbolic import Index, as_int


class ShimModule(ModuleType):
    """A module of the compiler; unknown names are reported, never looked up elsewhere."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        # Close enough for a slip of the pen: other calls of the language have names that are less alike.
        meant = difflib.get_close_matches(name, vars(self), n=1, cutoff=0.85)
        raise errors.unsupported(f"{self.__name__}.{name}", meant=meant[0] if meant else "")


class KernelFunction:
    """A function decorated with ``nki.jit`` or one of its siblings.

    Attributes:
        function: The undecorated function.
        grid: Launch grid; empty for a single instance.
    """

    def __init__(self, function: Callable[..., Any], grid: tuple[int, ...] = ()) -> None:
        self.function = function
        self.grid = grid
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: Any) -> KernelFunction:
        sizes = grid if isinstance(grid, tuple) else (grid,)
        return KernelFunction(self.function, tuple(as_int(size) for size in sizes))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not tracing.is_tracing():
            raise errors.outside_of_kernel()
        builder = tracing.current()
        if self.grid:
            if builder.entry_code is not None or builder.grid_shape:
                raise errors.nested_kernel_with_grid(self.__name__, self.grid)
            return run_grid(builder, self, args, kwargs)
        if builder.entry_code is None:
            builder.entry_code = self.function.__code__
        return self.function(*args, **kwargs)


def run_grid(builder: tracing.Builder, kernel: KernelFunction, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Traces all instances of a launch grid as parallel loops around the kernel."""
    opened = []
    indices: list[Any] = []
    for axis, size in enumerate(kernel.grid):
        site = (0, axis)
        variable, token = builder.open_loop(size, LoopKind.AFFINE, site, f"program_id({axis})")
        if site in builder.concrete_sites:
            raise errors.unsupported("a program_id that decides which instructions an instance has")
        opened.append((variable, token))
        indices.append(Index(0, {variable: 1}) if size > 1 else 0)
    builder.grid = tuple(variable for variable, _ in opened)
    builder.grid_shape = kernel.grid
    builder.grid_indices = tuple(indices)
    builder.entry_code = kernel.function.__code__
    result = kernel.function(*args, **kwargs)
    for variable, token in reversed(opened):
        builder.close_loop(variable, token)
    return result


def _decorator(function: Any = None, **_options: Any) -> Any:
    """``@nki.jit`` and its siblings, bare or called with options."""
    if callable(function):
        return function if isinstance(function, KernelFunction) else KernelFunction(function)
    return _decorator


def _transparent(function: Any = None, **_options: Any) -> Any:
    """Decorators that only steer the compiler."""
    return function if callable(function) else _transparent


class _Annotation:
    """``nt.tensor`` and the like: for annotations, with an optional shape."""

    def __init__(self, name: str, shape: tuple[int, ...] = ()) -> None:
        self.name = name
        self.shape = shape

    def __getitem__(self, shape: Any) -> _Annotation:
        sizes = shape if isinstance(shape, tuple) else (shape,)
        return _Annotation(self.name, sizes)

    def __repr__(self) -> str:
        return f"nt.{self.name}"


class _Allocator:
    """``ncc.sbuf`` and ``ncc.psum``: addresses chosen by the kernel; the simulator places tiles itself."""

    def __init__(self, space: str) -> None:
        self._space = spaces.AllocatedSpace(space)

    def alloc(self, *_args: Any, **_kwargs: Any) -> Any:
        """An address function."""
        return self._space

    def mod_alloc(self, *_args: Any, **_kwargs: Any) -> Any:
        """Addresses modulo a number of tiles."""
        return self._space

    def auto_alloc(self, *_args: Any, **_kwargs: Any) -> Any:
        """Addresses left to the compiler."""
        return spaces.MemorySpace(str(self._space))


#: What the modules define for each other, not for kernels.
_INTERNAL = {
    "AllocatedSpace", "FUNCTIONS", "MemorySpace", "PSUM_BYTES", "ParDim", "SBUF_USABLE_BYTES", "affine_select_tile",
    "reduce_destination", "resolve_shape",
}  # fmt: skip


def _public(*sources: ModuleType) -> dict[str, Any]:
    """What modules of the simulator define themselves, by name."""
    found = {}
    for source in sources:
        for name, value in vars(source).items():
            home = getattr(value, "__module__", source.__name__)
            if name.startswith("_") or name in _INTERNAL or isinstance(value, ModuleType):
                continue
            if home not in (source.__name__, dtypes.__name__):
                continue
            found[name] = value
    return found


def _module(name: str, contents: dict[str, Any]) -> ShimModule:
    module = ShimModule(name, "Generation-A NKI, as the simulator provides it.")
    module.__path__ = []
    for key, value in contents.items():
        setattr(module, key, value)
    return module


def build() -> dict[str, ShimModule]:
    """The modules by their full names."""
    nl = _module(
        "neuronxcc.nki.language",
        {
            **_public(language, mathematics, spaces),
            **mathematics.FUNCTIONS,
            "affine_range": loops.affine_range,
            "sequential_range": loops.sequential_range,
            "static_range": loops.static_range,
            "bool": spaces.bool_,
        },
    )
    engines = {f"{engine.value}_engine": engine for engine in Engine if engine is not Engine.ANY}
    nisa = _module("neuronxcc.nki.isa", {**_public(isa, isa_special), **engines, "unknown_engine": Engine.ANY})
    nisa.constants = _module(  # type: ignore[attr-defined]
        "neuronxcc.nki.isa.constants",
        {"engine": isa.engine, "reduce_cmd": isa.reduce_cmd, "oob_mode": isa.oob_mode, "dge_mode": isa.dge_mode},
    )
    typing = _module(
        "neuronxcc.nki.typing",
        {name: _Annotation(name) for name in ("tensor", "mutable_tensor", "scalar", "vector")},
    )
    compiler = _module(
        "neuronxcc.nki.compiler",
        {
            "sbuf": _Allocator("sbuf"),
            "psum": _Allocator("psum"),
            "skip_middle_end_transformations": _transparent,
            "enable_stack_allocator": _transparent,
            "force_auto_alloc": _transparent,
            "par_dim": spaces.par_dim,
        },
    )
    nki = _module(
        "neuronxcc.nki",
        {
            **dict.fromkeys(("jit", "trace", "baremetal", "benchmark", "profile"), _decorator),
            "language": nl,
            "isa": nisa,
            "typing": typing,
            "compiler": compiler,
        },
    )
    root = _module("neuronxcc", {"nki": nki, "__version__": "2.0"})
    return {
        "neuronxcc": root,
        "neuronxcc.nki": nki,
        "neuronxcc.nki.language": nl,
        "neuronxcc.nki.isa": nisa,
        "neuronxcc.nki.isa.constants": nisa.constants,
        "neuronxcc.nki.typing": typing,
        "neuronxcc.nki.compiler": compiler,
    }


@contextmanager
def installed() -> Iterator[None]:
    """Makes fresh shims importable, and takes them away again; what a kernel does to them ends with it."""
    previous = {name: sys.modules.get(name) for name in list(sys.modules) if name.split(".")[0] == "neuronxcc"}
    for name in previous:
        del sys.modules[name]
    sys.modules.update(build())
    finder = _MissingModules()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "neuronxcc"]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in previous.items() if module is not None})


class _MissingModules:
    """Reports imports of compiler modules that the simulator does not have."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Called by the import machinery before anything else looks for the module."""
        if name.split(".", maxsplit=1)[0] in ("neuronxcc", "torch_neuronx", "nki"):
            raise errors.unsupported(f"the module {name}")
