"""Several schedulers on the same instances: each has its own queue and ledger, and only instances know all prompts."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar

import pytest

from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.role_changes import change_role
from simulation.instance import SimulatedInstance
from simulation.session import SimulatedSession
from tests.scheduler.fake_cluster import Answer, FakeCluster, Running, collect, control_over, expected, request
from tests.scheduler.virtual_time import until, virtual
from wire.errors import InvalidRequest
from wire.messages import Command, Prefill
from wire.types import Role

PROMPT = tuple(range(20))


class Counting(SimulatedInstance):
    """Counts its refusals by error, and checks at each command that reservations have no block twice."""

    refusals: ClassVar[Counter[str]] = Counter()
    refuses_prefill = False

    def _handle(self, session: SimulatedSession, command: Command) -> None:
        if isinstance(command, Prefill) and self.refuses_prefill and not command.prompt.probe:
            self.refuses_prefill = False
            self._refuse(session, command.prompt.prompt_id, "NoCapacity", "2 finished prompts wait for their receivers")
            return
        super()._handle(session, command)
        if self.description.role is Role.DECODE:  # on the other a prompt waits for blocks in the engine's queue
            assert self.blocks_used <= self.description.num_blocks

    def _refuse(self, session: SimulatedSession, prompt_id: str, error: str, message: str) -> None:
        self.refusals[error] += 1
        super()._refuse(session, prompt_id, error, message)


@asynccontextmanager
async def second_scheduler(cluster: FakeCluster, *, probes: bool = False) -> AsyncIterator[Control]:
    """Run a second control plane over the cluster's instances."""
    second = control_over(cluster.expected, cluster.network.connect, ControlLimits(), scheduler_id="t")
    running = asyncio.create_task(second.run() if probes else second.registry.run())
    try:
        await until(lambda: not second.registry.missing())
        yield second
    finally:
        await second.dispatch.close(0.0)
        running.cancel()
        await asyncio.wait({running}, timeout=10.0)


def counting(roles: str, **changes: Any) -> FakeCluster:
    Counting.refusals = Counter()
    cluster = FakeCluster(roles, **changes)
    cluster.kind = Counting
    return cluster


def tokens_of(answer: Answer) -> list[int | None]:
    return [token.token_id for token in answer.outputs[0, 0]]


@virtual
async def test_the_end_of_a_scheduler_is_no_event_for_the_others() -> None:
    async with FakeCluster("PD").serving() as cluster:
        async with second_scheduler(cluster) as second:
            running = Running(cluster.control.dispatch, request(PROMPT, max_tokens=100))
            other = asyncio.create_task(collect(second.dispatch, request(PROMPT, max_tokens=400)))
            await until(lambda: len(running.outputs.get((0, 0), ())) > 10)
            alone = 2
            assert cluster.blocks_used[1] > alone
            other.cancel()
        await until(lambda: cluster.blocks_used[1] == alone)
        await running.task

        assert tokens_of(running) == expected(PROMPT, 100)
        assert cluster.control.dispatch.ledger.retried_prompts == 0
        assert cluster.blocks_used == [0, 0]


@pytest.mark.parametrize("roles", ["PD", "PPDD"])
@virtual
async def test_reservations_that_race_for_blocks_wait_and_succeed(roles: str) -> None:
    async with counting(roles, num_blocks=6).serving() as cluster, second_scheduler(cluster) as second:
        prompts = [tuple(range(i, i + 20 + i % 40)) for i in range(60)]
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(collect(control.dispatch, request(prompt, limits_s=(300.0, 300.0))))
                for prompt in prompts
                for control in (cluster.control, second)
            ]
        await until(lambda: set(cluster.blocks_used) == {0})

        assert [tokens_of(one.result()) for one in running] == [expected(p, 4) for p in prompts for _ in range(2)]
        assert set(Counting.refusals) == {"NoCapacity"}, "the pools are too large for a race"
        assert [one.dispatch.ledger.retried_prompts for one in (cluster.control, second)] == [0, 0]


@virtual
async def test_a_prefill_that_loses_the_race_is_placed_again() -> None:
    async with counting("PD").serving() as cluster, second_scheduler(cluster) as second:
        prefill = cluster.instances[0]
        assert isinstance(prefill, Counting)
        prefill.refuses_prefill = True
        answers = await asyncio.gather(*(collect(one.dispatch, request(PROMPT)) for one in (cluster.control, second)))

        assert [tokens_of(answer) for answer in answers] == [expected(PROMPT, 4)] * 2
        assert Counting.refusals == {"NoCapacity": 1}
        await until(lambda: cluster.blocks_used == [0, 0])


@virtual
async def test_a_scheduler_that_keeps_the_pool_full_starves_no_other() -> None:
    async with counting("PD", num_blocks=6).serving() as cluster, second_scheduler(cluster) as second:
        loop, numbers = asyncio.get_running_loop(), count()

        async def keep_asking() -> None:
            while True:
                prompt = tuple(range(next(numbers) % 50, 90))[:40]
                await collect(cluster.control.dispatch, request(prompt, max_tokens=10, limits_s=(300.0, 300.0)))

        busy = [asyncio.create_task(keep_asking()) for _ in range(30)]
        await asyncio.sleep(5.0)
        waits = []
        for _ in range(20):
            began = loop.time()
            await collect(second.dispatch, request(PROMPT, limits_s=(300.0, 300.0)))
            waits.append(loop.time() - began)
            assert cluster.control.dispatch.admission.num_waiting > 20
        for task in busy:
            task.cancel()

        assert max(waits) < 10.0, waits


@virtual
async def test_both_schedulers_stay_ready_by_their_own_probes() -> None:
    async with FakeCluster("PPDD", probes=True).serving() as cluster, second_scheduler(cluster, probes=True) as second:
        await until(lambda: cluster.control.ready() and second.ready())
        for _ in range(60):
            await asyncio.sleep(1.0)
            assert cluster.control.ready()
            assert second.ready()


@virtual
async def test_a_change_of_role_reaches_the_other_scheduler() -> None:
    async with FakeCluster("PDD").serving() as cluster, second_scheduler(cluster) as second:
        await change_role(cluster.control.registry, "decode-1", Role.PREFILL)
        await until(lambda: second.registry.members[2].role is Role.PREFILL)
        with pytest.raises(InvalidRequest):
            await change_role(second.registry, "decode-0", Role.PREFILL)
        await change_role(second.registry, "decode-1", Role.DECODE)
        await until(lambda: cluster.control.registry.members[2].role is Role.DECODE)
        answers = await asyncio.gather(*(collect(one.dispatch, request(PROMPT)) for one in (cluster.control, second)))
        assert [tokens_of(answer) for answer in answers] == [expected(PROMPT, 4)] * 2


async def served_for(seconds: float, loads: list[tuple[Control, str]]) -> Counter[str]:
    """Return how many requests each key had served, with 20 at once always requested at each of these schedulers."""
    served = Counter[str]()

    async def keep_asking(control: Control, tenant: str) -> None:
        while True:
            one = replace(request(PROMPT, max_tokens=10, limits_s=(600.0, 600.0)), tenant=tenant)
            await collect(control.dispatch, one)
            served[tenant] += 1

    busy = [asyncio.create_task(keep_asking(control, tenant)) for control, tenant in loads for _ in range(20)]
    await asyncio.sleep(seconds)
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    return served


@virtual
async def test_shares_of_keys_are_exact_only_within_a_scheduler() -> None:
    limits = ControlLimits(num_tenants=2)
    async with FakeCluster("PD", num_blocks=8, limits=limits).serving() as cluster, second_scheduler(cluster) as second:
        first = cluster.control
        alone = await served_for(10.0, [(first, "a"), (first, "b")])
        spread = await served_for(10.0, [(one, key) for one in (first, second) for key in "ab"])
        uneven = await served_for(10.0, [(first, "a"), (second, "a"), (second, "b")])

        shares = [counts["b"] / counts.total() for counts in (alone, spread, uneven)]
        assert shares == pytest.approx([1 / 2, 1 / 2, 1 / 4], abs=0.02)
