"""Two real instances under random cancels, over both kinds of connection: nothing is lost, held or left behind."""

import asyncio
import contextlib
import gc
import itertools
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from instance.local import LocalInstance
from tests.instance.pair import DEADLINE_S, instance_config
from tests.instance.traffic import Line, Traffic
from tests.rpc.reach import Reach, in_process, over_grpc
from wire.messages import OpenSession
from wire.types import Role


@contextlib.asynccontextmanager
async def line(folder: Path, role: Role, port: int, transport: str, reach: Reach) -> AsyncIterator[Line]:
    instance = await LocalInstance.start(instance_config(folder, role, port=port, kv_transport=(transport,)))
    try:
        async with reach(instance._host) as connection:
            opened = Line(await connection.open(OpenSession("test", 1, DEADLINE_S), DEADLINE_S))
            reading = asyncio.create_task(opened.read())
            yield opened
            await opened.session.close()
            await reading
    finally:
        await instance.stop()


def footprint() -> tuple[int, list[str]]:
    """Return this process's descriptors and the names of its threads, except those that come and go by themselves."""
    passing = ("asyncio_", "pool-touch")
    gc.collect()  # frees what earlier tests left open, so that it is not counted as ours
    names = sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith(passing))
    return len(os.listdir("/proc/self/fd")), names


def has_grown(before: tuple[int, list[str]], now: tuple[int, list[str]]) -> bool:
    """Whether there are more descriptors, or new threads."""
    return now[0] > before[0] or bool(Counter(now[1]) - Counter(before[1]))


async def dial_all(p: Line, d: Line, num_links: int) -> None:
    """Serve prompts until all links of the pair are open: the second one is dialled only when the first is loaded."""
    async with asyncio.timeout(DEADLINE_S):
        for seed in itertools.count(10_000, 20):
            await Traffic(p, d, seed).run(20)
            names = footprint()[1]
            if all(sum(name.startswith(one) for name in names) >= num_links for one in ("kv-out", "kv-back", "kv-in")):
                return


@pytest.mark.often("over_grpc-tcp-2")
@pytest.mark.parametrize(("transport", "num_links"), [("shm", 1), ("tcp", 2)])
@pytest.mark.parametrize("reach", [in_process, over_grpc])
def test_two_hundred_prompts_with_random_cancels_leave_nothing_behind(
    reach: Reach, transport: str, num_links: int, tmp_path: Path
) -> None:
    async def run() -> None:
        async with (
            line(tmp_path, Role.PREFILL, 4, transport, reach) as p,
            line(tmp_path, Role.DECODE, 6, transport, reach) as d,
        ):
            await dial_all(p, d, num_links)
            before = footprint()
            await Traffic(p, d, seed=1000).run(200)
            await p.wait_empty()
            await d.wait_empty()
            await until_like(before)

            assert (p.inboxes, d.inboxes) == ({}, {})

    asyncio.run(run())


def test_peers_that_come_and_go_leave_no_descriptor_or_thread_behind(tmp_path: Path) -> None:
    async def run() -> None:
        async with line(tmp_path, Role.PREFILL, 4, "shm", in_process) as p:
            alone = footprint()
            for number in range(6):
                async with line(tmp_path, Role.DECODE, 6, "shm", in_process) as d:
                    await Traffic(p, d, seed=1000 * number).run(8)
                del d  # and with it the last reference to its pool
                await until_like(alone)
            await p.wait_empty()

    asyncio.run(run())


async def until_like(before: tuple[int, list[str]]) -> None:
    """Wait until there are as few descriptors and threads as before: P's half of a link ends after D's."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while has_grown(before, footprint()):  # noqa: ASYNC110 - descriptors have no event
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{footprint()} is left, it was {before}") from None
