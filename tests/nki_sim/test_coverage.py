"""How much of what public generation-A kernels call is traced and has a test."""

from __future__ import annotations

import ast
import csv
import inspect
import re
from pathlib import Path

from accelopt_ray.nki_sim.modules import build

_HERE = Path(__file__).parent
#: Calls counted in 124 public files; names called at most five times have no count of their own.
_COUNTS = _HERE / "public_call_counts.csv"
_ALL_CALLS = 4324
_TESTS = ("test_tracing.py", "test_trace_and_run.py")
_MODULES = {"nl": "neuronxcc.nki.language", "nisa": "neuronxcc.nki.isa", "nki": "neuronxcc.nki"}


def counts() -> dict[str, int | None]:
    with _COUNTS.open(newline="") as file:
        return {row["name"]: int(row["calls"]) if row["calls"] else None for row in csv.DictReader(file)}


def names_with_tests() -> set[str]:
    """Names that occur in the kernels of the tests that check what a call does."""
    names: set[str] = set()
    for test in _TESTS:
        tree = ast.parse((_HERE / test).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(re.findall(r"\b(?:nl|nisa|nki)\.[a-z_0-9.]+", node.value))
    return names


def provided(name: str) -> bool:
    prefix, _, attribute = name.partition(".")
    value: object = build()[_MODULES[prefix]]
    for part in attribute.split("."):
        value = inspect.getattr_static(value, part, None)
        if value is None:
            return False
    return True


def covered() -> set[str]:
    tested = names_with_tests()
    return {name for name in counts() if name in tested and provided(name)}


def test_the_table_is_complete() -> None:
    known = [value for value in counts().values() if value is not None]
    assert len(counts()) >= 77
    assert sum(known) <= _ALL_CALLS <= sum(known) + 5 * sum(value is None for value in counts().values())


def test_at_least_95_percent_of_public_calls_are_covered() -> None:
    """A covered name without a count of its own counts as one call, the fewest it can have."""
    table = counts()
    calls = sum(table[name] or 1 for name in covered())
    assert calls / _ALL_CALLS >= 0.95, sorted(set(table) - covered())


def test_few_names_are_missing() -> None:
    assert set(counts()) - covered() <= {
        "nki.simulate_kernel",
        "nisa.sendrecv",
        "nisa.core_barrier",
        "nisa.tensor_copy_dynamic_src",
        "nisa.sequence_bounds",
        "nl.gather_flattened",
    }


def test_the_documentation_lists_the_names_that_kernels_may_use() -> None:
    page = (_HERE.parents[1] / "docs" / "nki_front_end.md").read_text()
    for prefix, module in _MODULES.items():
        text = re.search(rf"^- `{prefix}`: (.*?)\.\n(?=- |\n)", page, re.MULTILINE | re.DOTALL)
        assert text is not None
        listed = {name.strip() for name in text.group(1).replace("\n", " ").split(",")}
        assert listed == {name for name in vars(build()[module]) if not name.startswith("_")}
