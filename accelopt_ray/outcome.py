"""How an evaluation or a model call ended: one vocabulary for store, command line and analysis."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:  # Python 3.10, which the older Neuron machine images bring
    from enum import Enum

    class StrEnum(str, Enum):
        """A string enumeration that prints as its value, as in Python 3.11."""

        __str__ = str.__str__


class EvaluationOutcome(StrEnum):
    """The final state of one evaluated kernel."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    COMPILE_ERROR = "compile_error"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    MEMORY_LIMIT = "memory_limit"
    CRASHED = "crashed"
    UNSUPPORTED = "unsupported"
    NO_CODE = "no_code"
    PRECISION_VIOLATION = "precision_violation"
    REJECTED = "rejected"
    DUPLICATE = "duplicate"
    CANCELLED = "cancelled"


class CallOutcome(StrEnum):
    """The final state of one model call; ``lost`` is one that was in flight when the run was killed."""

    OK = "ok"
    EMPTY = "empty"
    TRUNCATED = "truncated"
    REFUSED = "refused"
    ERROR = "error"
    LOST = "lost"


class UserError(Exception):
    """A mistake in the user's set-up.

    The message is one sentence that says what is wrong and how to mend it. The command line prints it and exits with
    code 2; it is only raised before any work has started.
    """
