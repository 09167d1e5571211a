"""Scratch folders go away, whoever made them and however that ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelopt_ray import scratch
from accelopt_ray.scratch import scratch_folder

ROOT = str(Path(scratch.__file__).resolve().parents[1])


@pytest.fixture(autouse=True)
def own_place(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "_MEMORY_FOLDER", tmp_path)


def test_a_folder_lives_as_long_as_its_block(tmp_path):
    with scratch_folder(1000) as folder:
        (folder / "file").write_text("x")
        assert folder.parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_into_memory_goes_elsewhere(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(elsewhere))
    with scratch_folder(1 << 60) as folder:
        assert folder.parent == elsewhere


def test_a_killed_owners_folder_is_removed_and_a_living_ones_is_not(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {ROOT!r}); import os; from pathlib import Path;"
        "from accelopt_ray import scratch;"
        f"scratch._MEMORY_FOLDER = Path({str(tmp_path)!r});"
        "manager = scratch.scratch_folder(1); print(manager.__enter__(), flush=True); os.kill(os.getpid(), 9)"
    )
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stdout.strip()
    assert os.path.isdir(left)
    with scratch_folder(1) as first, scratch_folder(1) as second:
        assert first.is_dir() and second.is_dir()
        assert not os.path.exists(left)
