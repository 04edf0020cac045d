"""Values that no message can carry are refused before they cost a session."""

import asyncio
import dataclasses
from typing import Any

import pytest

from scheduler.request import GenerationRequest
from tests.scheduler.fake_cluster import FakeCluster, collect, expected, request
from tests.scheduler.virtual_time import virtual
from wire.errors import InvalidRequest
from wire.types import StructuredOutput

PROMPT = tuple(range(20))


def _with_params(**params: Any) -> GenerationRequest:
    requested = request(PROMPT)
    return dataclasses.replace(requested, params=dataclasses.replace(requested.params, **params))


def _guided(*option: Any) -> GenerationRequest:
    return _with_params(structured=StructuredOutput(*option))


@pytest.mark.parametrize(
    ("requested", "words"),
    [
        (lambda: _with_params(seed=-1), r"seed is -1, but must be in \[0, 18446744073709551615\]"),
        (lambda: _with_params(max_tokens=2**31), "max_tokens is 2147483648, but must be in"),
        (lambda: _with_params(stop_token_ids=(5, 2**31)), "stop_token_ids has token id 2147483648"),
        (lambda: dataclasses.replace(request(PROMPT), seeds=(2**64,)), "seed is 18446744073709551616"),
        (lambda: request((5, 2**31)), "prompt has token id 2147483648"),
        (lambda: _guided("choice", "x" * 2**24), "choice has 16777216 bytes, but the limit is 65536"),
        (lambda: _guided("json", "é" * 2**15 + "x"), "json has 65537 bytes, but the limit is 65536"),
        (lambda: _guided("json", "{}", " " * 2**17), "whitespace_pattern has 131072 bytes, but the limit is 65536"),
        (lambda: _guided("json", "{}", None, "x" * 2**17), "guided_decoding_backend has 131072 bytes, but the"),
    ],
    ids=["seed", "max_tokens", "stop ids", "a prompt's own seed", "prompt", "choice", "json", "blanks", "backend"],
)  # fmt: skip
@virtual
async def test_a_value_no_message_can_carry_is_refused_and_others_continue(requested: Any, words: str) -> None:
    async with FakeCluster("PD").serving() as cluster:
        beside = asyncio.create_task(collect(cluster.control.dispatch, request(PROMPT)))
        await asyncio.sleep(0)

        with pytest.raises(InvalidRequest, match=words):
            await collect(cluster.control.dispatch, requested())

        assert (await beside).tokens[0, 0] == expected(PROMPT, 4)
        assert cluster.control.dispatch.ledger.received == 1
