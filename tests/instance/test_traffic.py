"""Two real instances under random cancels, over both ways to reach them: nothing is lost, held or left behind."""

import asyncio
import contextlib
import gc
import os
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from instance.local import LocalInstance
from tests.instance.pair import DEADLINE_S, instance_config
from tests.instance.traffic import Line, Traffic
from wire.connection import Connection
from wire.grpc_connection import GrpcConnection
from wire.grpc_server import GrpcServer
from wire.inprocess import InProcessConnection
from wire.messages import OpenSession
from wire.types import Role

Reach = Callable[[LocalInstance], AbstractAsyncContextManager[Connection]]


@contextlib.asynccontextmanager
async def over_grpc(instance: LocalInstance) -> AsyncIterator[Connection]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        server = GrpcServer("127.0.0.1", probe.getsockname()[1])
    port = await server.start()
    await server.serve(instance._host)
    connection = GrpcConnection(f"127.0.0.1:{port}")
    try:
        yield connection
    finally:
        await connection.close()
        await server.stop(0)


@contextlib.asynccontextmanager
async def in_process(instance: LocalInstance) -> AsyncIterator[Connection]:
    yield InProcessConnection(instance._host)


@contextlib.asynccontextmanager
async def line(folder: Path, role: Role, port: int, transport: str, reach: Reach) -> AsyncIterator[Line]:
    instance = await LocalInstance.start(instance_config(folder, role, port=port, kv_transport=(transport,)))
    try:
        async with reach(instance) as connection:
            opened = Line(await connection.open(OpenSession("test", 1, DEADLINE_S), DEADLINE_S))
            reading = asyncio.create_task(opened.read())
            yield opened
            await opened.session.close()
            await reading
    finally:
        await instance.stop()


def footprint() -> tuple[int, list[str]]:
    """Return this process's descriptors and the names of its threads, but for those that come and go by themselves."""
    passing = ("asyncio_", "pool-touch")
    gc.collect()  # what earlier tests of this process left open must not be counted as ours, now or later
    names = sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith(passing))
    return len(os.listdir("/proc/self/fd")), names


def has_grown(before: tuple[int, list[str]], now: tuple[int, list[str]]) -> bool:
    """Whether there are more descriptors, or threads that were not there."""
    return now[0] > before[0] or bool(Counter(now[1]) - Counter(before[1]))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("reach", [in_process, over_grpc])
def test_two_hundred_prompts_with_random_cancels_leave_nothing_behind(
    reach: Reach, transport: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with (
            line(tmp_path, Role.PREFILL, 4, transport, reach) as p,
            line(tmp_path, Role.DECODE, 6, transport, reach) as d,
        ):
            await Traffic(p, d, seed=0).run(20)  # dials the link
            before = footprint()
            await Traffic(p, d, seed=1000).run(200)
            await p.wait_empty()
            await d.wait_empty()

            now = footprint()
            assert not has_grown(before, now), (before, now)
            assert (p.inboxes, d.inboxes) == ({}, {})

    asyncio.run(run())


def test_peers_that_come_and_go_leave_no_descriptor_or_thread_behind(tmp_path: Path) -> None:
    async def run() -> None:
        async with line(tmp_path, Role.PREFILL, 4, "shm", in_process) as p:
            before = None
            for number in range(6):
                async with line(tmp_path, Role.DECODE, 6, "shm", in_process) as d:
                    await Traffic(p, d, seed=1000 * number).run(8)
                before = before or await settled(None)
                assert await settled(before) == before
            await p.wait_empty()

    asyncio.run(run())


async def settled(wanted: tuple[int, list[str]] | None) -> tuple[int, list[str]]:
    """Return the footprint once it is as wanted, or no link is left, or at the deadline: links end a little later."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DEADLINE_S):
            while (now := footprint()) != wanted and (wanted or any(name.startswith("kv-out") for name in now[1])):  # noqa: ASYNC110 - descriptors have no event
                await asyncio.sleep(0.01)
    return footprint()
