"""Requests go to URLs in turn, and to vLLM's pair by its own hand-off."""

import asyncio
import json

from pdserve.bench.load.dialect import Completions
from pdserve.bench.load.endpoint import Endpoint
from pdserve.bench.load.load_request import LoadRequest
from pdserve.bench.load.session import open_session
from pdserve.bench.load.timeline import Timeline
from pdserve.bench.pd.request_routes import PairWithoutProxy, RoundRobin
from tests.pdserve.bench.sse_server import Answer, Requests, Sent, SteppedClock, serving, streamed


def through_pair(prefill: Answer) -> tuple[Timeline, Requests, Requests]:
    async def run() -> tuple[Timeline, Requests, Requests]:
        clock = SteppedClock()
        async with (
            serving(lambda path: prefill, clock) as (first, p_asked),
            serving(lambda path: streamed([1.0, 0.5]), clock) as (second, d_asked),
            open_session({}, 20.0, {}) as http,
        ):
            ends = [Endpoint(http, url, Completions("m", {"ignore_eos": True}), clock) for url in (first, second)]
            return await PairWithoutProxy(*ends).send(LoadRequest((1, 2), 5)), p_asked, d_asked

    return asyncio.run(run())


def test_a_prompt_goes_to_p_for_one_token_then_to_d() -> None:
    ticket = {"remote_block_ids": [1, 2], "remote_host": "h"}

    line, p_asked, d_asked = through_pair(Answer([Sent(2.0, json.dumps({"kv_transfer_params": ticket}).encode())]))

    assert line.failure is None
    assert (line.ttft_s, line.longest_gap_s) == (3.0, 0.5)  # P's time is included
    (to_p,), (to_d,) = p_asked.bodies, d_asked.bodies
    assert (to_p["max_tokens"], to_p["stream"], to_p["prompt"]) == (1, False, [1, 2])
    assert to_p["kv_transfer_params"]["do_remote_decode"] is True
    assert "stream_options" not in to_p
    assert (to_d["max_tokens"], to_d["stream"], to_d["kv_transfer_params"]) == (5, True, ticket)


def test_a_refusal_of_p_fails_the_request() -> None:
    line, _, d_asked = through_pair(Answer([Sent(0.0, b'{"error": {"message": "full"}}')], 503))

    assert line.failure is not None
    assert line.failure.kind == "P refused"
    assert "HTTP 503: full" in line.failure.message
    assert d_asked.bodies == []


def test_urls_are_used_in_turn() -> None:
    async def run() -> list[int]:
        clock = SteppedClock()
        async with (
            serving(lambda path: streamed([1.0]), clock) as (first, a),
            serving(lambda path: streamed([1.0]), clock) as (second, b),
            open_session({}, 20.0, {}) as http,
        ):
            route = RoundRobin([Endpoint(http, url, Completions("m"), clock) for url in (first, second)])
            for _ in range(5):
                await route.send(LoadRequest("a", 1))
            return [len(a.bodies), len(b.bodies)]

    assert asyncio.run(run()) == [3, 2]
