"""The cluster is ready while a live path has had a hand-off recently; one test runs an hour of virtual time."""

import asyncio
import dataclasses
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.membership.kv_pairs import GapKind, KvGap, KvPairs
from scheduler.placement import Plan
from scheduler.readiness import Readiness
from scheduler.workers.proof import next_proofs
from tests.scheduler.fake_cluster import FakeCluster, collect, describe, request
from tests.scheduler.virtual_time import until, virtual
from wire.messages import Heartbeat, Reserve
from wire.types import Role


@virtual
async def test_a_probe_makes_an_idle_cluster_ready() -> None:
    async with FakeCluster("PD", probes=True).serving() as cluster:
        assert not cluster.control.ready()
        await until(cluster.control.ready, timeout_s=3.0)

        reserves = [c for c in cluster.instances[1].commands if isinstance(c, Reserve)]
        assert [c.prompt.probe for c in reserves] == [True]
        assert cluster.control.dispatch.ledger.received == 0
        await until(lambda: cluster.blocks_used == [0, 0])


@virtual
async def test_requests_count_as_crossings_and_replace_probes() -> None:
    async with FakeCluster("PD", probes=True).serving() as cluster:
        await until(cluster.control.ready)
        for _ in range(20):
            await collect(cluster.control.dispatch, request((1, 2, 3)))
            await asyncio.sleep(1.0)

        reserves = [c for c in cluster.instances[1].commands if isinstance(c, Reserve)]
        assert sum(c.prompt.probe for c in reserves) == 1


@virtual
async def test_every_living_pair_is_probed() -> None:
    async with FakeCluster("PPDDC", probes=True).serving() as cluster:
        await asyncio.sleep(4.0)

        assert cluster.control.readiness.due() == []
        assert len(cluster.control.readiness.living_plans()) == 5


@virtual
async def test_a_failed_probe_makes_it_unready_until_one_crosses_again() -> None:
    async with FakeCluster("PD", probes=True).serving() as cluster:
        await until(cluster.control.ready)
        cluster.instances[1].behaviour.refuse.extend(["InternalError"] * 2)
        await until(lambda: not cluster.control.ready(), timeout_s=8.0)
        await until(cluster.control.ready, timeout_s=8.0)


@virtual
async def test_no_path_is_not_ready_at_once() -> None:
    async with FakeCluster("PD", probes=True).serving() as cluster:
        await until(cluster.control.ready)
        cluster.kill(0)
        await asyncio.sleep(0.01)

        assert not cluster.control.ready()
        assert cluster.control.view().instances[0].state == "lost"


@virtual
async def test_a_replaced_process_is_not_ready_by_old_hand_offs() -> None:
    async with FakeCluster("PD").serving() as cluster:
        control, decode = cluster.control, cluster.expected[1].address
        await collect(control.dispatch, request((1, 2, 3)))
        cluster.network.kill(decode)
        await until(control.registry.missing)
        cluster.network.listen(decode, cluster.instances[1])
        await until(lambda: not control.registry.missing())
        assert control.ready(), "the process is the same, over another connection"

        cluster.kill(1)
        await until(control.registry.missing)
        cluster.boot(1, epoch=77)
        await until(lambda: not control.registry.missing())
        assert not control.ready()
        assert len(control.readiness.due()) == 1

        await collect(control.dispatch, request((1, 2, 3)))
        assert control.ready()


@pytest.mark.long
@virtual
async def test_an_hour_of_heartbeats_and_probes_with_a_hung_instance() -> None:
    loop = asyncio.get_running_loop()
    async with FakeCluster("PPD", probes=True).serving() as cluster:
        began = loop.time()
        await asyncio.sleep(1800.0)
        cluster.network.freeze(cluster.expected[0].address)
        await asyncio.sleep(900.0)
        assert cluster.control.view().instances[0].state == "lost"
        assert cluster.control.ready()
        cluster.network.thaw(cluster.expected[0].address)
        await asyncio.sleep(900.0)

        assert loop.time() - began == 3600.0
        assert cluster.control.ready()
        assert not cluster.control.registry.missing()
        assert cluster.blocks_used == [0, 0, 0]
        beats = sum(isinstance(c, Heartbeat) for c in cluster.instances[2].commands)
        assert 3500 <= beats <= 3700


@virtual
async def test_long_generations_that_fill_decode_do_not_make_it_unready() -> None:
    async with FakeCluster("PD", probes=True, max_num_seqs=100).serving() as cluster:
        await until(cluster.control.ready)
        cluster.instances[1].behaviour.step_s = 0.05
        prompts = [tuple(range(16)) for _ in range(64)]  # a block each: the whole pool
        reader = asyncio.create_task(
            collect(cluster.control.dispatch, request(*prompts, max_tokens=1000, limits_s=(99.0, 10.0)))
        )
        await until(lambda: cluster.blocks_used[1] == 64)
        for _ in range(40):
            assert cluster.control.ready()
            await asyncio.sleep(1.0)

        assert cluster.blocks_used[1] == 64
        assert all(len(tokens) == 1000 for tokens in (await reader).tokens.values())
        assert cluster.control.dispatch.ledger.completed == 1


@virtual
async def test_a_decode_instance_at_max_sequences_stays_ready() -> None:
    async with FakeCluster("PPD", probes=True, max_num_seqs=8).serving() as cluster:
        await until(cluster.control.ready)
        behaviour = cluster.instances[2].behaviour
        behaviour.step_s, behaviour.max_running = 0.05, 8
        prompts = [tuple(range(16)) for _ in range(8)]  # of 64 blocks
        reader = asyncio.create_task(
            collect(cluster.control.dispatch, request(*prompts, max_tokens=1000, limits_s=(99.0, 10.0)))
        )
        await until(lambda: cluster.blocks_used[2] == 8)
        for _ in range(80):
            assert cluster.control.ready()
            await asyncio.sleep(0.5)

        assert all(len(tokens) == 1000 for tokens in (await reader).tokens.values())


@virtual
async def test_a_busy_decode_instance_refusing_probes_stays_ready() -> None:
    async with FakeCluster("PD", probes=True).serving() as cluster:
        await until(cluster.control.ready)
        behaviour = cluster.instances[1].behaviour
        behaviour.step_s = 0.05
        reader = asyncio.create_task(
            collect(cluster.control.dispatch, request((1, 2, 3), max_tokens=900, limits_s=(99.0, 10.0)))
        )
        await until(lambda: cluster.blocks_used[1] == 1)
        cluster.instances[1].behaviour.refuse.extend(["NoCapacity"] * 1000)
        for _ in range(80):
            assert cluster.control.ready()
            await asyncio.sleep(0.5)

        assert len(behaviour.refuse) < 1000
        behaviour.refuse.clear()
        await reader


@virtual
async def test_an_idle_decode_instance_refusing_probes_is_not_ready() -> None:
    async with FakeCluster("PD", probes=True).serving() as cluster:
        await until(cluster.control.ready)
        cluster.instances[1].behaviour.refuse.extend(["NoCapacity"] * 1000)

        await until(lambda: not cluster.control.ready(), timeout_s=12.0)


@pytest.mark.parametrize("prefill_blocks", [63, 64])
@virtual
async def test_a_prompt_that_fills_a_pool_for_long_leaves_it_ready(prefill_blocks: int) -> None:
    cluster = FakeCluster("PD", probes=True)
    cluster.descriptions[0] = dataclasses.replace(cluster.descriptions[0], num_blocks=prefill_blocks)
    async with cluster.serving():
        await until(cluster.control.ready)
        cluster.instances[0].behaviour.step_s = 1.0
        long = tuple(range(16 * prefill_blocks))  # prefill's whole pool, and decode's of 64 too
        reader = asyncio.create_task(
            collect(cluster.control.dispatch, request(long, max_tokens=1, limits_s=(99.0, 10.0)))
        )
        while not reader.done():
            assert cluster.control.ready()
            await asyncio.sleep(0.5)

        assert reader.result().tokens


@virtual
async def test_a_full_decode_pool_without_progress_is_not_ready() -> None:
    async with FakeCluster("PD", probes=True, max_num_seqs=100, limits=ControlLimits(progress_s=999.0)).serving() as it:
        await until(it.control.ready)
        prompts = [tuple(range(16)) for _ in range(64)]
        reader = asyncio.create_task(
            collect(it.control.dispatch, request(*prompts, max_tokens=1000, limits_s=(99.0, 99.0)))
        )
        await until(lambda: it.blocks_used[1] == 64)
        it.instances[1].get_stuck()

        await until(lambda: not it.control.ready(), timeout_s=12.0)
        assert it.control.view().instances[1].state == "living"
        it.instances[1].get_unstuck()
        await until(it.control.ready, timeout_s=60.0)
        await reader


@virtual
async def test_probes_leave_nothing_in_the_ledger() -> None:
    async with FakeCluster("PDC", probes=True).serving() as cluster:
        registry = cluster.control.registry
        await until(lambda: sum(isinstance(c, Reserve) for c in cluster.instances[1].commands) >= 3, timeout_s=60.0)
        await until(lambda: cluster.blocks_used == [0, 0, 0])

        for instance in registry.living():
            assert instance.in_flight._prefixes._running == {}
            assert not instance.in_flight.prompt_ids


def _unproven(num_prefill: int, num_decode: int) -> list[KvGap]:
    pairs = itertools.product(range(num_prefill), range(100, 100 + num_decode))
    return [KvGap(sender, receiver, "", GapKind.UNPROVEN) for sender, receiver in pairs]


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(30, 30), (2, 30), (30, 1), (1, 1)])
def test_proofs_run_one_for_each_worker_and_reach_every_worker_first(num_prefill: int, num_decode: int) -> None:
    unproven, proven, rounds = _unproven(num_prefill, num_decode), list[KvGap](), 0
    most, rarer = max(num_prefill, num_decode), min(num_prefill, num_decode)
    while unproven:
        started = next_proofs(unproven, ())
        ends = [end for gap in started for end in (gap.sender, gap.receiver)]
        assert len(ends) == len(set(ends))
        assert 0 < len(started) <= 8
        unproven = [gap for gap in unproven if gap not in started]
        proven += started
        rounds += 1
        if rounds == math.ceil(most / min(8, rarer)):
            assert {gap.sender for gap in proven} | {gap.receiver for gap in proven} == {
                *range(num_prefill), *range(100, 100 + num_decode)
            }  # fmt: skip

    assert len(proven) == num_prefill * num_decode


def test_proofs_fill_what_others_leave_and_failed_pairs_come_last() -> None:
    unproven = _unproven(12, 12)
    failed = [replace(gap, kind=GapKind.DISPROVEN) for gap in unproven if gap.sender == 0]
    running = next_proofs(unproven, ())

    assert next_proofs(unproven, running) == []
    assert [gap.sender for gap in next_proofs([*failed, *unproven[12:]], running[1:])] == [8]
    assert [gap.sender for gap in next_proofs(failed, running[1:])] == [0]


def _accept(pairs: KvPairs, *indices: int) -> None:
    """Accept new processes of a prefill worker, 0, and a decode worker, 100."""
    for index in indices:
        role = Role.DECODE if index else Role.PREFILL
        pairs.add(ExpectedInstance(index, str(role), role, "http://h:1", "h", ()), describe(index, role))


@virtual
@pytest.mark.parametrize("leaves", [False, True])
async def test_failures_of_a_pair_are_not_those_of_a_later_worker(leaves: bool) -> None:
    plan, pairs = Plan("prefill_first", 0, 100, "proof"), KvPairs()
    lives = [SimpleNamespace(index=at, description=SimpleNamespace(epoch=at)) for at in (0, 100)]
    registry: Any = SimpleNamespace(
        kv_pairs=pairs, living=lambda: lives, confirm_ready=lambda: None, changed=lambda: None
    )
    readiness = Readiness(registry, ControlLimits())
    _accept(pairs, 0, 100)
    pairs.prove(0, 100)

    readiness.note_failure(plan)
    if leaves:
        pairs.forget(100)
    _accept(pairs, 100)
    pairs.prove(0, 100)
    readiness.note_failure(plan)
    assert pairs.gap(0, 100) is None
    readiness.note_failure(plan)
    assert pairs.gap(0, 100) is not None


@virtual
async def test_a_failed_pair_is_tried_again_later_and_not_remembered_longer() -> None:
    epochs, plan, pairs = itertools.count(), Plan("prefill_first", 0, 100, "proof"), KvPairs()
    registry: Any = SimpleNamespace(kv_pairs=pairs, gaps=lambda: pairs.gaps({0, 100}), living=list)
    readiness = Readiness(registry, ControlLimits())
    _accept(pairs, 0, 100)
    for _ in range(20):  # a worker that starts again and again
        lives = [SimpleNamespace(index=at, description=SimpleNamespace(epoch=next(epochs))) for at in (0, 100)]
        registry.living = lambda lives=lives: lives
        assert len(readiness.unproven()) == 1
        readiness.set_proof(plan, "another answer")
        assert readiness.unproven() == []
        await asyncio.sleep(1.0)

    assert len(readiness._tried_at) <= 1 + ControlLimits().refused_retry_s
    await asyncio.sleep(ControlLimits().refused_retry_s)
    assert len(readiness.unproven()) == 1
    assert readiness._tried_at == {}


@pytest.mark.parametrize("roles", ["PD", "PPPDDD"])
@virtual
async def test_ready_walks_the_members_alike_for_any_number_of_pairs(roles: str) -> None:
    async with FakeCluster(roles, probes=True).serving() as cluster:
        await asyncio.sleep(4.0)
        registry, walks = cluster.control.registry, list[int]()
        living = registry.living

        def counted() -> list[Any]:
            walks.append(1)
            return living()

        registry.living = counted  # type: ignore[method-assign]
        assert cluster.control.readiness.ready()
        assert cluster.control.readiness.own_plan() is not None
        assert len(walks) <= 7
