"""A running instance gets another role: where new work goes, what stays, who may change it, and restarts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.role_changes import change_role
from tests.scheduler.fake_cluster import FakeCluster, Running, collect, control_over, describe, request
from tests.scheduler.test_kv_pairs import offers
from tests.scheduler.virtual_time import until, virtual
from wire.errors import DeadlineExceeded, InvalidRequest, PdserveError, Unavailable
from wire.held_role import HeldRole
from wire.messages import RoleHeld, SetRole
from wire.step_cost import StepCost
from wire.types import Role

PROMPT = (1, 2, 3, 4, 5)


async def _served_by(cluster: FakeCluster) -> tuple[str | None, str | None]:
    answer = await collect(cluster.control.dispatch, request(PROMPT))
    return answer.done[0].prefill_instance, answer.done[0].decode_instance


@virtual
async def test_new_work_follows_the_role_and_running_streams_stay() -> None:
    async with FakeCluster("PDD", num_blocks=256).serving() as cluster:
        control = cluster.control
        streams = [Running(control.dispatch, request((i, i + 1), max_tokens=400)) for i in range(4)]
        await until(lambda: all(stream.tokens for stream in streams))
        sessions = [member.instance for member in control.registry.members]

        assert await change_role(control.registry, "decode-0", Role.PREFILL) == (
            Role.DECODE,
            RoleHeld(Role.PREFILL, 1, 1),
        )
        used = {await _served_by(cluster) for _ in range(6)}
        assert {start for start, _ in used} == {"prefill-0", "decode-1"}
        assert {end for _, end in used} == {"decode-2"}
        await asyncio.gather(*(stream.task for stream in streams))

        assert {stream.done[0].decode_instance for stream in streams} == {"decode-1", "decode-2"}
        assert all(stream.done[0].tries == 1 for stream in streams)
        assert [member.instance for member in control.registry.members] == sessions
        assert [one.role for one in control.view().instances] == [Role.PREFILL, Role.PREFILL, Role.DECODE]
        assert await change_role(control.registry, "decode-0", Role.DECODE) == (
            Role.PREFILL,
            RoleHeld(Role.DECODE, 2, 2),
        )
        assert {start for start, _ in {await _served_by(cluster) for _ in range(4)}} == {"prefill-0"}


@virtual
async def test_two_instances_exchange_their_roles_by_way_of_combined() -> None:
    async with FakeCluster("PD", probes=True).serving() as cluster:
        registry = cluster.control.registry
        await change_role(registry, "decode-0", Role.COMBINED)
        assert await _served_by(cluster) == (None, "decode-1")
        await change_role(registry, "prefill-0", Role.DECODE)
        await change_role(registry, "decode-0", Role.PREFILL)
        assert await _served_by(cluster) == ("decode-1", "prefill-0")
        await until(cluster.control.ready)


@pytest.mark.parametrize(
    ("roles", "name", "role", "kind", "words"),
    [
        ("PD", "decode-0", Role.PREFILL, InvalidRequest, "decode-0 as prefill would leave no path: .*decode-0 .decode"),
        ("PPD", "decode-0", Role.PREFILL, InvalidRequest, "would leave no path"),
        ("PD", "prefill-0", Role.DECODE, InvalidRequest, "would leave no path"),
        ("C", "combined-0", Role.PREFILL, InvalidRequest, "would leave no path"),
        ("PD", "decode-7", Role.PREFILL, InvalidRequest, "no instance is called decode-7; the names are prefill-0"),
    ],
)
@virtual
async def test_a_change_that_cannot_be_is_refused_and_changes_nothing(
    roles: str, name: str, role: Role, kind: type[PdserveError], words: str
) -> None:
    async with FakeCluster(roles).serving() as cluster:
        before = [member.role for member in cluster.control.registry.members]
        with pytest.raises(kind, match=words):
            await change_role(cluster.control.registry, name, role)
        assert [member.role for member in cluster.control.registry.members] == before
        assert not any(isinstance(one, SetRole) for instance in cluster.instances for one in instance.commands)


@virtual
async def test_a_role_whose_only_pair_has_no_transport_is_refused() -> None:
    cluster = FakeCluster("PDPD")
    hosts = ("a", "a", "b", "b")
    cluster.descriptions = [
        describe(i, one.role, endpoints=offers("shm", host=hosts[i])) for i, one in enumerate(cluster.descriptions)
    ]
    async with cluster.serving():
        registry = cluster.control.registry
        await change_role(registry, "prefill-0", Role.DECODE)
        with pytest.raises(InvalidRequest, match="decode-1 as prefill would leave no path"):  # both decode on host a
            await change_role(registry, "decode-1", Role.PREFILL)
        assert registry.gaps()[0].sender == 2  # prefill-1, to those on the other host


@virtual
async def test_an_instance_that_is_silent_or_away_keeps_its_role() -> None:
    async with FakeCluster("PDD").serving() as cluster:
        registry = cluster.control.registry
        cluster.instances[1].behaviour.ignores_commands = True
        first = asyncio.create_task(change_role(registry, "decode-0", Role.PREFILL))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(change_role(registry, "decode-1", Role.COMBINED))
        with pytest.raises(DeadlineExceeded, match="decode-0 did not answer within 10 s"):
            await first
        assert (await second)[1].role is Role.COMBINED, "it waited for the first"
        cluster.kill(2)
        await until(lambda: len(registry.living()) == 2)
        with pytest.raises(Unavailable, match="decode-1 is lost"):
            await change_role(registry, "decode-1", Role.PREFILL)


@virtual
async def test_a_restarted_instance_gets_its_role_again() -> None:
    async with FakeCluster("PDD").serving() as cluster:
        registry = cluster.control.registry
        await change_role(registry, "decode-0", Role.PREFILL)
        cluster.kill(1)
        await until(lambda: len(registry.living()) == 2)
        cluster.boot(1, epoch=77)
        await until(lambda: len(registry.living()) == 3)
        await until(lambda: registry.members[1].role_epoch == 1)

        assert [one.role for one in registry.living()] == [Role.PREFILL, Role.PREFILL, Role.DECODE]
        assert {end for _, end in {await _served_by(cluster) for _ in range(4)}} == {"decode-2"}


@contextlib.asynccontextmanager
async def _next_scheduler(cluster: FakeCluster) -> AsyncIterator[list[Role]]:
    expected: list[ExpectedInstance] = cluster.expected
    control = control_over(expected, cluster.network.connect, limits=cluster.control.registry._limits)
    running = asyncio.create_task(control.registry.run())
    await until(lambda: len(control.registry.living()) == len(expected))
    await asyncio.sleep(0.1)
    yield [one.role for one in control.registry.living()]
    running.cancel()


@virtual
async def test_a_restarted_scheduler_takes_the_roles_that_instances_have() -> None:
    cluster = FakeCluster("PDD")
    async with cluster.serving():
        await change_role(cluster.control.registry, "decode-1", Role.PREFILL)
    async with _next_scheduler(cluster) as roles:
        assert roles == [Role.PREFILL, Role.DECODE, Role.PREFILL]


@virtual
async def test_of_two_changes_of_one_epoch_the_instance_takes_the_first() -> None:
    async with FakeCluster("PDDD").serving() as cluster:
        registry = cluster.control.registry
        cluster.instances[1]._role.take(SetRole(Role.COMBINED, 1))  # another scheduler's
        with pytest.raises(InvalidRequest, match="decode-0 stays combined: role epoch 1 is not above 1, the epoch of"):
            await change_role(registry, "decode-0", Role.PREFILL)
        assert registry.members[1].role is Role.COMBINED
        assert await change_role(registry, "decode-0", Role.PREFILL) == (Role.COMBINED, RoleHeld(Role.PREFILL, 2, 2))


def test_an_obstacle_keeps_role_and_epoch() -> None:
    held = HeldRole(Role.DECODE)
    assert held.take(SetRole(Role.PREFILL, 1), "no encoder") == RoleHeld(Role.DECODE, 0, 1, "no encoder")
    assert held.take(SetRole(Role.COMBINED, 1)) == RoleHeld(Role.COMBINED, 1, 1)
    assert held.held == RoleHeld(Role.COMBINED, 1)


@virtual
async def test_with_roles_auto_the_control_plane_follows_the_load() -> None:
    limits = ControlLimits(follow_load=True)
    async with FakeCluster("PDD", limits=limits, probes=True).serving() as cluster:
        for instance in cluster.instances:
            instance.behaviour.cost = StepCost(0.01, 0.001, 0.01)
        registry, dispatch = cluster.control.registry, cluster.control.dispatch
        prompts = [request(tuple(range(i, i + 200)), limits_s=(300.0, 300.0)) for i in range(40)]
        requests = [asyncio.create_task(collect(dispatch, one)) for one in prompts]
        await until(lambda: sum(one.role is Role.PREFILL for one in registry.members) == 2, timeout_s=60.0)
        assert all(len(answer.tokens[0, 0]) == 4 for answer in await asyncio.gather(*requests))


@virtual
async def test_the_second_of_two_changes_must_leave_a_path_too() -> None:
    async with FakeCluster("PDD").serving() as cluster:
        registry = cluster.control.registry
        changes = [change_role(registry, name, Role.PREFILL) for name in ("decode-0", "decode-1")]
        done, refused = await asyncio.gather(*changes, return_exceptions=True)
        assert done == (Role.DECODE, RoleHeld(Role.PREFILL, 1, 1))
        assert isinstance(refused, InvalidRequest)
        assert await _served_by(cluster) in {("prefill-0", "decode-2"), ("decode-1", "decode-2")}


@virtual
async def test_with_roles_auto_a_lost_role_is_taken_over() -> None:
    limits = ControlLimits(follow_load=True)
    async with FakeCluster("PDD", limits=limits, probes=True).serving() as cluster:
        registry = cluster.control.registry
        await change_role(registry, "decode-0", Role.PREFILL)
        await until(cluster.control.ready)
        cluster.kill(2)
        await until(lambda: len(registry.living()) == 2)
        await until(lambda: registry.has_path())
        prefill, decode = await _served_by(cluster)
        assert {prefill, decode} == {"prefill-0", "decode-1"}


@virtual
async def test_a_combined_instance_keeps_others_from_serving_alone() -> None:
    limits = ControlLimits(may_lack=frozenset({Role.PREFILL}))
    async with FakeCluster("PDD", limits=limits).serving() as cluster:
        registry = cluster.control.registry
        await change_role(registry, "prefill-0", Role.COMBINED)
        assert [one.role for one in registry.living()] == [Role.COMBINED, Role.DECODE, Role.DECODE]
        assert await _served_by(cluster) == (None, "prefill-0")


@virtual
async def test_a_new_entry_of_the_table_begins_with_the_tables_role() -> None:
    async with FakeCluster("PPDD").serving() as cluster:
        registry = cluster.control.registry
        await change_role(registry, "decode-1", Role.PREFILL)
        registry.change(cluster.expected[:3], "without decode-1")
        await until(lambda: not registry.leaving)
        registry.change(cluster.expected, "with it again")
        await until(lambda: len(registry.living()) == 4)
        assert [one.role for one in registry.living()] == [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
