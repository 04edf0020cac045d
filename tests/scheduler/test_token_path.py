"""The path of a token through the scheduler, from an instance's session to the client's bytes, is short."""

import asyncio
import gc
import random
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from scheduler.tokens import Tokens
from simulation.virtual_time import VirtualTimeLoop
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.mixed_ends import KEYS, Clients
from tests.scheduler.worker_cluster import WorkerCluster

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


async def garbage_of(cluster: FakeCluster | WorkerCluster, tokens: Tokens, **fields: Any) -> Counter[str]:
    """Return the scheduler's objects that requests leave to the garbage collector, by type."""
    async with cluster.serving():
        clients = Clients(cluster, tokens, random.Random(0))
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            body = {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True, **fields}
            requested = [clients.begin("/v1/completions", body, KEYS[0]) for _ in range(NUM_REQUESTS)]
            await asyncio.wait([one.answering for one in requested])
            assert {one.outcome for one in requested} <= {"streamed", "200"}
            del requested
            gc.collect()
            return Counter(type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("scheduler"))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


@pytest.mark.parametrize("workers", [False, True], ids=["instances", "workers"])
@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}], ids=str)
def test_a_request_is_freed_without_the_garbage_collector(
    tokens: Tokens, fields: dict[str, Any], workers: bool
) -> None:
    """A collection of what hundreds of requests left would hold up every stream for tens of milliseconds."""
    cluster = WorkerCluster("PD") if workers else FakeCluster("PD", vocab_size=300, max_model_len=512)
    with asyncio.Runner() as runner:
        assert runner.run(garbage_of(cluster, tokens, **fields)) == {}
