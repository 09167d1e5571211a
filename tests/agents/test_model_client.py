"""A call ends as a reply whatever the endpoint does, and what it cost is on it."""

from __future__ import annotations

import asyncio
import email.utils
import time
from typing import Any

import pytest
from misbehaving_endpoint import Behaviour, Endpoint, cut_off, hang, raw, reply, status

from accelopt_ray.agents.client import ModelClient
from accelopt_ray.agents.endpoints import ModelEndpoint, choose_endpoint
from accelopt_ray.agents.prices import Price, PriceTable
from accelopt_ray.outcome import CallOutcome, UserError
from accelopt_ray.search.services import ModelCall, ModelReply

PRICE = Price(1.0, 0.1, 10.0)


def call(number: int = 0, role: str = "planner") -> ModelCall:
    return ModelCall(f"call-{number}", role, "You are the planner.", "Plan.", number, seed=2**62 + number)


def client(endpoint: Endpoint, **changes: Any) -> ModelClient:
    settings: dict[str, Any] = {"model": "good-model", "price": PRICE, "max_retries": 3, "timeout_s": 30.0, **changes}
    asked = ModelEndpoint(endpoint.url, **settings)
    return ModelClient({"planner": [asked]}, first_pause_s=0.01, longest_pause_s=0.02)


def ask(endpoint: Endpoint, script: list[Behaviour], **changes: Any) -> ModelReply:
    endpoint.script = script

    async def run() -> ModelReply:
        models = client(endpoint, **changes)
        try:
            return await models.complete(call())
        finally:
            await models.close()

    return asyncio.run(run())


def test_a_proper_reply(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    usage = {
        "prompt_tokens": 1000,
        "completion_tokens": 200,
        "total_tokens": 1200,
        "prompt_tokens_details": {"cached_tokens": 600},
        "completion_tokens_details": {"reasoning_tokens": 150},
    }
    answer = ask(
        endpoint,
        [reply("Do this.", usage=usage, reasoning_content="Hm.")],
        api_key_env="SOME_KEY",
        temperature=0.7,
        top_p=0.9,
        max_tokens=50,
        extra_body={"reasoning_effort": "high"},
    )
    assert answer.outcome is CallOutcome.OK
    assert (answer.reply_text, answer.reasoning_text, answer.finish_reason) == ("Do this.", "Hm.", "stop")
    assert (answer.prompt_tokens, answer.cached_tokens) == (1000, 600)
    assert (answer.completion_tokens, answer.reasoning_tokens) == (200, 150)
    assert answer.cost_usd == pytest.approx((400 * 1.0 + 600 * 0.1 + 200 * 10.0) / 1e6)
    assert (answer.retries, answer.usage_estimated, answer.price_known) == (0, False, True)
    assert (answer.endpoint, answer.model, answer.call_id) == (endpoint.url, "good-model", "call-0")
    (sent,) = endpoint.requests
    assert sent["messages"] == [
        {"role": "system", "content": "You are the planner."},
        {"role": "user", "content": "Plan."},
    ]
    assert (sent["temperature"], sent["top_p"], sent["max_tokens"]) == (0.7, 0.9, 50)
    assert (sent["reasoning_effort"], sent["authorization"]) == ("high", "Bearer secret")
    assert 0 <= sent["seed"] < 2**31


def test_what_is_none_is_not_sent(endpoint: Endpoint) -> None:
    ask(endpoint, [], temperature=None, max_tokens=None, send_seed=False)
    assert not {"temperature", "top_p", "max_tokens", "seed"} & set(endpoint.requests[0])


@pytest.mark.parametrize(
    ("content", "fields", "reasoning", "text"),
    [
        ("<think>\nHm.\n</think>\n\nDo this.", {}, "Hm.", "Do this."),
        ("Hm.\n</think>\nDo this.", {}, "Hm.", "Do this."),
        ("Do this.", {"reasoning": "Hm."}, "Hm.", "Do this."),
        ("Do this.", {"reasoning_content": None, "reasoning": None}, "", "Do this."),
        ("Use <think> tags.", {}, "", "Use <think> tags."),
    ],
)
def test_reasoning_is_kept_apart(
    endpoint: Endpoint, content: str, fields: dict[str, Any], reasoning: str, text: str
) -> None:
    answer = ask(endpoint, [reply(content, **fields)])
    assert (answer.reasoning_text, answer.reply_text) == (reasoning, text)


@pytest.mark.parametrize(
    "trouble",
    [
        status(429),
        status(500),
        status(502),
        status(503),
        status(408),
        reply(""),
        reply("  \n"),
        reply(None),
        raw(b"{ this is not JSON"),
        raw(b"<html>busy</html>", media_type="text/html"),
        raw(b'{"choices": []}'),
        raw(b"[1, 2]"),
        raw(b"null"),
        raw(b'{"choices": [{"index": 0}]}'),
        raw(b'{"id": "\xff\xfe"}'),
        raw(b""),
        cut_off(),
    ],
    ids=[
        *("429", "500", "502", "503", "408", "empty", "blank", "null content", "no JSON", "HTML", "no choices"),
        *("a list", "null", "no message", "no UTF-8", "no body", "cut off"),
    ],
)
def test_trouble_that_may_pass_is_tried_again(endpoint: Endpoint, trouble: Behaviour) -> None:
    answer = ask(endpoint, [trouble, trouble, reply("Do this.")])
    assert (answer.outcome, answer.reply_text, answer.retries) == (CallOutcome.OK, "Do this.", 2)
    assert len(endpoint.requests) == 3
    assert answer.error_text == ""


@pytest.mark.parametrize("code", [400, 401, 403, 404, 413, 422])
def test_trouble_that_cannot_pass_is_not_tried_again(endpoint: Endpoint, code: int) -> None:
    answer = ask(endpoint, [status(code, message="this model's maximum context length is 8192 tokens")])
    assert (answer.outcome, answer.retries, len(endpoint.requests)) == (CallOutcome.ERROR, 0, 1)
    assert endpoint.url in answer.error_text
    assert "\n" not in answer.error_text
    assert ("OPENAI_API_KEY" if code == 401 else "maximum context length") in answer.error_text


def test_it_gives_up_in_the_end_and_says_why(endpoint: Endpoint) -> None:
    answer = ask(endpoint, [status(500, message="boiler room on fire")] * 9, max_retries=2)
    assert (answer.outcome, answer.retries, len(endpoint.requests)) == (CallOutcome.ERROR, 2, 3)
    assert "status 500" in answer.error_text
    assert "boiler room on fire" in answer.error_text
    assert answer.cost_usd == 0


def test_empty_for_good_is_empty_and_paid_for(endpoint: Endpoint) -> None:
    answer = ask(endpoint, [reply("")] * 3, max_retries=2)
    assert answer.outcome is CallOutcome.EMPTY
    assert (answer.prompt_tokens, answer.completion_tokens) == endpoint.billed_tokens == (300, 60)


def test_retries_after_paid_replies_are_paid_for_too(endpoint: Endpoint) -> None:
    answer = ask(endpoint, [reply(""), status(500), reply("Do this.")])
    assert (answer.prompt_tokens, answer.completion_tokens) == endpoint.billed_tokens == (200, 40)


def test_a_hanging_endpoint_is_not_waited_for(endpoint: Endpoint) -> None:
    answer = ask(endpoint, [hang(), reply("Do this.")], timeout_s=1.5)
    assert (answer.outcome, answer.retries) == (CallOutcome.OK, 1)
    answer = ask(endpoint, [hang(), hang()], timeout_s=0.2, max_retries=1)
    assert answer.outcome is CallOutcome.ERROR
    assert "0.2 s" in answer.error_text or "in time" in answer.error_text


def test_an_endpoint_that_is_not_there() -> None:
    answer = ask(Endpoint(url="http://127.0.0.1:9/v1"), [], max_retries=1)
    assert (answer.outcome, answer.retries) == (CallOutcome.ERROR, 1)
    assert "cannot be reached" in answer.error_text


@pytest.mark.parametrize("form", ["seconds", "milliseconds", "date"])
def test_retry_after_is_honoured(endpoint: Endpoint, form: str) -> None:
    # A date has whole seconds, so the second after the next is at least one second away.
    headers = {
        "seconds": {"Retry-After": "0.5"},
        "milliseconds": {"retry-after-ms": "500"},
        "date": {"Retry-After": email.utils.formatdate(time.time() + 2, usegmt=True)},
    }[form]
    ask(endpoint, [status(429, headers), reply("Do this.")])
    first, second = endpoint.arrivals_s
    assert second - first >= 0.45


def test_a_malformed_retry_after_is_ignored(endpoint: Endpoint) -> None:
    assert ask(endpoint, [status(429, {"Retry-After": "soon"}), reply("Do this.")]).outcome is CallOutcome.OK


def test_cut_off_at_the_token_limit_is_not_asked_again(endpoint: Endpoint) -> None:
    answer = ask(endpoint, [reply("```python\ndef k", finish_reason="length")])
    assert (answer.outcome, answer.finish_reason, len(endpoint.requests)) == (CallOutcome.TRUNCATED, "length", 1)
    answer = ask(endpoint, [reply("", finish_reason="length", reasoning_content="Hmmm")])
    assert (answer.outcome, answer.reasoning_text) == (CallOutcome.TRUNCATED, "Hmmm")
    answer = ask(endpoint, [reply("<think>Hmmm", finish_reason="length")])
    assert (answer.outcome, answer.reasoning_text, answer.reply_text) == (CallOutcome.TRUNCATED, "Hmmm", "")


def test_refusals(endpoint: Endpoint) -> None:
    assert ask(endpoint, [reply(None, refusal="No.")]).outcome is CallOutcome.REFUSED
    assert ask(endpoint, [reply(None, finish_reason="content_filter")]).outcome is CallOutcome.REFUSED


def test_an_answer_in_a_tool_call_is_an_answer(endpoint: Endpoint) -> None:
    tool = {"id": "1", "type": "function", "function": {"name": "write", "arguments": '{"code": "x"}'}}
    answer = ask(endpoint, [reply(None, finish_reason="tool_calls", tool_calls=[tool])])
    assert (answer.outcome, answer.reply_text) == (CallOutcome.OK, '{"code": "x"}')


def test_without_usage_tokens_are_estimated_and_marked(endpoint: Endpoint) -> None:
    answer = ask(endpoint, [reply("x" * 400, no_usage=True)])
    assert answer.usage_estimated
    assert answer.completion_tokens == 100
    assert answer.prompt_tokens > 0
    assert answer.cost_usd > 0


def test_duplicated_choices_are_one_answer(endpoint: Endpoint) -> None:
    answer = ask(endpoint, [reply("Do this.", choices=3)])
    assert (answer.reply_text, answer.completion_tokens) == ("Do this.", 20)


def test_an_unknown_price_is_marked(endpoint: Endpoint) -> None:
    answer = ask(endpoint, [reply("x")], price=None)
    assert (answer.cost_usd, answer.price_known, answer.completion_tokens) == (0.0, False, 20)


def test_calls_in_flight_are_bounded_and_the_bound_gives_way_under_overload(endpoint: Endpoint) -> None:
    endpoint.default = reply("fine", delay_s=0.02)

    async def run() -> list[ModelReply]:
        models = client(endpoint, max_in_flight=8)
        try:
            return list(await asyncio.gather(*(models.complete(call(number)) for number in range(40))))
        finally:
            await models.close()

    replies = asyncio.run(run())
    assert endpoint.most_in_flight <= 8
    assert [answer.call_id for answer in replies] == [f"call-{number}" for number in range(40)]


def test_many_calls_with_failures_lose_nothing_and_count_every_token_once(endpoint: Endpoint) -> None:
    troubles = [status(429), status(500), reply(""), raw(b"{"), status(503)]
    good = reply("fine")
    endpoint.script = [troubles[number // 5 % 5] if number % 5 == 2 else good for number in range(150)]

    async def run() -> list[ModelReply]:
        models = client(endpoint, max_in_flight=32)
        try:
            return list(await asyncio.gather(*(models.complete(call(number)) for number in range(120))))
        finally:
            await models.close()

    replies = asyncio.run(run())
    assert all(answer.outcome is CallOutcome.OK for answer in replies)
    assert len({answer.call_id for answer in replies}) == 120
    billed_prompt, billed_completion = endpoint.billed_tokens
    assert sum(answer.prompt_tokens for answer in replies) == billed_prompt
    assert sum(answer.completion_tokens for answer in replies) == billed_completion
    assert sum(answer.cost_usd for answer in replies) == pytest.approx((billed_prompt + 10 * billed_completion) / 1e6)


def test_a_cancelled_call_gives_its_place_back(endpoint: Endpoint) -> None:
    endpoint.script = [hang()]

    async def run() -> ModelReply:
        models = client(endpoint, max_in_flight=1)
        first = asyncio.ensure_future(models.complete(call(1)))
        waiting = asyncio.ensure_future(models.complete(call(2)))
        while not endpoint.requests:  # noqa: ASYNC110 (the endpoint runs in a thread of its own)
            await asyncio.sleep(0.01)
        waiting.cancel()
        first.cancel()
        await asyncio.gather(first, waiting, return_exceptions=True)
        try:
            return await models.complete(call(3))
        finally:
            await models.close()

    assert asyncio.run(run()).outcome is CallOutcome.OK


def probe(url: str, model: str) -> None:
    async def run() -> None:
        models = ModelClient({"default": [ModelEndpoint(url, model)]})
        try:
            await models.probe(timeout_s=10.0)
        finally:
            await models.close()

    asyncio.run(run())


def test_probe(endpoint: Endpoint) -> None:
    probe(endpoint.url, "good-model")
    with pytest.raises(UserError, match=r"no model 'bad-model': choose one of good-model"):
        probe(endpoint.url, "bad-model")
    with pytest.raises(UserError, match="cannot be reached") as raised:
        probe("http://127.0.0.1:9/v1", "good-model")
    assert "\n" not in str(raised.value)


def test_roles_without_an_endpoint_are_refused() -> None:
    with pytest.raises(UserError, match="planner"):
        ModelClient({"planner": []})


def test_ensembles_share_calls_by_weight_and_repeatably() -> None:
    heavy = ModelEndpoint("http://a", "heavy", weight=3.0)
    light = ModelEndpoint("http://b", "light", weight=1.0)
    never = ModelEndpoint("http://c", "never", weight=0.0)
    chosen = [choose_endpoint([heavy, light, never], f"call-{number}").model for number in range(2000)]
    assert chosen == [choose_endpoint([heavy, light, never], f"call-{number}").model for number in range(2000)]
    assert 0.70 < chosen.count("heavy") / 2000 < 0.80
    assert "never" not in chosen


def test_prices_by_name() -> None:
    table = PriceTable("2026-01-01", {"gpt-oss-120b": PRICE})
    assert table.price("openai/GPT-OSS-120b") is PRICE
    assert table.price("gpt-oss-120b") is PRICE
    assert table.price("gpt-oss") is None
