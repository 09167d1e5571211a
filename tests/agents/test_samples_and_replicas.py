"""Several samples in one request, and several replicas of one model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from misbehaving_endpoint import Behaviour, Endpoint, reply, samples, serve, status

from accelopt_ray.agents.client import ModelClient
from accelopt_ray.agents.endpoints import ModelEndpoint
from accelopt_ray.agents.gpu_time import GpuMeter, GpuTimePrice
from accelopt_ray.agents.prices import Price, load_prices
from accelopt_ray.agents.replies import divided
from accelopt_ray.agents.tokens import estimate_tokens, token_counter
from accelopt_ray.outcome import CallOutcome
from accelopt_ray.rewrite.server import MODEL
from accelopt_ray.search.services import ModelCall, ModelReply

PRICE = Price(1.0, 0.1, 10.0)


def call(sample: int, prompt: str = "Plan.", affinity: str = "") -> ModelCall:
    return ModelCall(f"{prompt}-{sample}", "planner", "You plan.", prompt, sample, seed=7 + sample, affinity=affinity)


def ask(endpoint: ModelEndpoint, calls: Sequence[ModelCall]) -> list[ModelReply]:
    async def run() -> list[ModelReply]:
        models = ModelClient({"planner": [endpoint]}, first_pause_s=0.01, longest_pause_s=0.02)
        try:
            return list(await asyncio.gather(*(models.complete(each) for each in calls)))
        finally:
            await models.close()

    return asyncio.run(run())


def grouped(endpoint: Endpoint, script: list[Behaviour], count: int = 4, **changes: Any) -> list[ModelReply]:
    endpoint.script = script
    asked = ModelEndpoint(endpoint.url, "good-model", price=PRICE, samples_per_request=8, max_retries=2, **changes)
    return ask(asked, [call(sample) for sample in reversed(range(count))])[::-1]


def test_samples_of_one_prompt_share_a_request_and_its_tokens(endpoint: Endpoint) -> None:
    usage = {"prompt_tokens": 1001, "completion_tokens": 403, "total_tokens": 1404}
    replies = grouped(endpoint, [samples("one", "two", "three", "four", usage=usage)])
    assert [answer.reply_text for answer in replies] == ["one", "two", "three", "four"]
    [sent] = endpoint.requests
    assert (sent["n"], sent["seed"]) == (4, 7)
    assert sum(answer.prompt_tokens for answer in replies) == 1001
    assert sum(answer.completion_tokens for answer in replies) == 403
    assert sum(answer.cost_usd for answer in replies) == pytest.approx((1001 + 4030) / 1e6)


def test_other_prompts_and_too_many_samples_need_requests_of_their_own(endpoint: Endpoint) -> None:
    endpoint.default = samples(*"abcdefgh")
    asked = ModelEndpoint(endpoint.url, "good-model", samples_per_request=2)
    replies = ask(asked, [*(call(sample) for sample in range(4)), call(0, "Other."), call(1, "Other.")])
    assert sorted(sent["n"] for sent in endpoint.requests) == [2, 2, 2]
    assert [answer.reply_text for answer in replies] == ["a", "b"] * 3


@pytest.mark.parametrize(
    "first",
    [reply("only one"), reply("only one", choices=4), status(400, message="n must be 1"), status(422)],
    ids=["one choice", "duplicated choices", "400", "422"],
)
def test_an_endpoint_without_several_samples_is_asked_for_each(endpoint: Endpoint, first: Behaviour) -> None:
    async def run() -> None:
        models = ModelClient({"planner": [asked]}, first_pause_s=0.01)
        try:
            first_round = await asyncio.gather(*(models.complete(call(sample)) for sample in range(4)))
            assert [answer.outcome for answer in first_round] == [CallOutcome.OK] * 4
            requests = len(endpoint.requests)
            assert requests in (4, 5)
            # It is not tried again: from now on each sample has its own request.
            await asyncio.gather(*(models.complete(call(sample, "Next.")) for sample in range(3)))
            assert len(endpoint.requests) == requests + 3
            assert not any("n" in sent for sent in endpoint.requests[requests:])
        finally:
            await models.close()

    asked = ModelEndpoint(endpoint.url, "good-model", samples_per_request=4)
    endpoint.script = [first]
    asyncio.run(run())


def test_a_prompt_that_cannot_be_answered_tells_why_in_every_sample(endpoint: Endpoint) -> None:
    endpoint.default = status(400, message="maximum context length is 8192 tokens")
    replies = grouped(endpoint, [])
    assert all("maximum context length" in answer.error_text for answer in replies)
    assert all(answer.outcome is CallOutcome.ERROR for answer in replies)


def test_an_empty_sample_among_others_is_asked_for_alone_and_paid_for(endpoint: Endpoint) -> None:
    replies = grouped(endpoint, [samples("one", "", "three", "four"), reply("two")])
    assert [answer.reply_text for answer in replies] == ["one", "two", "three", "four"]
    assert [answer.retries for answer in replies] == [0, 1, 0, 0]
    assert sum(answer.prompt_tokens for answer in replies) == endpoint.billed_tokens[0] == 200


def test_a_failed_request_is_tried_again_for_all_its_samples(endpoint: Endpoint) -> None:
    replies = grouped(endpoint, [status(503), samples("one", "two", "three", "four")])
    assert [answer.retries for answer in replies] == [1] * 4
    assert len(endpoint.requests) == 2


def test_a_cancelled_sample_leaves_the_others_alone(endpoint: Endpoint) -> None:
    endpoint.script = [samples("one", "three", delay_s=0.3)]
    asked = ModelEndpoint(endpoint.url, "good-model", samples_per_request=4)

    async def run() -> list[ModelReply]:
        models = ModelClient({"planner": [asked]})
        jobs = [asyncio.ensure_future(models.complete(call(sample))) for sample in range(3)]
        await asyncio.sleep(0.01)
        jobs[1].cancel()
        try:
            return list(await asyncio.gather(jobs[0], jobs[2]))
        finally:
            await models.close()

    assert [answer.reply_text for answer in asyncio.run(run())] == ["one", "three"]
    assert endpoint.requests[0]["n"] == 2


def test_equal_affinity_means_the_same_replica_and_a_lost_one_is_passed_over(endpoint: Endpoint) -> None:
    with serve() as other:
        asked = ModelEndpoint(endpoint.url, "good-model", replicas=(other.url,))
        calls = [call(sample, affinity=f"slot-{sample % 6}") for sample in range(24)]
        replies = ask(asked, calls)
        where = {each.affinity: set() for each in calls}  # type: ignore[var-annotated]
        for each, answer in zip(calls, replies, strict=True):
            where[each.affinity].add(answer.endpoint)
        assert all(len(urls) == 1 for urls in where.values())
        assert len(endpoint.requests) + len(other.requests) == 24
        gone = ModelEndpoint(endpoint.url, "good-model", replicas=("http://127.0.0.1:9/v1",), max_retries=1)
        replies = ask(gone, calls)
        assert [answer.outcome for answer in replies] == [CallOutcome.OK] * 24
        assert {answer.endpoint for answer in replies} == {endpoint.url}
        assert any(answer.retries == 1 for answer in replies)


def test_routes_spread_over_replicas_and_move_only_with_their_own() -> None:
    three = ModelEndpoint("http://a", "m", replicas=("http://b", "http://c"))
    two = ModelEndpoint("http://a", "m", replicas=("http://b",))
    before = {str(number): three.routes(str(number))[0] for number in range(600)}
    assert all(150 < list(before.values()).count(url) < 250 for url in three.base_urls)
    moved = {name for name, url in before.items() if two.routes(name)[0] != url}
    assert moved == {name for name, url in before.items() if url == "http://c"}


@given(st.integers(0, 10**9), st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_divided_counts_add_up_and_follow_the_weights(total: int, weights: list[int]) -> None:
    parts = divided(total, weights)
    assert sum(parts) == total
    whole = sum(weights) or len(weights)
    shares = [total * (weight if any(weights) else 1) / whole for weight in weights]
    assert all(abs(part - share) <= 1.001 for part, share in zip(parts, shares, strict=True))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def metered(clock: Clock, **options: Any) -> tuple[list[float], GpuMeter]:
    """Two calls that overlap after two idle seconds, and four idle seconds after them, at 1 USD a second."""
    meter = GpuMeter(GpuTimePrice(gpu_hour_usd=3.6, gpus=1000), clock, **options)
    clock.now = 2.0
    with meter.charged() as first:
        clock.now = 3.0
        with meter.charged() as second:
            clock.now = 5.0
        clock.now = 6.0
    clock.now = 10.0
    return [first.cost_usd, second.cost_usd], meter


def test_gpu_time_is_shared_by_the_calls_in_flight_and_a_pause_is_borne_by_the_call_that_ends_it() -> None:
    costs, meter = metered(Clock())
    assert costs == [pytest.approx(2.0 + 3.0), pytest.approx(1.0)]
    assert meter.idle_usd == pytest.approx(4.0)
    assert sum(costs) + meter.idle_usd == pytest.approx(10.0)


def test_gpus_cost_from_the_moment_they_were_taken() -> None:
    costs, meter = metered(Clock(), since_s=-5.0)
    assert sum(costs) + meter.idle_usd == pytest.approx(15.0)


def test_pauses_in_which_others_may_have_used_the_model_are_borne_by_no_call() -> None:
    costs, meter = metered(Clock(), charge_idle=False)
    assert costs == [pytest.approx(3.0), pytest.approx(1.0)]
    assert meter.idle_usd == pytest.approx(6.0)


def test_the_pauses_between_calls_are_in_their_costs(endpoint: Endpoint) -> None:
    asked = ModelEndpoint(endpoint.url, "good-model", price=GpuTimePrice(3600.0))

    async def run() -> tuple[list[ModelReply], float]:
        models = ModelClient({"planner": [asked]}, gpus_since_s=time.monotonic() - 100.0)
        started = time.monotonic()
        replies = [await models.complete(call(0))]
        await asyncio.sleep(0.3)
        replies.append(await models.complete(call(1)))
        idle = sum(models.idle_gpu_usd.values())
        spent = time.monotonic() - started
        await models.close()
        # One dollar a second: whatever is paid for is in some call's cost.
        assert sum(reply.cost_usd for reply in replies) + idle == pytest.approx(100.0 + spent, abs=0.5)
        return replies, idle

    replies, idle = asyncio.run(run())
    assert replies[0].cost_usd >= 100.0
    assert replies[1].cost_usd >= 0.3
    assert idle < 1.0


def test_calls_follow_a_model_to_another_address(endpoint: Endpoint) -> None:
    with serve() as other:
        endpoint.default = reply("too late", delay_s=60.0)
        other.default = reply("here")
        asked = ModelEndpoint(endpoint.url, "good-model", price=PRICE, timeout_s=50.0)

        async def run() -> list[ModelReply]:
            models = ModelClient({"planner": [asked]}, first_pause_s=0.01, longest_pause_s=0.02)
            waiting = asyncio.ensure_future(models.complete(call(0)))
            for _ in range(6_000):
                if endpoint.requests:
                    break
                await asyncio.sleep(0.01)
            await models.move(endpoint.url, other.url)
            replies = [await waiting, await models.complete(call(1))]
            await models.close()
            return replies

        in_flight, later = asyncio.run(run())
        assert (in_flight.reply_text, in_flight.endpoint, in_flight.retries) == ("here", other.url, 1)
        assert (later.reply_text, later.endpoint, later.retries) == ("here", other.url, 0)
        assert in_flight.latency_s < 30.0


def test_a_model_on_gpus_of_ones_own_costs_its_time(endpoint: Endpoint) -> None:
    endpoint.default = reply("fine", delay_s=0.2)
    asked = ModelEndpoint(endpoint.url, "good-model", price=GpuTimePrice(3600.0))
    replies = ask(asked, [call(sample) for sample in range(4)])
    assert all(answer.price_known and answer.cost_usd > 0 for answer in replies)
    # Four calls at once cost the time of one, not of four; each second is one dollar.
    assert 0.2 <= sum(answer.cost_usd for answer in replies) <= max(answer.latency_s for answer in replies) + 0.05


def test_the_offline_rewriter_is_free() -> None:
    price = load_prices().price(MODEL)
    assert price is not None
    assert price.cost_usd(10**6, 0, 10**6) == 0.0


def test_without_a_tokeniser_tokens_are_a_quarter_of_the_bytes(tmp_path: Any) -> None:
    assert token_counter(None)("x" * 400) == 100
    assert token_counter(str(tmp_path))("x" * 400) == estimate_tokens("x" * 400)
