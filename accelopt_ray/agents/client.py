"""The one way to a model: an OpenAI-compatible chat endpoint.

Failures that may pass (overload, server errors, lost connections, time-outs, bodies that make no sense, empty replies)
are tried again after a random, growing pause; those that cannot (a bad key, an unknown model, a prompt that is too
long) are not. Either way a call ends as a :class:`~accelopt_ray.search.services.ModelReply`, never as an exception.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
import tenacity
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from accelopt_ray.agents.endpoints import ModelEndpoint, choose_endpoint
from accelopt_ray.agents.failures import (
    CALL_ERRORS,
    OVERLOAD_STATUS,
    EmptyReplyError,
    ReplyTimeoutError,
    describe,
    failed_outcome,
    may_pass,
    retry_after_s,
)
from accelopt_ray.agents.gpu_time import GpuMeter, GpuTimePrice
from accelopt_ray.agents.groups import SampleGroups
from accelopt_ray.agents.limiter import AdaptiveLimit
from accelopt_ray.agents.prices import PriceTable, load_prices
from accelopt_ray.agents.replies import ParsedCompletion, Usage, parse_completions
from accelopt_ray.agents.tokens import token_counter
from accelopt_ray.outcome import CallOutcome, UserError
from accelopt_ray.search.services import ModelCall, ModelReply

_LOG = logging.getLogger(__name__)
# An endpoint may ask for a longer pause than anyone wants; beyond this the try is made anyway.
_MAX_RETRY_AFTER_S = 120.0


@dataclass
class _Account:
    """What one call has come to so far, over all its tries.

    Attributes:
        base_url: Where it was last asked.
        tries: Requests made.
        usage: Tokens of all of them.
        gpu_usd: Price of the GPU time of all of them.
        last: The last reply, of use or not.
    """

    base_url: str = ""
    tries: int = 0
    usage: Usage = field(default_factory=Usage)
    gpu_usd: float = 0.0
    last: ParsedCompletion | None = None

    def add(self, parsed: ParsedCompletion) -> None:
        """Takes a reply down: what an endpoint charges for, it charges for whether or not the reply is of use."""
        self.usage += parsed.usage
        self.last = parsed


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
        gpus_since_s: float | None = None,
        charge_idle: bool = True,
    ) -> None:
        """Prepares the clients; nothing is sent.

        Args:
            roles: Endpoints by role. Several share a role's calls by weight. A role that is not named is served by
                ``default``.
            prices: Prices of models whose endpoint names none; the package's table by default.
            first_pause_s: Longest pause before the first retry, in seconds; it doubles with each further one.
            longest_pause_s: Longest pause of all.
            gpus_since_s: When GPUs that are paid by the hour began to cost, by ``time.monotonic``; now by default.
            charge_idle: Whether calls bear the GPU time in which none was in flight; see
                :class:`~accelopt_ray.agents.gpu_time.GpuMeter`.

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
        self._moved: dict[str, str] = {}
        self._limits: dict[str, AdaptiveLimit] = {}
        self._meters: dict[tuple[str, str], GpuMeter] = {}
        self._groups = SampleGroups(self._ask_group)
        # Models, by URL and name, that have shown they give one sample a request.
        self._one_by_one: set[tuple[str, str]] = set()
        for endpoint in self._endpoints():
            for url in endpoint.base_urls:
                # The smallest bound that any role sets for a URL holds for the URL: they share the machine behind it.
                bound = min(each.max_in_flight for each in self._endpoints() if url in each.base_urls)
                self._limits.setdefault(url, AdaptiveLimit(bound))
            if isinstance(endpoint.price, GpuTimePrice):
                meter = GpuMeter(endpoint.price, since_s=gpus_since_s, charge_idle=charge_idle)
                self._meters.setdefault(_key(endpoint), meter)

    @property
    def idle_gpu_usd(self) -> Mapping[str, float]:
        """By model: price of the GPU time in which no call was in flight and which no reply's cost contains."""
        return {model: meter.idle_usd for (_, model), meter in self._meters.items()}

    async def complete(self, call: ModelCall) -> ModelReply:
        """Answers a call, after retries if need be.

        Returns:
            The reply. ``latency_s`` runs from here to the complete reply; tokens and cost are those of all tries.
        """
        endpoint = choose_endpoint(self._role(call.role), call.call_id)
        started = time.monotonic()
        account = _Account(base_url=endpoint.base_url)
        completion: ParsedCompletion | None
        try:
            completion = await self._answer(endpoint, call, account)
            outcome, error_text = completion.outcome, ""
        except CALL_ERRORS as error:
            completion, outcome = account.last, failed_outcome(error)
            error_text = describe(error, endpoint, account.base_url)
        cost_usd = self._cost_usd(endpoint, account)
        usage = account.usage
        return ModelReply(
            call_id=call.call_id,
            outcome=outcome,
            model=endpoint.model,
            endpoint=account.base_url,
            reply_text=completion.reply_text if completion is not None else "",
            reasoning_text=completion.reasoning_text if completion is not None else "",
            finish_reason=completion.finish_reason if completion is not None else "",
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            usage_estimated=usage.estimated,
            cost_usd=cost_usd or 0.0,
            price_known=cost_usd is not None,
            latency_s=time.monotonic() - started,
            retries=max(0, account.tries - 1),
            error_text=error_text,
        )

    async def probe(self, timeout_s: float = 20.0) -> None:
        """Checks that every endpoint answers and knows its model, before a run starts.

        Args:
            timeout_s: Longest wait for each endpoint, in seconds.

        Raises:
            UserError: One does not; the sentence names the endpoint and the cause.
        """
        checked = {(url, each.model): each for each in self._endpoints() for url in each.base_urls}
        await asyncio.gather(*(self._probe(endpoint, url, timeout_s) for (url, _), endpoint in checked.items()))

    async def move(self, base_url: str, to: str) -> None:
        """From now on asks at another address what was configured at a base URL.

        What is in flight to where it was before is given up there and asked again.
        """
        before = self._moved.get(base_url, base_url)
        self._moved[base_url] = to
        for key in [key for key in self._clients if key[0] == before and before != to]:
            await self._clients.pop(key).close()

    async def close(self) -> None:
        """Closes the connections."""
        for client in self._clients.values():
            await client.close()

    def _cost_usd(self, endpoint: ModelEndpoint, account: _Account) -> float | None:
        if isinstance(endpoint.price, GpuTimePrice):
            return account.gpu_usd
        price = endpoint.price or self._prices.price(endpoint.model)
        usage = account.usage
        if price is None:
            return None
        return price.cost_usd(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    async def _answer(self, endpoint: ModelEndpoint, call: ModelCall, account: _Account) -> ParsedCompletion:
        """Asks together with the other samples of the prompt where that is wanted, then alone if need be."""
        refused = False
        if endpoint.samples_per_request > 1 and _key(endpoint) not in self._one_by_one:
            try:
                parsed = await self._groups.join(endpoint, call, account)
            except openai.APIStatusError as error:
                if may_pass(error):
                    raise
                # The endpoint may not take ``n``, or would not take the prompt either: asked alone it will tell.
                refused = True
            else:
                if parsed is not None and parsed.outcome is not CallOutcome.EMPTY:
                    return parsed
        [answer] = await self._ask(endpoint, [call], [account])
        if refused:
            self._one_by_one.add(_key(endpoint))
        return answer

    async def _ask_group(
        self, endpoint: ModelEndpoint, calls: Sequence[ModelCall], accounts: Sequence[_Account]
    ) -> list[ParsedCompletion]:
        answers = await self._ask(endpoint, calls, accounts)
        if len(answers) < len(calls):
            self._one_by_one.add(_key(endpoint))
        return answers

    async def _ask(
        self, endpoint: ModelEndpoint, calls: Sequence[ModelCall], accounts: Sequence[_Account]
    ) -> list[ParsedCompletion]:
        """Asks for as many samples as there are calls, which share their prompt; may return fewer."""
        # Jitter need not be repeatable, but it must differ between calls that failed together.
        jitter = random.Random(f"{calls[0].call_id}:{time.monotonic_ns()}")
        routes = endpoint.routes(calls[0].affinity or calls[0].call_id)
        route = 0

        async def one_try() -> list[ParsedCompletion]:
            nonlocal route
            try:
                return await self._ask_once(endpoint, routes[route % len(routes)], calls, accounts)
            except (openai.APIConnectionError, ReplyTimeoutError):
                route += 1  # the replica may be gone; its calls move to the next one
                raise

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(may_pass),
            stop=tenacity.stop_after_attempt(endpoint.max_retries + 1),
            wait=lambda state: self._pause_s(state, jitter),
            reraise=True,
        )
        return await retrying(one_try)

    async def _ask_once(
        self, endpoint: ModelEndpoint, url: str, calls: Sequence[ModelCall], accounts: Sequence[_Account]
    ) -> list[ParsedCompletion]:
        limit = self._limits[url]
        async with limit.slot() as ticket:
            where = self._moved.get(url, url)
            for account in accounts:
                account.tries += 1
                account.base_url = where
            try:
                completion = await self._metered(endpoint, where, calls, accounts)
            except asyncio.TimeoutError:
                limit.overloaded(ticket)
                raise ReplyTimeoutError(f"no complete reply within {endpoint.timeout_s:g} s") from None
            except openai.APIStatusError as error:
                if error.status_code in OVERLOAD_STATUS:
                    limit.overloaded(ticket)
                raise
            prompt = calls[0].system_prompt + calls[0].user_prompt
            answers = parse_completions(completion, prompt, len(calls), token_counter(endpoint.tokenizer))
            limit.succeeded()
        for account, answer in zip(accounts, answers, strict=False):
            account.add(answer)
        if all(answer.outcome is CallOutcome.EMPTY for answer in answers):
            raise EmptyReplyError("the model's reply is empty")
        return answers

    async def _metered(
        self, endpoint: ModelEndpoint, url: str, calls: Sequence[ModelCall], accounts: Sequence[_Account]
    ) -> object:
        meter = self._meters.get(_key(endpoint))
        if meter is None:
            return await asyncio.wait_for(self._request(endpoint, url, calls), endpoint.timeout_s)
        with meter.charged() as charge:
            try:
                return await asyncio.wait_for(self._request(endpoint, url, calls), endpoint.timeout_s)
            finally:
                meter.settle()
                for account in accounts:
                    account.gpu_usd += charge.cost_usd / len(accounts)

    async def _request(self, endpoint: ModelEndpoint, url: str, calls: Sequence[ModelCall]) -> object:
        body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": [
                {"role": "system", "content": calls[0].system_prompt},
                {"role": "user", "content": calls[0].user_prompt},
            ],
        }
        for name, value in (("temperature", endpoint.temperature), ("top_p", endpoint.top_p)):
            if value is not None:
                body[name] = value
        if endpoint.max_tokens is not None:
            body[endpoint.max_tokens_field] = endpoint.max_tokens
        if endpoint.send_seed:
            # Servers read the seed into a signed 32-bit or 64-bit integer; 31 bits suit them all.
            body["seed"] = calls[0].seed & 0x7FFFFFFF
        if len(calls) > 1:
            body["n"] = len(calls)
        # Not chat.completions.create: walking through every field of the body again takes it a fifth of a call's time.
        return await self._client(endpoint, url).post(
            "/chat/completions",
            cast_to=ChatCompletion,
            body={**body, **endpoint.extra_body},
            options={"timeout": endpoint.timeout_s},
        )

    async def _probe(self, endpoint: ModelEndpoint, url: str, timeout_s: float) -> None:
        client = self._client(endpoint, url).with_options(timeout=timeout_s)
        try:
            page = await asyncio.wait_for(client.models.list(), timeout_s)
            names = [str(getattr(model, "id", "")) for model in page.data or []]
        except openai.NotFoundError:
            # Not every endpoint lists its models; those that do not are asked by the first call.
            _LOG.info("%s lists no models", url)
            return
        except (asyncio.TimeoutError, openai.OpenAIError, ValueError, TypeError, AttributeError) as error:
            raise UserError(describe(error, endpoint, url)) from error
        if names and endpoint.model not in names:
            known = ", ".join(sorted(names)[:8])
            raise UserError(f"{url} has no model {endpoint.model!r}: choose one of {known}")

    def _client(self, endpoint: ModelEndpoint, url: str) -> AsyncOpenAI:
        key = (url, endpoint.api_key_env)
        if key not in self._clients:
            # Endpoints of one's own need no key, but the library insists on one. Retries are made here alone.
            api_key = os.environ.get(endpoint.api_key_env) or "none"
            self._clients[key] = AsyncOpenAI(base_url=url, api_key=api_key, max_retries=0)
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
        asked = retry_after_s(error)
        # Asked for a pause, wait at least that long, and not all at the same moment.
        return pause if asked is None else min(asked, _MAX_RETRY_AFTER_S) + pause * 0.1


def _key(endpoint: ModelEndpoint) -> tuple[str, str]:
    return endpoint.base_url, endpoint.model
