"""Instances die, freeze, get stuck and return while requests run: each request ends once and leaves nothing behind."""

import asyncio
import random

import pytest

from scheduler.instances import Instance
from tests.scheduler.fake_cluster import FakeCluster, collect, expected, request
from tests.scheduler.virtual_time import until, virtual
from wire.errors import PdserveError


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 8))])
@virtual
async def test_every_request_ends_once_whatever_the_instances_do(seed: int) -> None:
    rng = random.Random(seed)
    async with FakeCluster("PPDDC", probes=True).serving() as cluster:
        breaking = asyncio.create_task(break_things(cluster, rng))
        readers: list[tuple[tuple[int, ...], asyncio.Task[list[int] | None]]] = []
        for _ in range(300):
            prompt = tuple(rng.randrange(100) for _ in range(rng.randrange(1, 200)))
            pending = ask(cluster, prompt, rng.randrange(1, 60), leave=rng.random() < 0.3)
            readers.append((prompt, asyncio.create_task(pending)))
            await asyncio.sleep(rng.random() * 0.3)
        await asyncio.wait([reader for _, reader in readers])
        await breaking
        await until(lambda: not cluster.control.registry.missing(), timeout_s=60.0)
        await until(lambda: set(cluster.blocks_used) == {0}, timeout_s=60.0)

        for prompt, reader in readers:
            tokens = reader.result()
            assert tokens is None or tokens == expected(prompt, len(tokens))
        ledger = cluster.control.dispatch.ledger
        assert ledger.inflight == 0
        assert ledger.completed > 50
        assert ledger.received + ledger.rejected == 300
        assert cluster.control.dispatch.admission.num_waiting == 0
        await until(lambda: all(idle(instance) for instance in cluster.control.registry.living()))


def idle(instance: Instance) -> bool:
    """Whether the ledger has nothing of ours on the instance."""
    ledger = instance.in_flight
    counted = (ledger.outstanding_tokens, ledger.sequences, ledger.blocks_free) == (0, 0, ledger.load.blocks_total)
    return counted and not ledger.prompt_ids and not ledger._prefixes._running


async def ask(cluster: FakeCluster, prompt: tuple[int, ...], max_tokens: int, *, leave: bool) -> list[int] | None:
    """Return the tokens of an answer, None where it failed with a message or the client disconnected."""
    try:
        async with asyncio.timeout(0.2 if leave else 3600.0):
            requested = request(prompt, max_tokens=max_tokens)
            return (await collect(cluster.control.dispatch, requested)).tokens[0, 0]
    except (PdserveError, TimeoutError):
        return None


async def break_things(cluster: FakeCluster, rng: random.Random) -> None:
    """For a while, break a random instance and repair it later."""
    for _ in range(12):
        await asyncio.sleep(rng.random() * 4)
        index = rng.randrange(5)
        match rng.randrange(4):
            case 0:
                cluster.kill(index)
                await asyncio.sleep(rng.random() * 3)
                cluster.boot(index, epoch=rng.randrange(10**6))
            case 1:
                cluster.network.freeze(cluster.expected[index].address)
                await asyncio.sleep(rng.random() * 15)
                cluster.network.thaw(cluster.expected[index].address)
            case 2:
                cluster.instances[index].get_stuck()
                await asyncio.sleep(rng.random() * 15)
                cluster.instances[index].get_unstuck()
            case _:
                cluster.instances[index].behaviour.fail_handoffs += 3
