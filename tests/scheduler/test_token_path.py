"""The path of a token through the scheduler, from an instance's session to the client's bytes, is short."""

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from scheduler.tokens import Tokens
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.mixed_ends import KEYS, Clients
from tests.scheduler.virtual_time import VirtualTimeLoop

PRODUCT = tuple(str(Path(__file__).parents[2] / name) for name in ("scheduler", "telemetry", "wire"))
NUM_REQUESTS = 8
MAX_CALLS = 10.0


async def calls_of(tokens: Tokens, num_tokens: int, **fields: Any) -> Counter[str]:
    """Return how often each function of the product was called for requests of `num_tokens` tokens."""
    calls = Counter[str]()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PRODUCT):
            calls[frame.f_code.co_qualname] += 1

    async with FakeCluster("PD", vocab_size=300, max_model_len=512, num_blocks=90).serving() as cluster:
        clients = Clients(cluster, tokens, random.Random(0))
        body = {"prompt": [1, 2, 3], "max_tokens": num_tokens, "ignore_eos": True, **fields}
        sys.setprofile(count)
        try:
            requested = [clients.begin("/v1/completions", body, KEYS[0]) for _ in range(NUM_REQUESTS)]
            await asyncio.wait([one.answering for one in requested])
        finally:
            sys.setprofile(None)
        assert {one.outcome for one in requested} <= {"streamed", "200"}
    return calls


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}], ids=str)
def test_a_token_costs_at_most_ten_calls(tokens: Tokens, fields: dict[str, Any]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        few, many = (runner.run(calls_of(tokens, count, **fields)) for count in (50, 150))
    per_token = {name: (many[name] - few[name]) / (100 * NUM_REQUESTS) for name in many}
    of_each = {
        name: calls for name, calls in per_token.items() if calls > 4 / NUM_REQUESTS
    }  # all others are called once per step

    assert sum(of_each.values()) <= MAX_CALLS, of_each
    assert of_each.keys() >= {"PromptRun.on_step", "TextOutput.emit", "Choice.push"}
