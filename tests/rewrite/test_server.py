"""The endpoint against the ``openai`` client."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from rewrite_kernels import hand_style

from accelopt_ray.rewrite.replies import count_tokens, truncate
from accelopt_ray.rewrite.server import MODEL, BackgroundServer, create_app, start_background

KERNEL = hand_style([("s", "activation", "sigmoid", "x"), ("y", "tensor_tensor", "x", "s", "multiply")])
MESSAGES = [
    {"role": "system", "content": "You are the planner."},
    {"role": "user", "content": f"vector_engine_active_time_percent: 0.9\n```python\n{KERNEL}```"},
]


@pytest.fixture(scope="module")
def server() -> Iterator[BackgroundServer]:
    with start_background() as running:
        yield running


@pytest.fixture
def client(server: BackgroundServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="unused", max_retries=0)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_completion_with_n_seed_and_usage(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, seed=5, temperature=0.7)  # type: ignore[arg-type]
    texts = [choice.message.content for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}
    assert "Rewrite: recognise-silu" in "\n".join(map(str, texts))
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(count_tokens(message["content"]) for message in MESSAGES)
    assert reply.usage.completion_tokens == sum(count_tokens(str(text)) for text in texts)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    again = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, seed=5)  # type: ignore[arg-type]
    assert [choice.message.content for choice in again.choices] == texts


def test_max_tokens_cuts_and_says_so(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=7)  # type: ignore[arg-type]
    assert reply.choices[0].finish_reason == "length"
    assert count_tokens(str(reply.choices[0].message.content)) == 7
    assert reply.usage is not None and reply.usage.completion_tokens == 7


def test_content_parts(client: openai.OpenAI) -> None:
    parts = [{**MESSAGES[0]}, {"role": "user", "content": [{"type": "text", "text": MESSAGES[1]["content"]}]}]
    reply = client.chat.completions.create(model=MODEL, messages=parts, seed=1)  # type: ignore[arg-type]
    plain = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1)  # type: ignore[arg-type]
    assert reply.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"stream": True}, 400, "stream"),
        ({"model": "other"}, 404, "model"),
        ({"model": None}, 400, "model"),
        ({"n": 0}, 400, "n"),
        ({"n": "two"}, 400, "n"),
        ({"seed": 1.5}, 400, "seed"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "nobody", "content": ""}]}, 400, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0].content"),
    ],
)
def test_errors_have_the_protocols_body(
    server: BackgroundServer, change: dict[str, object], status: int, param: str
) -> None:
    reply = httpx.post(f"{server.base_url}/chat/completions", json={"model": MODEL, "messages": MESSAGES, **change})
    assert reply.status_code == status
    error = reply.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error" and error["message"]


def test_wrong_method_path_and_body(server: BackgroundServer) -> None:
    assert httpx.get(f"{server.base_url}/chat/completions").status_code == 405
    assert "error" in httpx.get(f"{server.base_url}/chat/completions").json()
    assert httpx.post(f"{server.base_url}/embeddings", json={}).status_code == 404
    assert "error" in httpx.post(f"{server.base_url}/embeddings", json={}).json()
    broken = httpx.post(f"{server.base_url}/chat/completions", content=b"{not json")
    assert broken.status_code == 400 and "JSON" in broken.json()["error"]["message"]


def test_a_client_that_hangs_up_is_no_error() -> None:
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(create_app()(scope, receive, send))
    assert sent[0]["status"] == 499


def test_concurrent_requests_all_get_their_own_answer(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=seed)  # type: ignore[arg-type]
        return str(reply.choices[0].message.content)

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(12)))
    assert together == [ask(seed) for seed in range(12)]


def test_stop_ends_the_child() -> None:
    running = start_background()
    assert httpx.get(f"{running.base_url}/models").status_code == 200
    pid = running.pid
    running.stop()
    running.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{running.base_url}/models")


def test_the_child_ends_when_its_parent_is_gone() -> None:
    running = start_background()
    process = running._process
    assert process.stdin is not None
    process.stdin.close()  # What the system does when the parent dies.
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is not None
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.parametrize(
    ("text", "tokens"), [("", 0), ("word", 1), ("words", 2), ("a b", 2), ("f(x)", 4), ("  \n", 0), ("übermäßig", 3)]
)
def test_token_rule(text: str, tokens: int) -> None:
    assert count_tokens(text) == tokens
    for limit in range(1, tokens + 2):
        cut, was_cut = truncate(text, limit)
        assert count_tokens(cut) == min(limit, tokens) and was_cut is (limit < tokens) and text.startswith(cut)
