"""The matrix's own checks: a broken guarantee is detected, a kept one is not reported as broken."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import httpx
import pytest

from tests.faults.cases import ANSWER, CLOSED, ERROR, MAX_TOKENS, Case
from tests.faults.cluster import FaultCluster
from tests.faults.running import check_outcomes
from tests.faults.stream_request import StreamResult, request_stream

WHOLE = [f"w{i}" for i in range(MAX_TOKENS)]
BEFORE, AFTER = Case("prefill.in_chunk", 1, "raise"), Case("decode.token", 5, "kill9")
KILLED, STOPPED = Case("scheduler.between", 1, "kill9"), Case("scheduler.between", 1, "stop")


class OneAnswer:
    """Stands for a cluster whose pairs all answer WHOLE."""

    def expected(self, prompt: Sequence[int], count: int) -> dict[tuple[str, str, str], list[str]]:
        return {("prefill-0", "prefill-0", "decode-0"): WHOLE[:count]}

    def explains(self, prompt: Sequence[int], words: Sequence[str]) -> bool:
        return list(words) == WHOLE[: len(words)]


def _check(case: Case, result: tuple[Any, ...]) -> None:
    check_outcomes(cast(FaultCluster, OneAnswer()), case, [[1]], [StreamResult(*result)])


@pytest.mark.parametrize(
    ("case", "result"),
    [
        (BEFORE, (WHOLE, ANSWER)), (AFTER, (WHOLE, ANSWER)), (STOPPED, (WHOLE[:5], ERROR, "lost")),
        (KILLED, (WHOLE[:1], CLOSED)), (STOPPED, ([], ERROR, "lost")),
    ],
)  # fmt: skip
def test_a_kept_guarantee_passes(case: Case, result: tuple[Any, ...]) -> None:
    _check(case, result)


@pytest.mark.parametrize(
    ("case", "result"),
    [
        (BEFORE, (WHOLE[:1], ERROR, "lost")), (BEFORE, ([], ERROR, "lost")), (AFTER, ([], ERROR, "lost")),
        (AFTER, (WHOLE[:5], CLOSED)), (AFTER, (WHOLE[:5], ANSWER)), (AFTER, (WHOLE[:5], ERROR, "lost")),
        (STOPPED, (["w9"], ERROR, "lost")), (BEFORE, ([*WHOLE[:-1], "w9"], ANSWER)),
        (BEFORE, ([*WHOLE, "w9"], ANSWER)), (KILLED, (WHOLE, ANSWER)), (STOPPED, (WHOLE[:1], CLOSED)),
    ],
)  # fmt: skip
def test_a_broken_guarantee_fails(case: Case, result: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError):
        _check(case, result)


TOKEN = 'data: {"choices": [{"text": "w1", "finish_reason": null}]}\n\n'
LAST = 'data: {"choices": [{"text": " w2", "finish_reason": "length"}]}\n\n'
BROKEN = 'data: {"error": {"message": "lost"}}\n\n'
DONE = "data: [DONE]\n\n"


async def _request(stream: str) -> StreamResult:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=stream))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await request_stream(client, [1], 2)


@pytest.mark.parametrize(
    ("stream", "words", "ending"),
    [(TOKEN + LAST + DONE, ["w1", "w2"], ANSWER), (TOKEN + BROKEN, ["w1"], ERROR), (BROKEN, [], ERROR)],
)
def test_a_finish_is_read_as_it_is(stream: str, words: list[str], ending: str) -> None:
    result = asyncio.run(_request(stream))

    assert (result.tokens, result.outcome) == (words, ending)


@pytest.mark.parametrize(
    "stream", [TOKEN, TOKEN + LAST, TOKEN + DONE, TOKEN + BROKEN + DONE, TOKEN + LAST + LAST + DONE]
)
def test_a_stream_without_a_real_finish_has_none(stream: str) -> None:
    with pytest.raises(AssertionError):
        asyncio.run(_request(stream))
