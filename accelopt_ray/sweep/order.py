"""Which run of a sweep begins next."""

from __future__ import annotations

from collections.abc import Sequence

from accelopt_ray.sweep.file import SweepRun


def next_run(waiting: Sequence[SweepRun], going: Sequence[SweepRun]) -> SweepRun | None:
    """Returns the first run that may begin: one that starts with another's lessons comes after that one's end.

    Args:
        waiting: Runs that have not begun.
        going: Runs that go on.
    """
    unfinished = {run.name for run in (*waiting, *going)}
    ready = (run for run in waiting if str(run.config.memory_from) not in unfinished)
    # Runs that wait for one another would wait for ever; begun, they end with the word that there are no lessons.
    return next(ready, None if going or not waiting else waiting[0])
