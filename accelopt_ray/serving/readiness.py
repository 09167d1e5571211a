"""Whether a server of models is there and answers for a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

import httpx

POLL_S = 1.0
_REQUEST_TIMEOUT_S = 5.0
_TELL_EVERY_S = 15.0


class NotReadyError(Exception):
    """A model did not come up; the message says in one sentence what is known of the cause."""


async def answers(base_url: str, model: str, timeout_s: float = _REQUEST_TIMEOUT_S) -> bool:
    """Whether an endpoint lists a model."""
    try:
        async with httpx.AsyncClient(timeout=timeout_s) as client:
            response = await client.get(f"{base_url}/models")
            listed = response.json()["data"]
            return response.status_code == httpx.codes.OK and any(entry.get("id") == model for entry in listed)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError):
        return False


async def wait_until_ready(
    base_url: str,
    models: Iterable[str],
    timeout_s: float,
    *,
    loading: Callable[[], Awaitable[str | None]],
    failed: Callable[[], str | None],
    progress: Callable[[str], None],
    poll_s: float = POLL_S,
) -> None:
    """Waits until an endpoint answers for all models.

    Args:
        base_url: Of the endpoint, ending in ``/v1``.
        models: Names that it must list.
        timeout_s: Longest wait, in seconds.
        loading: Says what the server still waits for although it may answer, or None.
        failed: Says why waiting is of no use any more, or None.
        progress: Told now and then how long it has taken.
        poll_s: Seconds between two looks.

    Raises:
        NotReadyError: It has failed, or the time is up.
    """
    missing = list(models)
    started = told = time.monotonic()
    while True:
        waiting_for = await loading()
        if waiting_for is None:
            missing = [model for model in missing if not await answers(base_url, model)]
            if not missing:
                return
        reason = failed()
        if reason is not None:
            raise NotReadyError(reason)
        now = time.monotonic()
        if now - started > timeout_s:
            raise NotReadyError(f"{', '.join(missing)} did not answer at {base_url} within {timeout_s:g} s")
        if now - told >= _TELL_EVERY_S:
            told = now
            detail = "" if waiting_for is None else f": {waiting_for}"
            progress(f"{', '.join(missing)} is starting, {now - started:.0f} s{detail}")
        await asyncio.sleep(poll_s)
