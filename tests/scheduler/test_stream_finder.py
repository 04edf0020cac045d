"""A stream outlives its scheduler: another one adopts it, and an owner that was away gets it back, or ends its own."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from scheduler.adoption import Adoption
from scheduler.control import Control
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.request import GenerationRequest
from testing.wire.fake_network import FakeNetwork
from tests.scheduler.fake_cluster import Answer, FakeCluster, Running, control_over, expected, request
from tests.scheduler.virtual_time import until, virtual
from wire.errors import StreamMoved, Unavailable, UnknownStream
from wire.messages import Prefill, Reserve
from wire.types import ResumableStream, Role

PROMPT = tuple(range(20))
ID, TENANT = "5" * 32, "key-1"
ORPHAN_S = 10.0
STREAM = dataclasses.replace(request(PROMPT, max_tokens=30), stream=ResumableStream(ID, TENANT, b"POST"))


@dataclasses.dataclass
class Owner:
    """The scheduler that begins the stream, with connections of its own."""

    control: Control
    network: FakeNetwork
    task: "asyncio.Task[None]"

    def die(self) -> None:
        """Simulate kill -9: nothing more is sent, and its connections close."""
        self.task.cancel()

    async def begun(self, num_tokens: int, requested: GenerationRequest = STREAM) -> Running:
        """Return the stream once it has so many tokens."""
        running = Running(self.control.dispatch, requested)
        await until(lambda: len(running.outputs.get((0, 0), ())) >= num_tokens)
        return running


@asynccontextmanager
async def two_schedulers(roles: str) -> AsyncIterator[tuple[FakeCluster, Owner]]:
    """Run the scheduler that adopts, as the cluster's own, and the one that owns the stream."""
    limits = ControlLimits(orphan_s=ORPHAN_S)
    async with FakeCluster(roles, limits=limits).serving() as cluster:
        network = FakeNetwork()
        for instance, entry in zip(cluster.instances, cluster.expected, strict=True):
            network.listen(entry.address, instance)
        control = control_over(cluster.expected, network.connect, limits, scheduler_id="owner")
        owner = Owner(control, network, asyncio.create_task(control.registry.run()))
        try:
            await until(lambda: not control.registry.missing())
            yield cluster, owner
        finally:
            await control.dispatch.close(0.0)
            owner.die()
            await asyncio.wait({owner.task}, timeout=10.0)


async def adopted(cluster: FakeCluster) -> Adoption:
    return await cluster.control.dispatch.adopt(ID, TENANT)


async def resumed(cluster: FakeCluster) -> Answer:
    """Adopt the stream and run it to its end."""
    answer = Answer()
    adoption = await adopted(cluster)
    assert adoption.prompt.token_ids == PROMPT
    await cluster.control.dispatch.resume(adoption, STREAM, answer)
    return answer


async def assert_clean(cluster: FakeCluster) -> None:
    """Assert that no instance keeps anything once the last release is due."""
    await asyncio.sleep(ORPHAN_S + 0.1)
    assert [list(instance.prompts) for instance in cluster.instances] == [[] for _ in cluster.instances]


def longer(max_tokens: int) -> GenerationRequest:
    return dataclasses.replace(STREAM, params=dataclasses.replace(STREAM.params, max_tokens=max_tokens))


def tokens_of(answer: Answer) -> list[int | None]:
    return [token.token_id for token in answer.outputs[0, 0]]


def count(cluster: FakeCluster, kind: type) -> int:
    return sum(isinstance(command, kind) for instance in cluster.instances for command in instance.commands)


@pytest.mark.parametrize("num_tokens", [1, 2, 29])
@pytest.mark.parametrize("roles", ["PD", "C"])
@virtual
async def test_the_stream_of_a_dead_scheduler_is_adopted_whole(roles: str, num_tokens: int) -> None:
    async with two_schedulers(roles) as (cluster, owner):
        await owner.begun(num_tokens)
        owner.die()
        answer = await resumed(cluster)

        assert tokens_of(answer) == expected(PROMPT, 30)
        assert answer.done[0].path == "adopted"
        assert (count(cluster, Reserve), count(cluster, Prefill)) == ((1, 1) if roles == "PD" else (0, 0))
        await assert_clean(cluster)


@virtual
async def test_a_stream_that_ended_just_before_is_adopted_too() -> None:
    async with two_schedulers("PD") as (cluster, owner):
        running = await owner.begun(1)
        await running.task
        assert cluster.blocks_used == [0, 0]
        answer = await resumed(cluster)

        assert tokens_of(answer) == expected(PROMPT, 30)
        await assert_clean(cluster)
        with pytest.raises(UnknownStream):
            await adopted(cluster)


@virtual
async def test_an_owner_that_lives_ends_its_request() -> None:
    async with two_schedulers("PD") as (cluster, owner):
        running = await owner.begun(5)
        answer = await resumed(cluster)
        with pytest.raises(StreamMoved, match="another scheduler continues the stream"):
            await running.task

        assert tokens_of(answer) == expected(PROMPT, 30)
        assert owner.control.dispatch.ledger.retried_prompts == 0
        await assert_clean(cluster)


@virtual
async def test_one_scheduler_adopts_its_own_stream_for_a_new_request() -> None:
    async with two_schedulers("PD") as (cluster, owner):
        running = await owner.begun(5)
        answer = Answer()
        adoption = await owner.control.dispatch.adopt(ID, TENANT)
        await owner.control.dispatch.resume(adoption, STREAM, answer)
        with pytest.raises(StreamMoved):
            await running.task

        assert tokens_of(answer) == expected(PROMPT, 30)
        await assert_clean(cluster)


@virtual
async def test_an_owner_whose_connection_broke_gets_its_stream_back() -> None:
    async with two_schedulers("PD") as (cluster, owner):
        running = await owner.begun(5, longer(200))
        for _ in range(3):
            owner.network.reset(cluster.expected[1].address)
            num_tokens = len(running.outputs[0, 0])
            await until(lambda at=num_tokens: len(running.outputs[0, 0]) > at)  # type: ignore[misc]
        await running.task

        assert tokens_of(running) == expected(PROMPT, 200)
        assert (count(cluster, Reserve), owner.control.dispatch.ledger.retried_prompts) == (1, 0)
        await assert_clean(cluster)


@virtual
async def test_an_owner_that_was_away_ends_its_request_if_it_moved() -> None:
    async with two_schedulers("PD") as (cluster, owner):
        running = await owner.begun(5)
        owner.network.reset(cluster.expected[1].address)
        answer = await resumed(cluster)
        with pytest.raises(StreamMoved, match="the stream is no longer its own"):
            await running.task

        assert tokens_of(answer) == expected(PROMPT, 30)
        assert count(cluster, Reserve) == 1
        await assert_clean(cluster)


@pytest.mark.parametrize("returns", [True, False])
@virtual
async def test_a_stream_whose_instance_died_is_generated_elsewhere(returns: bool) -> None:
    async with two_schedulers("PDD") as (cluster, owner):
        running = await owner.begun(5)
        decode = next(i for i in (1, 2) if cluster.instances[i].prompts)
        owner.network.kill(cluster.expected[decode].address)
        cluster.kill(decode)
        if returns:
            owner.network.listen(cluster.expected[decode].address, cluster.boot(decode, epoch=99))
        await running.task

        assert tokens_of(running) == expected(PROMPT, 30)
        assert owner.control.dispatch.ledger.retried_prompts == 1


@virtual
async def test_an_adopted_stream_survives_its_instance_too() -> None:
    async with two_schedulers("PDD") as (cluster, owner):
        await owner.begun(5)
        decode = next(i for i in (1, 2) if cluster.instances[i].prompts)
        owner.die()
        answer = Answer()
        adoption = await adopted(cluster)
        running = asyncio.create_task(cluster.control.dispatch.resume(adoption, STREAM, answer))
        await until(lambda: (0, 0) in answer.outputs)
        cluster.kill(decode)
        await running

        assert tokens_of(answer) == expected(PROMPT, 30)
        retried = [c.prompt.stream for one in cluster.instances for c in one.commands if isinstance(c, Reserve)][-1]
        assert retried == ResumableStream(ID, TENANT, b"POST", 2)
        await assert_clean(cluster)


@virtual
async def test_of_two_copies_the_newest_is_adopted() -> None:
    async with two_schedulers("PDD") as (cluster, owner):
        running = await owner.begun(5, longer(600))
        decode = next(i for i in (1, 2) if cluster.instances[i].prompts)
        owner.network.kill(cluster.expected[decode].address)  # only the owner cannot reach it
        await until(lambda: cluster.instances[3 - decode].prompts)
        num_tokens = len(running.outputs[0, 0])
        await until(lambda: len(running.outputs[0, 0]) > num_tokens)
        owner.die()
        adoption = await adopted(cluster)

        assert adoption.instance.index == 3 - decode
        assert adoption.stream.owner_epoch == 2
        await until(lambda: not cluster.instances[decode].prompts)
        adoption.release()
        await assert_clean(cluster)


@pytest.mark.parametrize("ends", ["dispatch", "release"])
@virtual
async def test_the_end_of_an_adopted_request_ends_the_stream(ends: str) -> None:
    async with two_schedulers("PD") as (cluster, owner):
        await owner.begun(5)
        owner.die()
        adoption = await adopted(cluster)
        if ends == "release":
            adoption.release()
        else:
            answer = Answer()
            running = asyncio.create_task(cluster.control.dispatch.resume(adoption, STREAM, answer))
            await until(lambda: (0, 0) in answer.outputs)
            running.cancel()
        await until(lambda: cluster.blocks_used == [0, 0])
        await assert_clean(cluster)


def unknown_id(cluster: FakeCluster) -> tuple[str, str]:
    return "6" * 32, TENANT


def other_key(cluster: FakeCluster) -> tuple[str, str]:
    return ID, "key-2"


def unreachable_instance(cluster: FakeCluster) -> tuple[str, str]:
    cluster.kill(2)
    return "6" * 32, TENANT


@pytest.mark.parametrize(
    ("find", "error"),
    [(unknown_id, UnknownStream), (other_key, UnknownStream), (unreachable_instance, Unavailable)],
)
@virtual
async def test_what_cannot_be_adopted_has_a_reason(
    find: Callable[[FakeCluster], tuple[str, str]], error: type[Exception]
) -> None:
    async with two_schedulers("PDD") as (cluster, owner):
        running = await owner.begun(5)
        asked = find(cluster)
        await asyncio.sleep(0.05)
        with pytest.raises(error):
            await cluster.control.dispatch.adopt(*asked)
        running.task.cancel()


def test_workers_of_other_engines_keep_no_streams() -> None:
    worker = ExpectedInstance(0, "combined-0", Role.COMBINED, "http://127.0.0.1:1", "127.0.0.1", ())

    async def check() -> None:
        control = control_over([worker], FakeNetwork().connect, ControlLimits())
        assert control.dispatch.has_workers

    asyncio.run(check())


@virtual
async def test_a_kept_stream_begins_once_it_can_be_adopted() -> None:
    async with two_schedulers("PD") as (cluster, owner):
        cluster.instances[0].behaviour.send_s = 0.5
        alone = Running(owner.control.dispatch, dataclasses.replace(STREAM, stream=None))
        kept = await owner.begun(1)

        assert len(alone.outputs[0, 0]) >= 1
        assert cluster.instances[1].prompts["owner.1"].stage == "decoding"
        await asyncio.gather(alone.task, kept.task)
        assert tokens_of(kept) == expected(PROMPT, 30)


@virtual
async def test_a_kept_answer_of_one_token_needs_no_hand_off() -> None:
    stop = dataclasses.replace(STREAM.params, stop_token_ids=tuple(expected(PROMPT, 1)))
    async with two_schedulers("PD") as (cluster, owner):
        running = await owner.begun(1, dataclasses.replace(STREAM, params=stop))
        await running.task

        assert tokens_of(running) == expected(PROMPT, 1)
        await assert_clean(cluster)


@pytest.mark.parametrize("send_s", [0.5, 5.0])
@virtual
async def test_a_stream_on_its_way_is_awaited(send_s: float) -> None:
    async with two_schedulers("PDD") as (cluster, owner):
        running = await owner.begun(5)
        decode = next(i for i in (1, 2) if cluster.instances[i].prompts)
        cluster.instances[0].behaviour.send_s = send_s
        owner.network.kill(cluster.expected[decode].address)
        cluster.kill(decode)
        await until(lambda: cluster.instances[3 - decode].prompts)
        cluster.control.registry.change([one for one in cluster.expected if one.index != decode], "without it")
        if send_s < owner.control.dispatch._limits.settle_s:
            assert tokens_of(await resumed(cluster)) == expected(PROMPT, 30)
            with pytest.raises(StreamMoved):
                await running.task
            await assert_clean(cluster)
        else:
            with pytest.raises(Unavailable, match="still being handed off"):
                await adopted(cluster)
            await running.task


@virtual
async def test_two_requests_for_a_stream_at_once_do_not_end_it() -> None:
    async with two_schedulers("PD") as (cluster, owner):
        await owner.begun(5)
        owner.die()
        adoption, refused = await asyncio.gather(adopted(cluster), adopted(cluster), return_exceptions=True)

        assert isinstance(adoption, Adoption)
        assert isinstance(refused, Unavailable)
        assert tokens_of(await resumed(cluster)) == expected(PROMPT, 30)
        await assert_clean(cluster)


@virtual
async def test_an_answer_that_is_late_leaves_the_stream_to_the_next_request() -> None:
    async with two_schedulers("PD") as (cluster, owner):
        await owner.begun(5)
        owner.die()
        cluster.network.freeze(cluster.expected[1].address)
        with pytest.raises(Unavailable, match="1 of 2 instances have answered"):
            await adopted(cluster)
        cluster.network.thaw(cluster.expected[1].address)
        await asyncio.sleep(1.0)

        assert tokens_of(await resumed(cluster)) == expected(PROMPT, 30)
        await assert_clean(cluster)


@virtual
async def test_an_adopted_stream_without_a_request_is_released_in_time() -> None:
    async with two_schedulers("PD") as (cluster, owner):
        cluster.instances[1].behaviour.step_s = 0.05
        await owner.begun(5, longer(500))
        owner.die()
        await adopted(cluster)
        await asyncio.sleep(ORPHAN_S - 0.5)
        assert cluster.blocks_used[1] > 0
        await asyncio.sleep(1.0)
        assert cluster.blocks_used[1] == 0
        await assert_clean(cluster)


@virtual
async def test_an_orphan_is_freed_within_a_second_of_its_limit() -> None:
    async with two_schedulers("PD") as (cluster, owner):
        cluster.instances[1].behaviour.step_s = 0.05
        await owner.begun(5, longer(500))
        owner.die()
        await asyncio.sleep(ORPHAN_S - 0.5)
        assert cluster.blocks_used[1] > 0
        await asyncio.sleep(1.0)
        assert cluster.blocks_used == [0, 0]
        with pytest.raises(UnknownStream):
            await adopted(cluster)
