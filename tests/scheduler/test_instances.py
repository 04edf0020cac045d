"""Sessions that begin while their instance restarts, and end while the scheduler does."""

import asyncio

import pytest

from scheduler.limits import ControlLimits
from tests.scheduler.fake_cluster import FakeCluster, control_over
from tests.scheduler.virtual_time import until, virtual
from wire.connection import Session
from wire.fake_network import FakeConnection
from wire.messages import OpenSession


@pytest.mark.parametrize("num_turns", range(16))
@virtual
async def test_a_scheduler_that_ends_while_a_session_breaks_does_end(num_turns: int) -> None:
    cluster = FakeCluster("PD")
    for index in range(2):
        cluster.boot(index)
    running = asyncio.create_task(cluster.control.registry.run())
    await until(lambda: not cluster.control.registry.missing())

    cluster.kill(0)
    for _ in range(num_turns):  # of the event loop: every moment of its winding up
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running}, timeout=60.0)

    assert running.cancelled()


@virtual
async def test_an_instance_that_restarts_between_its_description_and_its_session_is_asked_again() -> None:
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
