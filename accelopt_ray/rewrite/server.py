"""The offline rewriter behind the chat-completions protocol of OpenAI-compatible endpoints."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from accelopt_ray.rewrite.replies import answers, count_tokens, truncate

MODEL = "offline-rewriter"
_MOST_CHOICES = 128
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_START_TIMEOUT_S = 60.0
_CLIENT_CLOSED_REQUEST = 499  # as nginx has it


class InvalidRequest(Exception):
    """A request that the protocol does not allow.

    Attributes:
        parameter: The field at fault, if one is.
        status: HTTP status.
        code: Machine-readable code, if the protocol has one.
    """

    def __init__(self, message: str, parameter: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.status = status
        self.code = code


@dataclass(frozen=True)
class ChatRequest:
    """A validated request."""

    messages: tuple[Mapping[str, str], ...]
    count: int
    seed: int
    max_tokens: int | None


def parse_request(body: bytes) -> ChatRequest:
    """Validates a request body.

    Raises:
        InvalidRequest: The body is not what the protocol asks for.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("We could not parse the JSON body of your request.") from None
    if not isinstance(content, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    model = content.get("model")
    if not isinstance(model, str):
        raise InvalidRequest("you must provide a model parameter", "model")
    if model != MODEL:
        raise InvalidRequest(f"The model `{model}` does not exist.", "model", 404, "model_not_found")
    if content.get("stream"):
        raise InvalidRequest("Streaming is not supported by this endpoint.", "stream", code="unsupported_value")
    count = _integer(content, "n", 1, _MOST_CHOICES)
    limits = [_integer(content, name, 1, None) for name in ("max_tokens", "max_completion_tokens")]
    given = [limit for limit in limits if limit is not None]
    seed = _integer(content, "seed", None, None)
    return ChatRequest(_messages(content.get("messages")), count or 1, seed or 0, min(given) if given else None)


def _integer(content: Mapping[str, Any], name: str, least: int | None, most: int | None) -> int | None:
    value = content.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"Invalid type for '{name}': expected an integer.", name, code="invalid_type")
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"between {least} and {most}"
        raise InvalidRequest(f"Invalid value for '{name}': expected {bounds}, got {value}.", name, code="invalid_value")
    return value


def _messages(value: object) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("Invalid 'messages': expected a list with at least one message.", "messages")
    messages: list[Mapping[str, str]] = []
    for number, item in enumerate(value):
        field_name = f"messages[{number}]"
        if not isinstance(item, dict) or item.get("role") not in _ROLES:
            raise InvalidRequest(f"Invalid '{field_name}': expected an object with a known role.", field_name)
        messages.append({"role": item["role"], "content": _text(item.get("content"), field_name)})
    return tuple(messages)


def _text(content: object, field_name: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "\n".join(part["text"] for part in content)
    if content is None:
        return ""
    raise InvalidRequest(
        f"Invalid '{field_name}.content': expected text.", f"{field_name}.content", code="invalid_type"
    )


def complete(request: ChatRequest) -> dict[str, object]:
    """Answers a request with a ``chat.completion`` object."""
    choices: list[dict[str, object]] = []
    completion_tokens = 0
    digest = hashlib.sha256(repr((request.seed, request.count)).encode())
    for index, answer in enumerate(answers(request.messages, request.seed, request.count)):
        text, cut = truncate(answer, request.max_tokens)
        completion_tokens += count_tokens(text)
        digest.update(text.encode())
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": "length" if cut else "stop",
            }
        )
    prompt_tokens = sum(count_tokens(message["content"]) for message in request.messages)
    return {
        "id": f"chatcmpl-{digest.hexdigest()[:24]}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def create_app() -> Starlette:
    """The endpoint as an ASGI application.

    Rewriting is pure Python, so it runs on one worker thread: the event loop stays free, and requests that share a
    kernel share its analysis.
    """
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewriter")

    async def chat(request: Request) -> Response:
        parsed = parse_request(await request.body())
        return JSONResponse(await asyncio.get_running_loop().run_in_executor(worker, complete, parsed))

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model_entry()]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != MODEL:
            raise InvalidRequest(f"The model `{name}` does not exist.", "model", 404, "model_not_found")
        return JSONResponse(_model_entry())

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, InvalidRequest)
        return _error(error.status, str(error), "invalid_request_error", error.parameter, error.code)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = (
            f"Not allowed: {request.method} {request.url.path}."
            if error.status_code == 405
            else (f"Invalid URL ({request.method} {request.url.path}).")
        )
        return _error(error.status_code, message, "invalid_request_error", headers=error.headers)

    async def hung_up(request: Request, error: Exception) -> Response:
        # A search that was killed while it asked: a usual event, which nobody is there to be told of.
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    async def failed(request: Request, error: Exception) -> Response:
        return _error(500, f"The rewriter failed: {type(error).__name__}: {error}", "server_error")

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", model, methods=["GET"]),
        ],
        exception_handlers={
            InvalidRequest: invalid,
            HTTPException: refused,
            ClientDisconnect: hung_up,
            Exception: failed,
        },
    )


def _model_entry() -> dict[str, object]:
    return {"id": MODEL, "object": "model", "created": 0, "owned_by": "accelopt-ray"}


def _error(
    status: int,
    message: str,
    kind: str,
    parameter: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body = {"error": {"message": message, "type": kind, "param": parameter, "code": code}}
    return JSONResponse(body, status_code=status, headers=dict(headers) if headers else None)


def serve(host: str, port: int) -> None:
    """Serves the endpoint until interrupted."""
    uvicorn.run(create_app(), host=host, port=port, log_level="warning")


@dataclass
class BackgroundServer:
    """An endpoint in a child process.

    Attributes:
        base_url: Where an OpenAI client finds it.
        model: Name of the one model it serves.
    """

    base_url: str
    model: str
    _process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def stop(self) -> None:
        """Ends the child and waits for it; harmless when it has ended already."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> BackgroundServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_background(timeout_s: float = _START_TIMEOUT_S) -> BackgroundServer:
    """Starts the endpoint as a child process on a free loopback port and waits until it answers.

    The child ends by itself when this process does, however it ends: it watches the pipe between them.

    Raises:
        RuntimeError: The child did not start in time.
    """
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    process = subprocess.Popen(
        [sys.executable, "-m", "accelopt_ray.rewrite.server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
    lines: list[bytes] = []

    def read_port() -> None:
        assert process.stdout is not None
        lines.append(process.stdout.readline())

    reader = threading.Thread(target=read_port, daemon=True)
    reader.start()
    reader.join(timeout_s)
    if not lines or not lines[0].strip().isdigit():
        process.kill()
        process.wait()
        raise RuntimeError("the offline rewriter's endpoint did not start")
    return BackgroundServer(f"http://127.0.0.1:{int(lines[0])}/v1", MODEL, process)


class _AnnouncedServer(uvicorn.Server):
    """Writes its port to standard output once it answers."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        print(sockets[0].getsockname()[1], flush=True)


def _serve_child(arguments: Sequence[str] | None = None) -> None:
    """Serves on a free loopback port until standard input ends."""
    argparse.ArgumentParser(description="The offline rewriter as a child process.").parse_args(arguments)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = _AnnouncedServer(uvicorn.Config(create_app(), log_level="error"))

    def watch_parent() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True
        time.sleep(3)
        os._exit(0)  # A request still running must not keep the process alive.

    threading.Thread(target=watch_parent, daemon=True).start()
    server.run([listener])


if __name__ == "__main__":
    _serve_child()
