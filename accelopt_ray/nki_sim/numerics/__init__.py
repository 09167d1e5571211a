"""Executes traced programs on NumPy arrays.

:func:`run_program` runs a whole program; :func:`run_slice` only what given parts of the results depend on.
"""

from accelopt_ray.nki_sim.numerics.errors import NumericsError
from accelopt_ray.nki_sim.numerics.execute import run_program
from accelopt_ray.nki_sim.numerics.slicing import Region, run_slice

__all__ = ["NumericsError", "Region", "run_program", "run_slice"]
