"""Faults that show only while a program runs."""

from __future__ import annotations

from accelopt_ray.outcome import EvaluationOutcome


class NumericsError(Exception):
    """A program cannot be executed.

    Attributes:
        outcome: ``RUNTIME_ERROR`` for a fault of the kernel, ``UNSUPPORTED`` for what the executor does not know.
        line: Source line of the instruction, 0 when there is none.
    """

    def __init__(self, message: str, line: int = 0, outcome: EvaluationOutcome = EvaluationOutcome.RUNTIME_ERROR):
        super().__init__(f"{message} (line {line})" if line else message)
        self.outcome = outcome
        self.line = line

    def at(self, line: int) -> NumericsError:
        """Returns the error with its line, unless it has one."""
        return self if self.line else NumericsError(str(self), line, self.outcome)
