"""Opening trajectories for commands: what is left out is told in one line each, never in silence."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from accelopt_ray.outcome import UserError

if TYPE_CHECKING:
    from accelopt_ray.analysis import Trajectory


@contextmanager
def opened(paths: Sequence[str], run_ids: Sequence[str] | None = None) -> Iterator[Trajectory]:
    """Opens trajectories; at the end tells of damaged parts and of tables in very many parts on standard error.

    Raises:
        UserError: There is no such trajectory or run.
    """
    from accelopt_ray.analysis import load
    from accelopt_ray.trajectory import DamagedPartWarning, ManyPartsWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DamagedPartWarning)
        warnings.simplefilter("always", ManyPartsWarning)
        try:
            yield load(paths, run_ids=list(run_ids) if run_ids else None)
        finally:
            told = (DamagedPartWarning, ManyPartsWarning)
            messages = [str(each.message) for each in caught if issubclass(each.category, told)]
            for message in dict.fromkeys(messages):
                print(f"accelopt-ray: warning: {' '.join(message.split())}", file=sys.stderr)


def require_matplotlib() -> None:
    """Checks that figures can be drawn.

    Raises:
        UserError: matplotlib is not installed.
    """
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib: pip install 'accelopt-ray[analysis]'")
