"""Executes traced programs on NumPy arrays.

:func:`run_program` runs a whole program; :func:`run_slice` only what given parts of the results depend on.
"""

from accelopt_ray.nki_sim.numerics.errors import NumericsError
from accelopt_ray.nki_sim.numerics.execute import run_program

__all__ = ["NumericsError", "run_program"]
