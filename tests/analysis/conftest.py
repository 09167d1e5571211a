"""Trajectories to analyse: a small generated run, and a sweep of two presets over three seeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelopt_ray.analysis import Trajectory, load
from experiments.generated_run import generate_run


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; read only."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    generate_run(folder, evaluations=90)
    return folder


@pytest.fixture(scope="session")
def sweep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six runs in one folder; read only."""
    folder = tmp_path_factory.mktemp("sweep")
    for seed in range(3):
        for preset in ("paper", "published"):
            generate_run(folder, evaluations=40, run_id=f"{preset}-{seed}", preset=preset, seed=seed)
    return folder


@pytest.fixture
def run(run_folder: Path) -> Trajectory:
    """The run, loaded afresh."""
    return load(run_folder)


@pytest.fixture
def sweep(sweep_folder: Path) -> Trajectory:
    """The sweep, loaded afresh."""
    return load(sweep_folder)
