"""Sessions that start while their instance restarts, and end while the scheduler does."""

import asyncio

import pytest

from scheduler.limits import ControlLimits
from testing.wire.fake_network import FakeConnection
from tests.scheduler.fake_cluster import FakeCluster, control_over
from tests.scheduler.test_live_table import LiveCluster
from tests.scheduler.virtual_time import until, virtual
from wire.connection import Session
from wire.messages import Command, OpenSession
from wire.types import Role


@pytest.mark.parametrize("num_turns", range(16))
@virtual
async def test_a_scheduler_that_ends_while_a_session_breaks_does_end(num_turns: int) -> None:
    cluster = FakeCluster("PD")
    for index in range(2):
        cluster.boot(index)
    running = asyncio.create_task(cluster.control.registry.run())
    await until(lambda: not cluster.control.registry.missing())

    cluster.kill(0)
    for _ in range(num_turns):  # of the event loop: every moment of its shutdown
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running}, timeout=60.0)

    assert running.cancelled()


@virtual
async def test_a_restart_before_the_session_is_described_again() -> None:
    cluster = FakeCluster("PD")
    for index in range(2):
        cluster.boot(index)

    class Restarting(FakeConnection):
        async def open(self, hello: OpenSession, timeout_s: float) -> Session:
            if self._address == cluster.expected[1].address and cluster.instances[1].description.epoch != 77:
                cluster.kill(1)
                cluster.boot(1, epoch=77, num_blocks=10)
            return await super().open(hello, timeout_s)

    control = control_over(cluster.expected, lambda address: Restarting(cluster.network, address), ControlLimits())
    running = asyncio.create_task(control.registry.run())
    await until(lambda: not control.registry.missing())

    (decode,) = [instance for instance in control.registry.living() if instance.name == "decode-0"]
    assert (decode.description.epoch, decode.description.num_blocks) == (77, 10)
    running.cancel()


@virtual
async def test_an_instance_taking_no_command_is_lost_despite_heartbeats() -> None:
    cluster, blocked = FakeCluster("PD"), asyncio.Event()
    for index in range(2):
        cluster.boot(index)

    class Blocking(FakeConnection):
        async def open(self, hello: OpenSession, timeout_s: float) -> Session:
            session = await super().open(hello, timeout_s)
            if self._address == cluster.expected[1].address and not blocked.is_set():

                async def send(*commands: Command) -> None:
                    blocked.set()
                    await asyncio.Event().wait()

                session.send = send  # type: ignore[method-assign]
            return session

    control = control_over(cluster.expected, lambda address: Blocking(cluster.network, address), ControlLimits())
    running = asyncio.create_task(control.registry.run())
    await blocked.wait()
    await until(lambda: bool(control.registry.missing()))

    (missing,) = control.registry.missing()
    assert "it accepted no command for 5 s" in missing.why
    running.cancel()


@pytest.mark.parametrize("turns_gone", [0, 2, 7])
@pytest.mark.parametrize("turns_dialled", range(30))
@virtual
async def test_an_instance_removed_while_connecting_returns_once(turns_dialled: int, turns_gone: int) -> None:
    async with LiveCluster("PD").serving() as cluster:
        before, added = tuple(cluster.all), cluster.add(Role.DECODE)
        registry = cluster.control.registry
        for entries, turns in (((*before, added), turns_dialled), (before, turns_gone)):
            cluster.use(*entries)
            for _ in range(turns):
                await asyncio.sleep(0)

        cluster.use(*before, added)
        await until(lambda: not registry.missing() and not registry.leaving)
        await asyncio.sleep(3.0)
        assert not registry.missing()
        assert set(registry._members._tasks) == set(registry.members)

        cluster.use(*before)
        await until(lambda: not registry.leaving)
        await asyncio.sleep(3.0)
        assert not cluster.instances[2].sessions
        assert not registry._members._drains
