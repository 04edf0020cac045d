"""Hundreds of requests with every possible outcome, over instances that break: all gauges return to zero."""

import asyncio
import dataclasses
import logging
import random
from collections import Counter
from typing import Any

import pytest

from scheduler.limits import ControlLimits
from scheduler.load.loads import InstanceLoad
from scheduler.tokens import Tokens
from tests.scheduler.fake_cluster import FakeCluster
from tests.scheduler.mixed_ends import Clients, left_behind
from tests.scheduler.test_chaos import break_things
from tests.scheduler.virtual_time import until, virtual

NUM_REQUESTS = 400
LIMITS = ControlLimits(max_queued_requests=12, num_tenants=3, min_retries=1)
MORE = [pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 12)]


def _tasks() -> Counter[str]:
    coroutines = [task.get_coro() for task in asyncio.all_tasks()]
    return Counter(getattr(one, "__qualname__", type(one).__name__) for one in coroutines)


def _stale_loads(cluster: FakeCluster) -> list[InstanceLoad]:
    """Return the kept loads of placement that are not the current ones."""
    registry = cluster.control.registry
    kept = [dataclasses.replace(load, no_transport_to=()) for load in registry.loads()]
    return [load for load, one in zip(kept, registry.living(), strict=True) if load != one.new_placement_load()]


@pytest.mark.often("0")
@pytest.mark.parametrize("seed", [0, 1, *MORE])
@virtual
async def test_every_gauge_is_zero_once_all_requests_have_ended(
    seed: int, tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "pdserve")
    rng, unseen = random.Random(seed), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    cluster = FakeCluster(
        "PPDDC", limits=LIMITS, probes=True, vocab_size=300, max_model_len=512, num_blocks=30, prefill_chunk_size=64
    )
    async with cluster.serving():
        await until(cluster.control.ready)
        clients, before = Clients(cluster, tokens, rng, 0.2 if seed % 2 else None), _tasks()
        breaking = asyncio.create_task(break_things(cluster, rng))
        requests = []
        for _ in range(NUM_REQUESTS):
            requests.append(asyncio.create_task(clients.ask()))
            assert not _stale_loads(cluster)
            await asyncio.sleep(0.0 if rng.random() < 0.95 else 3.0 * rng.random())  # in bursts, longer than the queue
        await asyncio.gather(*requests)
        await breaking
        await until(lambda: not cluster.control.registry.missing(), timeout_s=60.0)
        await until(lambda: not left_behind(cluster), timeout_s=60.0)

        counters, ledger = clients.context.metrics.counters, cluster.control.dispatch.ledger
        assert clients.outcomes.total() == sum(counters.http.values()) == NUM_REQUESTS
        assert clients.context.drain.active == 0
        assert ledger.received == ledger.completed + ledger.failed + ledger.cancelled
        assert {"200", "streamed", "gone", "400", "401", "429"} <= set(clients.outcomes), clients.outcomes
        assert "cut short" not in clients.outcomes
        await until(lambda: _tasks() == before)
    assert unseen == []
    assert [record.getMessage() for record in caplog.records] == []


@virtual
async def test_requests_ended_by_a_shutdown_leave_nothing_behind_either(tokens: Tokens) -> None:
    rng = random.Random(5)
    async with FakeCluster(
        "PPDDC", limits=LIMITS, vocab_size=300, max_model_len=512, num_blocks=30
    ).serving() as cluster:
        clients = Clients(cluster, tokens, rng)
        requests = [asyncio.create_task(clients.ask()) for _ in range(60)]
        await until(lambda: cluster.control.dispatch.ledger.received > 8)
        await asyncio.sleep(0.02)
        await cluster.control.dispatch.close(0.0)
        await asyncio.gather(*requests)

        await until(lambda: not left_behind(cluster))
        assert cluster.control.dispatch.ledger.cancelled > 0
        assert clients.outcomes["503"] + clients.outcomes["failed in the stream"] > 0
