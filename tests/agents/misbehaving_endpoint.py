"""A chat endpoint on loopback that fails in every way it is told to.

Each request takes the next behaviour from a script; when the script is used up, requests are answered properly. What
the endpoint counts (requests, tokens it would bill) is what the client's own accounts are held against.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Behaviour = Callable[["Endpoint", dict[str, Any]], Awaitable[Response]]


@dataclass
class Endpoint:
    """A running endpoint.

    Attributes:
        url: Base URL for the client.
        script: Behaviours of the coming requests, in order of arrival.
        requests: Bodies of the requests so far.
        arrivals_s: Their times, from the monotonic clock.
        billed_tokens: Prompt and completion tokens of all replies sent in full.
        open_requests: Requests that are open now.
        most_in_flight: Largest number of requests that were open at once.
    """

    url: str = ""
    script: list[Behaviour] = field(default_factory=list)
    default: Behaviour | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    billed_tokens: tuple[int, int] = (0, 0)
    open_requests: set[int] = field(default_factory=set)
    most_in_flight: int = 0

    def reset(self) -> None:
        """Forgets everything but the address; requests that still hang no longer count."""
        self.__init__(self.url)  # type: ignore[misc]

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.requests.append({**body, "authorization": request.headers.get("authorization")})
        self.arrivals_s.append(time.monotonic())
        behaviour = self.script.pop(0) if self.script else self.default or reply("fine")
        number, open_requests = len(self.requests), self.open_requests
        open_requests.add(number)
        self.most_in_flight = max(self.most_in_flight, len(open_requests))
        try:
            return await behaviour(self, body)
        finally:
            open_requests.discard(number)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "good-model", "object": "model"}]})


def reply(
    text: str | None,
    *,
    finish_reason: str = "stop",
    usage: dict[str, Any] | None = None,
    no_usage: bool = False,
    choices: int = 1,
    delay_s: float = 0.0,
    **message: Any,
) -> Behaviour:
    """A proper completion, with whatever the keyword arguments put into it."""

    async def behave(endpoint: Endpoint, body: dict[str, Any]) -> Response:
        await asyncio.sleep(delay_s)
        counted = usage or {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        choice = {
            "index": 0,
            "finish_reason": finish_reason,
            "message": {"role": "assistant", "content": text, **message},
        }
        content: dict[str, Any] = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice] * choices,
        }
        if not no_usage:
            content["usage"] = counted
        prompt, completion = endpoint.billed_tokens
        endpoint.billed_tokens = (prompt + counted["prompt_tokens"], completion + counted["completion_tokens"])
        return JSONResponse(content)

    return behave


def samples(*texts: str, usage: dict[str, Any] | None = None, delay_s: float = 0.0) -> Behaviour:
    """As many of the texts as the request asks for, each a choice with its own index."""

    async def behave(endpoint: Endpoint, body: dict[str, Any]) -> Response:
        await asyncio.sleep(delay_s)
        counted = usage or {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        prompt, completion = endpoint.billed_tokens
        endpoint.billed_tokens = (prompt + counted["prompt_tokens"], completion + counted["completion_tokens"])
        choices = [
            {"index": index, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            for index, text in enumerate(texts[: body.get("n", 1)])
        ]
        common = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
        # The order on the wire means nothing; the indices do.
        return JSONResponse({**common, "choices": choices[::-1], "usage": counted})

    return behave


def status(code: int, headers: dict[str, str] | None = None, message: str = "no") -> Behaviour:
    """An error in the protocol's own form."""

    async def behave(endpoint: Endpoint, body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": message, "type": "x"}}, code, headers=headers)

    return behave


def raw(content: bytes, *, media_type: str = "application/json") -> Behaviour:
    """Status 200 with a body of any kind."""

    async def behave(endpoint: Endpoint, body: dict[str, Any]) -> Response:
        return Response(content, media_type=media_type)

    return behave


def cut_off() -> Behaviour:
    """A body shorter than its header says: the connection breaks in the middle."""

    async def behave(endpoint: Endpoint, body: dict[str, Any]) -> Response:
        response = Response(b'{"id": "x", "choices": [', media_type="application/json")
        response.headers["content-length"] = "5000"
        return response

    return behave


def hang(seconds: float = 5.0) -> Behaviour:
    """Nothing, for longer than anyone waits."""

    async def behave(endpoint: Endpoint, body: dict[str, Any]) -> Response:
        await asyncio.sleep(seconds)
        return JSONResponse({})

    return behave


@contextlib.contextmanager
def serve() -> Iterator[Endpoint]:
    """Serves an endpoint on a free loopback port in a thread."""
    endpoint = Endpoint()
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
            Route("/v1/models", endpoint.models, methods=["GET"]),
        ]
    )
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        endpoint.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=0, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield endpoint
        finally:
            server.should_exit = True
            server.force_exit = True
            thread.join()
