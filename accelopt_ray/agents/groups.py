"""Samples of one prompt, asked for in one request.

A search asks for each sample by itself, all at about the same time. Those that arrive within a moment of one another
and have endpoint and prompt in common are put together here, so that the endpoint reads the prompt once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.agents.replies import ParsedCompletion
from accelopt_ray.search.services import ModelCall

GATHERING_S = 0.05
"""How long the first sample waits for others: long against their spread, short against any model's reply."""

_A = TypeVar("_A")
Ask = Callable[[ModelEndpoint, Sequence[ModelCall], Sequence[_A]], Awaitable[Sequence[ParsedCompletion]]]


class _Group(Generic[_A]):
    """Calls that wait for one request."""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []
        self.accounts: list[_A] = []
        self.answers: list[asyncio.Future[ParsedCompletion | None]] = []
        self.full = asyncio.Event()
        self.request: asyncio.Task[None] | None = None


class SampleGroups(Generic[_A]):
    """Puts calls together and hands each its sample. Belongs to one event loop."""

    def __init__(self, ask: Ask[_A], gathering_s: float = GATHERING_S) -> None:
        """Prepares to group.

        Args:
            ask: Asks for as many samples as it is given calls; may return fewer.
            gathering_s: How long a group stays open, in seconds.
        """
        self._ask = ask
        self._gathering_s = gathering_s
        self._open: dict[tuple[str, str, str, str], _Group[_A]] = {}

    async def join(self, endpoint: ModelEndpoint, call: ModelCall, account: _A) -> ParsedCompletion | None:
        """Waits for the call's sample.

        Returns:
            The sample; None if the endpoint gave fewer than it was asked for.

        Raises:
            Exception: Whatever the request raised, in each of its calls.
        """
        key = (endpoint.base_url, endpoint.model, call.system_prompt, call.user_prompt)
        group = self._open.get(key)
        if group is None:
            group = self._open[key] = _Group()
            group.request = asyncio.get_running_loop().create_task(self._run(key, endpoint, group))
        answer: asyncio.Future[ParsedCompletion | None] = asyncio.get_running_loop().create_future()
        group.calls.append(call)
        group.accounts.append(account)
        group.answers.append(answer)
        if len(group.calls) >= endpoint.samples_per_request:
            self._close(key, group)
        try:
            return await answer
        finally:
            # A request that nobody waits for any more is given up.
            if group.request is not None and all(each.cancelled() for each in group.answers):
                self._close(key, group)
                group.request.cancel()

    def _close(self, key: tuple[str, str, str, str], group: _Group[_A]) -> None:
        if self._open.get(key) is group:
            del self._open[key]
        group.full.set()

    async def _run(self, key: tuple[str, str, str, str], endpoint: ModelEndpoint, group: _Group[_A]) -> None:
        try:
            await asyncio.wait_for(group.full.wait(), self._gathering_s)
        except asyncio.TimeoutError:
            self._close(key, group)
        wanted = [number for number, answer in enumerate(group.answers) if not answer.cancelled()]
        wanted.sort(key=lambda number: (group.calls[number].sample_index, group.calls[number].call_id))
        calls, accounts = [group.calls[number] for number in wanted], [group.accounts[number] for number in wanted]
        waiting = [group.answers[number] for number in wanted]
        try:
            samples = await self._ask(endpoint, calls, accounts)
        except Exception as error:  # each call decides for itself what the failure means to it
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
            return
        for number, answer in enumerate(waiting):
            if not answer.done():
                answer.set_result(samples[number] if number < len(samples) else None)
