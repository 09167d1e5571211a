"""Measures what the project promises of its way to models: ``python -m experiments.benchmark_models``.

A local endpoint in a process of its own answers after one second; its own count of tokens is what the client's money is
held against. Prints measured values beside their targets and exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from accelopt_ray.agents.client import ModelClient
from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.agents.parsing import extract_kernel
from accelopt_ray.agents.prices import Price
from accelopt_ray.outcome import CallOutcome
from accelopt_ray.search.services import ModelCall, ModelReply
from experiments.benchmark import Figure
from experiments.damaged_replies import damaged_replies, violation

IN_FLIGHT = 64
ROUNDS = 10
REPLY_S = 1.0
FAILING_CALLS = 1_000
FAILURE_SHARE = 0.2
DAMAGED_REPLIES = 10_000
PRICE = Price(1.0, 0.1, 10.0)
_MODEL = "local"
# About the sizes of a planner's prompt and reply.
_PROMPT = "Explain how this kernel could be faster.\n" * 500
_REPLY = "Load each tile once and fuse the two passes.\n" * 60


class LocalEndpoint:
    """A chat endpoint over plain sockets, so that what it takes itself does not blur the measurement.

    A prompt that names a failure gets it at its first try. What is sent in full is billed.
    """

    def __init__(self) -> None:
        self._tried: set[str] = set()
        self._billed = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}

    async def serve(self) -> None:
        """Listens on a free port, which it prints, until the process ends."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has closed the connection
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if head.startswith("get"):
            _send(writer, 200, self._billed)
            return True
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        system, prompt = (message["content"] for message in body["messages"])
        delay_s, failure, name = json.loads(system)
        if failure and name not in self._tried:
            self._tried.add(name)
            return self._fail(failure, writer)
        await asyncio.sleep(delay_s)
        self._bill(len(prompt) // 4, len(_REPLY) // 4)
        _send(writer, 200, _completion(_REPLY, len(prompt) // 4))
        return True

    def _fail(self, failure: str, writer: asyncio.StreamWriter) -> bool:
        if failure == "empty":
            self._bill(7, len(_REPLY) // 4)
            _send(writer, 200, _completion("", 7))
        elif failure == "not JSON":
            _send(writer, 200, "{", raw=True)
        elif failure == "cut off":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n{")
            return False
        elif failure == "connection lost":
            return False
        elif failure == "retry later":
            _send(writer, 429, {"error": {"message": "busy"}}, "retry-after: 0.05\r\n")
        else:
            _send(writer, int(failure), {"error": {"message": failure}})
        return True

    def _bill(self, prompt_tokens: int, completion_tokens: int) -> None:
        self._billed["requests"] += 1
        self._billed["prompt_tokens"] += prompt_tokens
        self._billed["completion_tokens"] += completion_tokens


FAILURES = ("429", "retry later", "500", "502", "503", "empty", "not JSON", "cut off", "connection lost")


def _completion(text: str, prompt_tokens: int) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(_REPLY) // 4, "total_tokens": 0}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    common = {"id": "x", "object": "chat.completion", "created": 0, "model": _MODEL}
    return {**common, "choices": [choice], "usage": usage}


def _send(writer: asyncio.StreamWriter, status: int, content: object, more: str = "", *, raw: bool = False) -> None:
    data = str(content).encode() if raw else json.dumps(content).encode()
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n{more}\r\n"
    writer.write(head.encode() + data)


@asynccontextmanager
async def local_endpoint() -> AsyncIterator[str]:
    """Serves the endpoint in a process of its own; yields its base URL."""
    command = [sys.executable, "-m", "experiments.benchmark_models", "--serve"]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}/v1"
    finally:
        process.terminate()
        await process.wait()


def _call(number: int, delay_s: float, failure: str = "") -> ModelCall:
    name = f"call-{number}"
    return ModelCall(name, "planner", json.dumps([delay_s, failure, name]), _PROMPT, number, number)


async def _answers(url: str, calls: list[ModelCall], max_in_flight: int) -> list[ModelReply]:
    endpoint = ModelEndpoint(url, _MODEL, max_in_flight=max_in_flight, price=PRICE, timeout_s=60.0)
    client = ModelClient({"default": [endpoint]}, first_pause_s=0.05, longest_pause_s=0.5)
    try:
        return list(await asyncio.gather(*(client.complete(call) for call in calls)))
    finally:
        await client.close()


async def throughput_figures() -> AsyncIterator[Figure]:
    """Keeps 64 calls of a second each in flight for ten rounds."""
    async with local_endpoint() as url:
        await _answers(url, [_call(number, 0.0) for number in range(IN_FLIGHT)], IN_FLIGHT)
        calls = [_call(number, REPLY_S) for number in range(IN_FLIGHT * ROUNDS)]
        started, busy = time.perf_counter(), time.process_time()
        replies = await _answers(url, calls, IN_FLIGHT)
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - busy
    assert all(reply.outcome is CallOutcome.OK for reply in replies)
    yield Figure("64 in flight: share of the ideal rate", 100 * ROUNDS * REPLY_S / wall_s, 90.0, False, "%")
    yield Figure("64 in flight: CPU of one core", 100 * cpu_s / wall_s, 35.0, True, "%")


async def failure_figures() -> AsyncIterator[Figure]:
    """Asks a thousand times with failures in a fifth of the calls."""
    draw = random.Random(0)
    calls = [
        _call(number, 0.01, draw.choice(FAILURES) if draw.random() < FAILURE_SHARE else "")
        for number in range(FAILING_CALLS)
    ]
    async with local_endpoint() as url:
        replies = await _answers(url, calls, IN_FLIGHT)
        async with httpx.AsyncClient() as client:
            billed = (await client.get(f"{url}/billed")).json()
    billed_usd = PRICE.cost_usd(billed["prompt_tokens"], 0, billed["completion_tokens"])
    lost = FAILING_CALLS - sum(reply.outcome is CallOutcome.OK for reply in replies)
    retried = sum(reply.retries > 0 for reply in replies)
    twice = FAILING_CALLS - len({reply.call_id for reply in replies})
    counted_usd = sum(reply.cost_usd for reply in replies)
    yield Figure("1,000 calls: that failed at first", float(retried), FAILING_CALLS * FAILURE_SHARE * 0.8, False, "")
    yield Figure("1,000 calls: replies lost", float(lost), 0.0, True, "")
    yield Figure("1,000 calls: replies counted twice", float(twice), 0.0, True, "")
    yield Figure("1,000 calls: dollars off the endpoint's count", abs(counted_usd - billed_usd), 1e-9, True, "USD")


def parsing_figures() -> Iterator[Figure]:
    """Reads ten thousand damaged replies; any exception ends the benchmark."""
    wrong = found = 0
    started = time.perf_counter()
    for reply in damaged_replies(DAMAGED_REPLIES):
        code = extract_kernel(reply.text, finish_reason=reply.finish_reason).code
        found += code is not None
        wrong += violation(reply, code) is not None
    seconds = time.perf_counter() - started
    yield Figure("10,000 damaged replies: kernels found", float(found), DAMAGED_REPLIES * 0.5, False, "")
    yield Figure("10,000 damaged replies: mis-extracted", float(wrong), 0.0, True, "")
    yield Figure("10,000 damaged replies: time", seconds, 120.0, True, "s")


async def _all_figures() -> list[Figure]:
    figures = [figure async for figure in throughput_figures()]
    figures += [figure async for figure in failure_figures()]
    return figures + list(parsing_figures())


def main() -> int:
    """Runs the benchmark and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="serve the endpoint and nothing else")
    if parser.parse_args().serve:
        asyncio.run(LocalEndpoint().serve())
        return 0
    figures = asyncio.run(_all_figures())
    for figure in figures:
        bound = "at most" if figure.at_most else "at least"
        state = "met" if figure.met else "MISSED"
        print(f"{figure.name:<52} {figure.value:>9.2f} {figure.unit:<3} ({bound} {figure.target:.2f})  {state}")
    return 0 if all(figure.met for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
