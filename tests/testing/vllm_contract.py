"""What a pair of vLLM workers answers, fake or real: one table of requests.

Workers of a real pair run with NixlConnector (PUSH_ROWS: NixlPushConnector), kv_load_failure_policy fail and
--enable-prompt-tokens-details, and any model of at least 200 token ids and 256 positions.
"""

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from tests.testing.vllm_client import LIMIT, WorkerClient

PROMPT = [5, 9, 13, *range(20, 60)]
GREEDY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
LEASE_S = 120.0
"""Longer than a lease that an earlier row may have left to expire."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two workers of one model."""

    prefill: str
    decode: str
    client: WorkerClient
    max_model_len: int


Row = Callable[[Pair], Awaitable[None]]


async def same_tokens_as_alone(pair: Pair) -> None:
    alone = await pair.client.stream(pair.decode, **GREEDY, logprobs=2)
    handed = await pair.client.hand_off(pair.prefill, pair.decode, **GREEDY, logprobs=2)

    assert len(alone.token_ids) == 6
    assert handed.token_ids == alone.token_ids
    for kind in (handed, alone):  # a busy worker sends several tokens in one event
        names = [name for choice in kind.choices for name in choice["logprobs"]["tokens"]]
        assert names == [f"token_id:{token_id}" for token_id in kind.token_ids]
    mine, theirs = (
        [value for choice in kind.choices for value in choice["logprobs"]["token_logprobs"]] for kind in (handed, alone)
    )
    assert mine == pytest.approx(theirs, abs=1e-3)


async def a_prefill_answers_a_reference(pair: Pair) -> None:
    answer = await pair.client.prefill(pair.prefill, **GREEDY)
    reference = answer.body["kv_transfer_params"]

    assert len(answer.token_ids) == 1
    assert (reference["do_remote_prefill"], reference["do_remote_decode"]) == (True, False)
    assert reference["remote_num_tokens"] == len(PROMPT)
    assert [len(group) > 0 for group in reference["remote_block_ids"]] == [True]
    assert {"remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"} <= reference.keys()


async def blocks_are_held_until_they_are_read(pair: Pair) -> None:
    usage = "vllm:kv_cache_usage_perc"
    await pair.client.until(pair.prefill, usage, lambda value: value == 0, LEASE_S)
    answer = await pair.client.prefill(pair.prefill, **GREEDY)
    await pair.client.until(pair.prefill, usage, lambda value: value > 0)

    await pair.client.stream(pair.decode, **GREEDY, kv_transfer_params=answer.body["kv_transfer_params"])

    await pair.client.until(pair.prefill, usage, lambda value: value == 0)


async def a_stream_has_ids_usage_and_done(pair: Pair) -> None:
    answer = await pair.client.stream(pair.decode, **GREEDY)
    first, *rest = answer.choices

    assert first["prompt_token_ids"] == PROMPT
    assert all(one.get("prompt_token_ids") is None for one in rest)
    assert all(one["token_ids"] for one in (first, *rest)), "a chunk has one token or more"
    assert [one["finish_reason"] for one in (first, *rest)] == [None] * len(rest) + ["length"]
    assert len(answer.token_ids) == 6
    assert answer.events[-1]["choices"] == []
    assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (len(PROMPT), 6)
    assert answer.is_done


async def a_whole_answer_has_the_same_tokens(pair: Pair) -> None:
    whole, streamed = await pair.client.complete(pair.decode, **GREEDY), await pair.client.stream(pair.decode, **GREEDY)

    assert whole.token_ids == streamed.token_ids
    assert whole.body["object"] == "text_completion"
    assert whole.body["kv_transfer_params"] is None


async def sequences_have_indices(pair: Pair) -> None:
    sampled = GREEDY | {"temperature": 1, "seed": 3}
    one = await pair.client.stream(pair.decode, **sampled)
    two = await pair.client.stream(pair.decode, **sampled, n=2)

    assert two.tokens_of(0) == one.token_ids
    assert two.tokens_of(1) != one.token_ids
    assert two.usage["completion_tokens"] == 12


async def a_stop_token_is_the_reason(pair: Pair) -> None:
    free = (await pair.client.stream(pair.decode, **GREEDY)).token_ids
    answer = await pair.client.stream(pair.decode, **GREEDY, stop_token_ids=[free[2]])

    assert answer.token_ids == free[: free.index(free[2]) + 1]
    assert (answer.choices[-1]["finish_reason"], answer.choices[-1]["stop_reason"]) == ("stop", free[2])


async def prompt_logprobs_have_a_row_for_each_token(pair: Pair) -> None:
    answer = await pair.client.complete(pair.decode, **GREEDY, prompt_logprobs=1)
    (choice,) = answer.choices

    assert choice["prompt_logprobs"][0] is None
    for token_id, row in zip(PROMPT[1:], choice["prompt_logprobs"][1:], strict=True):
        assert row[str(token_id)].keys() == {"logprob", "rank", "decoded_token"}


async def an_aborted_request_stops(pair: Pair) -> None:
    many = GREEDY | {"max_tokens": pair.max_model_len - len(PROMPT)}
    task = asyncio.create_task(pair.client.stream(pair.decode, **many))
    await pair.client.until(pair.decode, "vllm:num_requests_running", lambda value: value == 1)
    task.cancel()

    await pair.client.until(pair.decode, "vllm:num_requests_running", lambda value: value == 0, 5.0)


async def without_a_reference_it_prefills_itself(pair: Pair) -> None:
    before = await pair.client.gauge(pair.decode, "vllm:nixl_num_failed_transfers_total")
    answer = await pair.client.stream(pair.decode, **GREEDY)

    assert answer.status == 200
    assert answer.usage["prompt_tokens_details"]["cached_tokens"] < len(PROMPT)
    assert await pair.client.gauge(pair.decode, "vllm:nixl_num_failed_transfers_total") == before


async def cached_tokens_show_whether_kv_was_remote(pair: Pair) -> None:
    prompt = _unseen()
    first = await pair.client.prefill(pair.prefill, **GREEDY | {"prompt": prompt})
    reference = first.body["kv_transfer_params"]
    assert reference.pop("remote_prefill_cached_tokens") == 0, "D would report this number as its own"

    answer = await pair.client.stream(pair.decode, **GREEDY | {"prompt": prompt}, kv_transfer_params=reference)

    assert answer.usage["prompt_tokens_details"]["cached_tokens"] == len(prompt)


async def a_reference_of_another_prompt_is_a_wrong_200(pair: Pair) -> None:
    prompt, other = _unseen(), _unseen()
    right = (await pair.client.stream(pair.prefill, **GREEDY | {"prompt": prompt})).token_ids
    first = await pair.client.prefill(pair.prefill, **GREEDY | {"prompt": other})

    answer = await pair.client.stream(
        pair.decode, **GREEDY | {"prompt": prompt}, kv_transfer_params=first.body["kv_transfer_params"]
    )

    assert (answer.status, answer.is_done, len(answer.token_ids)) == (200, True, 6)
    assert answer.token_ids != right


async def tokens_beyond_the_context_are_cut(pair: Pair) -> None:
    prompt = [7] * (pair.max_model_len - 3)
    answer = await pair.client.complete(pair.decode, **GREEDY | {"prompt": prompt, "max_tokens": 10})

    assert (answer.status, len(answer.token_ids)) == (200, 3)


async def a_foreign_engine_is_an_error(pair: Pair) -> None:
    first = await pair.client.prefill(pair.prefill, **GREEDY)
    foreign = first.body["kv_transfer_params"] | {"remote_engine_id": "another"}

    streamed = await pair.client.stream(pair.decode, **GREEDY, kv_transfer_params=foreign)
    whole = await pair.client.complete(pair.decode, **GREEDY, kv_transfer_params=foreign)

    assert (streamed.status, streamed.error["code"], streamed.token_ids) == (200, 500, [])
    assert (whole.status, whole.error["type"]) == (500, "InternalServerError")


async def a_request_refused_by_decode_frees_prefill(pair: Pair) -> None:
    first = await pair.client.prefill(pair.prefill, **GREEDY)
    reference = first.body["kv_transfer_params"]
    many = GREEDY | {"max_tokens": pair.max_model_len + 1}

    answer = await pair.client.stream(pair.decode, **many, kv_transfer_params=reference)

    assert answer.status == 400
    await pair.client.until(pair.prefill, "vllm:kv_cache_usage_perc", lambda value: value == 0, LEASE_S)


async def it_describes_itself(pair: Pair) -> None:
    for url in (pair.prefill, pair.decode):
        for path in ("/health", "/version", "/v1/models"):
            async with pair.client.session.get(url + path, timeout=LIMIT) as response:
                assert response.status == 200
                page = await response.read()
                assert (page == b"") == (path == "/health")
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert await pair.client.gauge(pair.decode, f"vllm:{name}") == 0
    assert await pair.client.gauge(pair.decode, "vllm:cache_config_info") == 1
    assert await pair.client.gauge(pair.decode, "process_start_time_seconds") > 0


async def push_answers_asked_at_once(pair: Pair) -> None:
    engine, prompt = await _engine_of(pair), _unseen()
    alone = await pair.client.stream(pair.prefill, **GREEDY | {"prompt": prompt})
    headers = {"X-Request-Id": secrets.token_hex(16)}

    answer, first = await asyncio.gather(
        pair.client.stream(pair.decode, headers=headers, **GREEDY | {"prompt": prompt}, kv_transfer_params=engine),
        pair.client.prefill(pair.prefill, headers=headers, **GREEDY | {"prompt": prompt}),
    )

    assert answer.token_ids == alone.token_ids
    assert answer.usage["prompt_tokens_details"]["cached_tokens"] == len(prompt)
    assert first.body["kv_transfer_params"]["transfer_mode"] == "push"
    for url in (pair.prefill, pair.decode):
        await pair.client.until(url, "vllm:kv_cache_usage_perc", lambda value: value == 0)


async def push_answers_prefill_first(pair: Pair) -> None:
    prompt, headers = _unseen(), {"X-Request-Id": secrets.token_hex(16)}
    alone = await pair.client.stream(pair.prefill, **GREEDY | {"prompt": prompt})

    handed = await pair.client.hand_off(pair.prefill, pair.decode, headers=headers, **GREEDY | {"prompt": prompt})

    assert handed.token_ids == alone.token_ids


async def push_keeps_the_blocks_of_an_aborted_request_until_its_kv_comes(pair: Pair) -> None:
    engine, prompt, usage = await _engine_of(pair), _unseen(), "vllm:kv_cache_usage_perc"
    headers = {"X-Request-Id": secrets.token_hex(16)}
    fields = GREEDY | {"prompt": prompt, "kv_transfer_params": engine}
    waiting = asyncio.create_task(pair.client.stream(pair.decode, headers=headers, **fields))
    await pair.client.until(pair.decode, "vllm:num_requests_waiting", lambda value: value == 1)

    waiting.cancel()

    await pair.client.until(pair.decode, "vllm:num_requests_waiting", lambda value: value == 0)
    assert await pair.client.gauge(pair.decode, usage) > 0
    await pair.client.prefill(pair.prefill, headers=headers, **GREEDY | {"prompt": prompt})
    await pair.client.until(pair.decode, usage, lambda value: value == 0)


async def push_to_an_unknown_engine_is_an_error(pair: Pair) -> None:
    engine = await _engine_of(pair) | {"remote_engine_id": "another"}

    answer = await pair.client.complete(pair.decode, **GREEDY | {"prompt": _unseen()}, kv_transfer_params=engine)

    assert (answer.status, answer.error["type"]) == (500, "InternalServerError")


async def _engine_of(pair: Pair) -> dict[str, Any]:
    """Return what a decode worker needs to know about prefill's engine, once that has no block in use."""
    first = await pair.client.prefill(pair.prefill, **GREEDY | {"prompt": _unseen()})
    await pair.client.until(pair.prefill, "vllm:kv_cache_usage_perc", lambda value: value == 0, LEASE_S)
    reference: dict[str, Any] = first.body["kv_transfer_params"]
    return {name: value for name, value in reference.items() if name != "remote_prefill_cached_tokens"}


ROWS: list[Row] = [
    same_tokens_as_alone,
    a_prefill_answers_a_reference,
    blocks_are_held_until_they_are_read,
    a_stream_has_ids_usage_and_done,
    a_whole_answer_has_the_same_tokens,
    sequences_have_indices,
    a_stop_token_is_the_reason,
    prompt_logprobs_have_a_row_for_each_token,
    an_aborted_request_stops,
    without_a_reference_it_prefills_itself,
    cached_tokens_show_whether_kv_was_remote,
    a_reference_of_another_prompt_is_a_wrong_200,
    tokens_beyond_the_context_are_cut,
    a_foreign_engine_is_an_error,
    a_request_refused_by_decode_frees_prefill,
    it_describes_itself,
]
PUSH_ROWS: list[Row] = [
    push_answers_asked_at_once,
    push_answers_prefill_first,
    push_keeps_the_blocks_of_an_aborted_request_until_its_kv_comes,
    push_to_an_unknown_engine_is_an_error,
]
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "another"}, 404, "NotFoundError"),
    ({"max_tokens": 100_000}, 400, "BadRequestError"),
    ({"prompt": None}, 400, "BadRequestError"),
    ({"prompt": [7] * 10_000}, 400, "BadRequestError"),
    ({"n": 2}, 400, "BadRequestError"),
    ({"min_tokens": 7}, 400, "BadRequestError"),
    ({"stream_options": {"include_usage": True}}, 400, "BadRequestError"),
]


def refusal(fields: dict[str, Any], status: int, kind: str) -> Row:
    """Return the row for a request of REFUSED."""

    async def refused(pair: Pair) -> None:
        answer = await pair.client.complete(pair.decode, **GREEDY | fields)

        assert (answer.status, answer.error["type"], answer.error["code"]) == (status, kind, status)

    return refused


async def run_row(row: Row, prefill: str, decode: str) -> None:
    """Run a row on the pair at these URLs."""
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{decode}/v1/models", timeout=LIMIT) as response:
            (model,) = (await response.json())["data"]
        client = WorkerClient(session, model["id"], {"return_tokens_as_token_ids": True})
        await row(Pair(prefill, decode, client, model["max_model_len"]))


def _unseen() -> list[int]:
    """Return a prompt that no prefix cache contains."""
    return random.SystemRandom().sample(range(5, 195), 43)
