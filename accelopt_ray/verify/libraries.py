"""The libraries that a kernel may use, and what of them it may not.

Names are looked up in the libraries themselves: a library holds the modules that it has imported, and those lead to the
rest of the machine.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from functools import lru_cache

Path = tuple[str, ...]
"""A dotted name, part by part, its module first."""

LIBRARIES = frozenset(
    {
        "__future__",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "itertools",
        "math",
        "ml_dtypes",
        "numpy",
        "operator",
        "typing",
    }
)
# They draw random numbers, touch files, run foreign code or evaluate text.
_FORBIDDEN = {
    "functools": frozenset({"singledispatch", "singledispatchmethod"}),
    "numpy": frozenset(
        {
            "DataSource",
            "char",
            "compat",
            "core",
            "ctypeslib",
            "distutils",
            "f2py",
            "fromfile",
            "fromregex",
            "genfromtxt",
            "lib",
            "load",
            "loadtxt",
            "ma",
            "matlib",
            "memmap",
            "random",
            "rec",
            "save",
            "savetxt",
            "savez",
            "savez_compressed",
            "strings",
            "testing",
        }
    ),
    "operator": frozenset({"attrgetter", "methodcaller"}),
    "typing": frozenset({"ForwardRef", "evaluate_forward_ref", "get_type_hints"}),
}
HARMLESS_DUNDERS = frozenset({"__name__", "__doc__"})


def forbidden_part(path: Path) -> str | None:
    """Returns the shortest part of a library's path that is forbidden, or leads out of the library."""
    if path[0] not in LIBRARIES:
        return None
    for depth, name in enumerate(path[1:], start=2):
        is_private = name.startswith("_") and name not in HARMLESS_DUNDERS
        if name in _FORBIDDEN.get(path[0], ()) or is_private or _leads_out(path[:depth]):
            return ".".join(path[:depth])
    return None


def _leads_out(path: Path) -> bool:
    found = _look_up(path)
    return inspect.ismodule(found) and found.__name__.split(".")[0] != path[0]


def is_module(path: Path) -> bool:
    """Says whether a library has a module under a name."""
    return inspect.ismodule(_look_up(path))


def own_path(path: Path) -> Path:
    """Returns a module's own path: modules lead to each other in circles, so there are endless paths to each."""
    return tuple(str(getattr(_look_up(path), "__name__", ".".join(path))).split("."))


@lru_cache(maxsize=1024)
def _look_up(path: Path) -> object:
    """Returns what a library has under a name; None if nothing, or if the library is not here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of its old names
        try:
            found: object = importlib.import_module(path[0])
        except ImportError:
            return None
        for name in path[1:]:
            try:
                found = getattr(found, name, None)
            except Exception:  # a name that a library provides in parts only; it is no way out
                return None
    return found
