"""The table changes at random under load: each request succeeds once, where it began, and leaves nothing behind."""

import asyncio
import dataclasses
import random
from collections.abc import Sequence

import pytest

from scheduler.membership.compatibility import ExpectedInstance
from tests.scheduler.fake_cluster import FakeCluster, collect, expected, request
from tests.scheduler.test_chaos import ask, break_things, idle
from tests.scheduler.virtual_time import until, virtual
from wire.types import Role

NUM_REQUESTS = 100
MORE = [pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 20)]


def some_table(entries: Sequence[ExpectedInstance], rng: random.Random) -> list[ExpectedInstance]:
    """Return some instances in random order, at least one prefill and one decode instance.

    The last one sometimes changes its role: then it is another entry, at the same address.
    """
    kept = [entry for entry in entries if rng.random() < 0.6]
    for role in (Role.PREFILL, Role.DECODE):
        if not any(entry.role is role for entry in kept):
            kept.append(rng.choice([entry for entry in entries[:-1] if entry.role is role]))
    if kept[-1] is entries[-1] and len(kept) > 2 and rng.random() < 0.5:
        kept[-1] = dataclasses.replace(kept[-1], index=10, name="prefill-9", role=Role.PREFILL)
        if not any(entry.role is Role.DECODE for entry in kept):
            kept.append(next(entry for entry in entries if entry.role is Role.DECODE))
    rng.shuffle(kept)
    return kept


async def change_tables(cluster: FakeCluster, rng: random.Random) -> None:
    """For a while, use another table every few seconds, and the full one at the end."""
    for number in range(40):
        await asyncio.sleep(rng.random() * 2)
        cluster.control.registry.change(some_table(cluster.expected, rng), f"table {number}")
    cluster.control.registry.change(cluster.expected, "the last")


@pytest.mark.often("1")
@pytest.mark.parametrize("seed", [0, 1, *MORE])
@virtual
async def test_every_request_succeeds_on_the_instances_where_it_began(seed: int) -> None:
    rng = random.Random(seed)
    async with FakeCluster("PPDDD", probes=True).serving() as cluster:
        changing = asyncio.create_task(change_tables(cluster, rng))
        readers = []
        for _ in range(NUM_REQUESTS):
            prompt = tuple(rng.randrange(100) for _ in range(rng.randrange(1, 200)))
            requested = request(prompt, max_tokens=rng.randrange(1, 200))
            readers.append((prompt, asyncio.create_task(collect(cluster.control.dispatch, requested))))
            await asyncio.sleep(rng.random() * 0.3)
        await asyncio.gather(changing, *(reader for _, reader in readers))

        for prompt, reader in readers:
            tokens = reader.result().tokens[0, 0]
            assert tokens == expected(prompt, len(tokens))
        ledger = cluster.control.dispatch.ledger
        assert (ledger.received, ledger.completed, ledger.retried_prompts) == (NUM_REQUESTS, NUM_REQUESTS, 0)
        await check_settled(cluster)


@pytest.mark.parametrize("seed", [0, *MORE])
@virtual
async def test_instances_that_break_meanwhile_leave_nothing_behind_either(seed: int) -> None:
    rng = random.Random(seed)
    async with FakeCluster("PPDDD", probes=True).serving() as cluster:
        changing = asyncio.create_task(change_tables(cluster, rng))
        breaking = asyncio.create_task(break_things(cluster, rng))
        readers = []
        for _ in range(NUM_REQUESTS):
            prompt = tuple(rng.randrange(100) for _ in range(rng.randrange(1, 200)))
            pending = ask(cluster, prompt, rng.randrange(1, 60), leave=rng.random() < 0.3)
            readers.append((prompt, asyncio.create_task(pending)))
            await asyncio.sleep(rng.random() * 0.3)
        await asyncio.gather(changing, breaking, *(reader for _, reader in readers))

        for prompt, reader in readers:
            tokens = reader.result()
            assert tokens is None or tokens == expected(prompt, len(tokens))
        assert cluster.control.dispatch.ledger.completed > 20
        await check_settled(cluster)


async def check_settled(cluster: FakeCluster) -> None:
    """Return when all instances use the last table and hold nothing, and none is draining."""
    registry = cluster.control.registry
    await until(lambda: not registry.missing() and not registry.leaving, timeout_s=60.0)
    assert [member.expected for member in registry.members] == list(cluster.expected)
    await until(lambda: set(cluster.blocks_used) == {0}, timeout_s=60.0)
    await until(lambda: all(idle(instance) for instance in registry.living()))
    assert cluster.control.dispatch.ledger.inflight == 0
    assert cluster.control.dispatch.admission.num_waiting == 0
