"""The notebook runs from its first cell to its last on any trajectory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "experiments" / "analysis.ipynb"


@pytest.mark.parametrize("folder", ["run_folder", "sweep_folder"])
def test_every_cell_runs(folder: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RUNS", str(request.getfixturevalue(folder)))
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 15
    namespace: dict[str, object] = {}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"{NOTEBOOK.name}, code cell {number}", "exec"), namespace)


def test_it_is_stored_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in notebook["cells"])
