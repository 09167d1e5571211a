"""How a request to a model can fail, what of it may pass, and what to tell the user."""

from __future__ import annotations

import asyncio
import email.utils
from datetime import datetime, timezone

import openai

from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.agents.replies import MalformedCompletionError
from accelopt_ray.outcome import CallOutcome

OVERLOAD_STATUS = frozenset({429, 503, 529})
"""An endpoint's ways to say that it is asked too much."""

_PASSING_STATUS = OVERLOAD_STATUS | {408, 409, 425}
_ERROR_TEXT_LIMIT = 500

CALL_ERRORS = (openai.OpenAIError, MalformedCompletionError, ValueError)
"""What a request may raise. A body that is not JSON comes as a ValueError."""


class EmptyReplyError(MalformedCompletionError):
    """The reply has neither text nor a reason for having none; asking again may help."""


class ReplyTimeoutError(openai.OpenAIError):
    """No complete reply within the endpoint's time limit."""


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed a while later."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code >= 500 or error.status_code in _PASSING_STATUS
    # Connection trouble, time-outs, and bodies that are not JSON or not a completion.
    passing = (
        openai.APIConnectionError,
        openai.APIResponseValidationError,
        ReplyTimeoutError,
        MalformedCompletionError,
        EmptyReplyError,
        ValueError,
    )
    return isinstance(error, passing)


def failed_outcome(error: BaseException) -> CallOutcome:
    """The outcome of a call that ended with an error."""
    return CallOutcome.EMPTY if isinstance(error, EmptyReplyError) else CallOutcome.ERROR


def retry_after_s(error: BaseException | None) -> float | None:
    """Reads ``Retry-After`` (seconds or a date) or ``retry-after-ms`` from an error's response."""
    if not isinstance(error, openai.APIStatusError):
        return None
    headers = error.response.headers
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) * scale)
        except (KeyError, ValueError):
            continue
    date = email.utils.parsedate_to_datetime(headers["retry-after"]) if _is_date(headers.get("retry-after")) else None
    return None if date is None else max(0.0, (date - datetime.now(timezone.utc)).total_seconds())


def _is_date(value: str | None) -> bool:
    return value is not None and email.utils.parsedate_tz(value) is not None and value.rstrip().endswith("GMT")


def describe(error: BaseException, endpoint: ModelEndpoint, base_url: str = "") -> str:
    """One line that names the endpoint, by the base URL that was asked, and the cause."""
    where = f"{base_url or endpoint.base_url} (model {endpoint.model})"
    if isinstance(error, openai.AuthenticationError):
        return f"{where} rejects the key: set {endpoint.api_key_env} to a valid one"
    if isinstance(error, openai.APIStatusError):
        return f"{where} answers with status {error.status_code}: {_one_line(error.message)}"
    if isinstance(error, (openai.APITimeoutError, asyncio.TimeoutError)):
        return f"{where} does not answer in time: check that it runs, or raise its timeout"
    if isinstance(error, openai.APIConnectionError):
        return f"{where} cannot be reached: {_one_line(str(error.__cause__ or error))}"
    return f"{where}: {_one_line(str(error) or type(error).__name__)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_ERROR_TEXT_LIMIT]
