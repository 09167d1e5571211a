"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Attributes:
        subject: What was looked at.
        state: ``ok``, ``absent`` (not needed for simulated runs) or ``problem``.
        detail: What was found, or what to do.
    """

    subject: str
    state: str
    detail: str
