"""Offline analysis of trajectories: typed data frames, joins, figures, report."""

from __future__ import annotations

from accelopt_ray.analysis.lineage import Step
from accelopt_ray.analysis.trajectory import Trajectory, load

__all__ = ["Step", "Trajectory", "load"]
