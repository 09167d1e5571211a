"""The one way to a model: an OpenAI-compatible chat endpoint.

Failures that may pass (overload, server errors, lost connections, time-outs, bodies that make no sense, empty replies)
are tried again after a random, growing pause; those that cannot (a bad key, an unknown model, a prompt that is too
long) are not. Either way a call ends as a :class:`~accelopt_ray.search.services.ModelReply`, never as an exception.
"""

from __future__ import annotations

import asyncio
import email.utils
import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import openai
import tenacity
from openai import AsyncOpenAI

from accelopt_ray.agents.endpoints import ModelEndpoint, choose_endpoint
from accelopt_ray.agents.limiter import AdaptiveLimit
from accelopt_ray.agents.prices import PriceTable, load_prices
from accelopt_ray.agents.replies import MalformedCompletionError, ParsedCompletion, Usage, parse_completion
from accelopt_ray.outcome import CallOutcome, UserError
from accelopt_ray.search.services import ModelCall, ModelReply

_LOG = logging.getLogger(__name__)
_OVERLOAD_STATUS = frozenset({429, 503, 529})
_PASSING_STATUS = _OVERLOAD_STATUS | {408, 409, 425}
# An endpoint may ask for a longer pause than anyone wants; beyond this the try is made anyway.
_MAX_RETRY_AFTER_S = 120.0
_ERROR_TEXT_LIMIT = 500


class _EmptyReplyError(Exception):
    """The reply has neither text nor a reason for having none; asking again may help."""


class ModelClient:
    """Asks the endpoints of each role.

    Belongs to one event loop. Any number of calls may be awaited at once; each endpoint gets as many as it bears.
    """

    def __init__(
        self,
        roles: Mapping[str, Sequence[ModelEndpoint]],
        prices: PriceTable | None = None,
        *,
        first_pause_s: float = 1.0,
        longest_pause_s: float = 60.0,
    ) -> None:
        """Prepares the clients; nothing is sent.

        Args:
            roles: Endpoints by role. Several share a role's calls by weight. A role that is not named is served by
                ``default``.
            prices: Prices of models whose endpoint names none; the package's table by default.
            first_pause_s: Longest pause before the first retry, in seconds; it doubles with each further one.
            longest_pause_s: Longest pause of all.

        Raises:
            UserError: A role has no endpoint.
        """
        for role, endpoints in roles.items():
            if not endpoints or sum(endpoint.weight for endpoint in endpoints) <= 0:
                raise UserError(f"the role {role} has no endpoint: name one with a positive weight")
        self._roles = {role: tuple(endpoints) for role, endpoints in roles.items()}
        self._prices = prices or load_prices()
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._clients: dict[tuple[str, str], AsyncOpenAI] = {}
        self._limits: dict[str, AdaptiveLimit] = {}
        for endpoint in self._endpoints():
            # The smallest bound that any role sets for a URL holds for the URL: they share the machine behind it.
            bound = min(each.max_in_flight for each in self._endpoints() if each.base_url == endpoint.base_url)
            self._limits.setdefault(endpoint.base_url, AdaptiveLimit(bound))

    async def complete(self, call: ModelCall) -> ModelReply:
        """Answers a call, after retries if need be.

        Returns:
            The reply. ``latency_s`` runs from here to the complete reply; tokens and cost are those of all tries.
        """
        endpoint = choose_endpoint(self._role(call.role), call.call_id)
        started = time.monotonic()
        attempt = _Attempts()
        completion: ParsedCompletion | None
        try:
            completion = await self._ask(endpoint, call, attempt)
            outcome, error_text = completion.outcome, ""
        except (openai.OpenAIError, MalformedCompletionError, _EmptyReplyError, ValueError) as error:
            completion, outcome = attempt.last, _failed_outcome(error)
            error_text = _describe(error, endpoint)
        price = endpoint.price or self._prices.price(endpoint.model)
        usage = attempt.usage
        tokens = (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return ModelReply(
            call_id=call.call_id,
            outcome=outcome,
            model=endpoint.model,
            endpoint=endpoint.base_url,
            reply_text=completion.reply_text if completion is not None else "",
            reasoning_text=completion.reasoning_text if completion is not None else "",
            finish_reason=completion.finish_reason if completion is not None else "",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            usage_estimated=usage.estimated,
            cost_usd=0.0 if price is None else price.cost_usd(*tokens),
            price_known=price is not None,
            latency_s=time.monotonic() - started,
            retries=max(0, attempt.tries - 1),
            error_text=error_text,
        )

    async def probe(self, timeout_s: float = 20.0) -> None:
        """Checks that every endpoint answers and knows its model, before a run starts.

        Args:
            timeout_s: Longest wait for each endpoint, in seconds.

        Raises:
            UserError: One does not; the sentence names the endpoint and the cause.
        """
        checked = {(endpoint.base_url, endpoint.model): endpoint for endpoint in self._endpoints()}
        await asyncio.gather(*(self._probe(endpoint, timeout_s) for endpoint in checked.values()))

    async def close(self) -> None:
        """Closes the connections."""
        for client in self._clients.values():
            await client.close()

    async def _ask(self, endpoint: ModelEndpoint, call: ModelCall, attempt: _Attempts) -> ParsedCompletion:
        # Jitter need not be repeatable, but it must differ between calls that failed together.
        jitter = random.Random(f"{call.call_id}:{time.monotonic_ns()}")
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_may_pass),
            stop=tenacity.stop_after_attempt(endpoint.max_retries + 1),
            wait=lambda state: self._pause_s(state, jitter),
            reraise=True,
        )
        return await retrying(self._ask_once, endpoint, call, attempt)

    async def _ask_once(self, endpoint: ModelEndpoint, call: ModelCall, attempt: _Attempts) -> ParsedCompletion:
        limit = self._limits[endpoint.base_url]
        async with limit.slot() as ticket:
            attempt.tries += 1
            try:
                completion = await asyncio.wait_for(self._request(endpoint, call), endpoint.timeout_s)
            except asyncio.TimeoutError:
                limit.overloaded(ticket)
                raise _timeout(endpoint) from None
            except openai.APIStatusError as error:
                if error.status_code in _OVERLOAD_STATUS:
                    limit.overloaded(ticket)
                raise
            parsed = parse_completion(completion, call.system_prompt + call.user_prompt)
            limit.succeeded()
        # What an endpoint charges for, it charges for whether or not the reply is of use.
        attempt.usage += parsed.usage
        attempt.last = parsed
        if parsed.outcome is CallOutcome.EMPTY:
            raise _EmptyReplyError("the model's reply is empty")
        return parsed

    async def _request(self, endpoint: ModelEndpoint, call: ModelCall) -> object:
        options: dict[str, Any] = {}
        for name, value in (("temperature", endpoint.temperature), ("top_p", endpoint.top_p)):
            if value is not None:
                options[name] = value
        if endpoint.max_tokens is not None:
            options[endpoint.max_tokens_field] = endpoint.max_tokens
        if endpoint.send_seed:
            # Servers read the seed into a signed 32-bit or 64-bit integer; 31 bits suit them all.
            options["seed"] = call.seed & 0x7FFFFFFF
        return await self._client(endpoint).chat.completions.create(
            model=endpoint.model,
            messages=[
                {"role": "system", "content": call.system_prompt},
                {"role": "user", "content": call.user_prompt},
            ],
            extra_body=dict(endpoint.extra_body) or None,
            timeout=endpoint.timeout_s,
            **options,
        )

    async def _probe(self, endpoint: ModelEndpoint, timeout_s: float) -> None:
        client = self._client(endpoint).with_options(timeout=timeout_s)
        try:
            page = await asyncio.wait_for(client.models.list(), timeout_s)
            names = [str(getattr(model, "id", "")) for model in page.data or []]
        except openai.NotFoundError:
            # Not every endpoint lists its models; those that do not are asked by the first call.
            _LOG.info("%s lists no models", endpoint.base_url)
            return
        except (asyncio.TimeoutError, openai.OpenAIError, ValueError, TypeError, AttributeError) as error:
            raise UserError(_describe(error, endpoint)) from error
        if names and endpoint.model not in names:
            known = ", ".join(sorted(names)[:8])
            raise UserError(f"{endpoint.base_url} has no model {endpoint.model!r}: choose one of {known}")

    def _client(self, endpoint: ModelEndpoint) -> AsyncOpenAI:
        key = (endpoint.base_url, endpoint.api_key_env)
        if key not in self._clients:
            # Endpoints of one's own need no key, but the library insists on one. Retries are made here alone.
            api_key = os.environ.get(endpoint.api_key_env) or "none"
            self._clients[key] = AsyncOpenAI(base_url=endpoint.base_url, api_key=api_key, max_retries=0)
        return self._clients[key]

    def _role(self, role: str) -> tuple[ModelEndpoint, ...]:
        endpoints = self._roles.get(role) or self._roles.get("default")
        if not endpoints:
            raise UserError(f"no endpoint is named for the role {role}: name one, or a default")
        return endpoints

    def _endpoints(self) -> list[ModelEndpoint]:
        return [endpoint for endpoints in self._roles.values() for endpoint in endpoints]

    def _pause_s(self, state: tenacity.RetryCallState, jitter: random.Random) -> float:
        ceiling = min(self._longest_pause_s, self._first_pause_s * 2 ** (state.attempt_number - 1))
        pause = jitter.uniform(ceiling / 2, ceiling)
        error = state.outcome.exception() if state.outcome is not None else None
        asked = _retry_after_s(error)
        # Asked for a pause, wait at least that long, and not all at the same moment.
        return pause if asked is None else min(asked, _MAX_RETRY_AFTER_S) + pause * 0.1


class _Attempts:
    """What the tries of one call have come to so far."""

    def __init__(self) -> None:
        self.tries = 0
        self.usage = Usage()
        self.last: ParsedCompletion | None = None


class _ReplyTimeoutError(openai.OpenAIError):
    """No complete reply within the endpoint's time limit."""


def _timeout(endpoint: ModelEndpoint) -> _ReplyTimeoutError:
    return _ReplyTimeoutError(f"no complete reply within {endpoint.timeout_s:g} s")


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, openai.APIStatusError):
        return error.status_code >= 500 or error.status_code in _PASSING_STATUS
    # Connection trouble, time-outs, and bodies that are not JSON or not a completion.
    passing = (
        openai.APIConnectionError,
        openai.APIResponseValidationError,
        _ReplyTimeoutError,
        MalformedCompletionError,
        _EmptyReplyError,
        ValueError,
    )
    return isinstance(error, passing)


def _failed_outcome(error: Exception) -> CallOutcome:
    return CallOutcome.EMPTY if isinstance(error, _EmptyReplyError) else CallOutcome.ERROR


def _retry_after_s(error: BaseException | None) -> float | None:
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


def _describe(error: BaseException, endpoint: ModelEndpoint) -> str:
    """One line that names the endpoint and the cause."""
    where = f"{endpoint.base_url} (model {endpoint.model})"
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
