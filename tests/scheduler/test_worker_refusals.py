"""Workers that do not fit: each is named with its URL and the reason, and left out while the others serve."""

import asyncio
import contextlib
import dataclasses
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.ports import free_ports
from scheduler.limits import ControlLimits
from scheduler.membership.compatibility import ExpectedInstance
from scheduler.membership.member import Member
from scheduler.workers.connection import WorkerConnection
from testing.vllm_worker.settings import WorkerSettings
from testing.vllm_worker.worker import FakeVllmWorker
from tests.scheduler.fake_cluster import control_over
from tests.scheduler.virtual_time import until, virtual
from tests.scheduler.worker_cluster import SETTINGS
from wire.errors import Incompatible
from wire.types import Role

HTML = b"<html>It works!</html>"
FOREIGN: dict[str, tuple[WorkerSettings | None, str]] = {
    "another model": (dataclasses.replace(SETTINGS, model="other"), "models differ: "),
    "another version": (dataclasses.replace(SETTINGS, version="0.33.0"), "engines differ: "),
    "a key": (dataclasses.replace(SETTINGS, api_key="s"), "answered 401: Unauthorized; it needs a key: --worker"),
    "no vLLM": (None, "/version answered '<html>It works!</html>', not a JSON object: is it a vLLM server?"),
}
"""The settings of each, None for a server of HTML, and the reason."""


@asynccontextmanager
async def _listening(settings: WorkerSettings | None, port: int) -> AsyncIterator[None]:
    if settings is None:
        server = await asyncio.start_server(_answer_html, "127.0.0.1", port)
        yield
        server.close()
        return
    worker = FakeVllmWorker(dataclasses.replace(settings, port=port))
    await worker.start()
    yield
    await worker.stop()


async def _answer_html(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError):
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(HTML) + HTML)
    writer.close()


def _expected(*ports: int) -> list[ExpectedInstance]:
    return [
        ExpectedInstance(at, f"worker-{at}", Role.DECODE if at else Role.PREFILL, f"http://127.0.0.1:{port}", "", ())
        for at, port in enumerate(ports)
    ]


@pytest.mark.parametrize(("settings", "why"), FOREIGN.values(), ids=FOREIGN)
@pytest.mark.anyio
async def test_a_worker_that_does_not_fit_is_named_and_left_out(settings: WorkerSettings | None, why: str) -> None:
    expected = _expected(*free_ports(3))
    ports = [int(one.address.rpartition(":")[2]) for one in expected]
    control = control_over(expected, WorkerConnection, ControlLimits())
    async with contextlib.AsyncExitStack() as stack:
        for port in ports[:2]:
            await stack.enter_async_context(_listening(SETTINGS, port))
        running = asyncio.create_task(control.run())
        try:
            await until(control.ready, timeout_s=30.0)
            await stack.enter_async_context(_listening(settings, ports[2]))
            await until(lambda: control.view().instances[2].state == "refused", timeout_s=30.0)

            assert why in control.view().instances[2].why
            assert expected[2].address in control.view().instances[2].why
            assert control.ready()
        finally:
            await control.dispatch.close(0.0)
            running.cancel()
            await asyncio.wait({running})


@pytest.mark.parametrize(("settings", "why"), FOREIGN.values(), ids=FOREIGN)
@pytest.mark.anyio
async def test_nothing_left_to_serve_ends_the_scheduler(settings: WorkerSettings | None, why: str) -> None:
    expected = _expected(*free_ports(2))
    ports = [int(one.address.rpartition(":")[2]) for one in expected]
    async with _listening(SETTINGS, ports[0]), _listening(settings, ports[1]):
        with pytest.raises(Incompatible) as caught:  # exit status 2
            async with asyncio.timeout(30.0):
                await control_over(expected, WorkerConnection, ControlLimits()).run()

    assert why in str(caught.value)
    assert expected[1].address in str(caught.value)


@virtual
async def test_a_refused_worker_is_asked_again_with_growing_pauses() -> None:
    clock, asked = asyncio.get_running_loop().time, list[float]()

    async def describe(timeout_s: float) -> None:
        asked.append(clock())
        raise Incompatible("no")

    async def close() -> None:
        pass

    registry: Any = SimpleNamespace(refuse=lambda expected, error: None, changed=lambda: None)
    connect: Any = lambda address: SimpleNamespace(describe=describe, close=close)  # noqa: E731
    member = Member(_expected(1)[0], registry, connect, ControlLimits(), random.Random(0))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60.0):
            await member.run()

    pauses = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert pauses[:4] == sorted(pauses[:4])
    assert pauses[0] < pauses[3]
    assert pauses[-1] == ControlLimits().refused_retry_s
