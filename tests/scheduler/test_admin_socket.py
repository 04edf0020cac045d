"""The scheduler's admin socket: what it reports, who may connect, and that clients cannot harm it."""

import asyncio
import errno
import functools
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from flags.options import EngineOptions
from pdserve.ports import free_ports
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.links import admin_socket
from scheduler.links.admin_socket import serve_admin_socket, socket_name
from scheduler.links.probe import MAX_MEASURE_BYTES
from scheduler.process import serve_cluster
from scheduler.serving import Cluster
from tests.scheduler.fake_cluster import TABLE_DIGEST, FakeCluster
from tests.scheduler.virtual_time import until
from wire.messages import MeasureLink

pytestmark = pytest.mark.anyio
WAIT_S = 300.0
ASK = b'{"ask": "links", "num_bytes": 1048576}\n'


@asynccontextmanager
async def admin_socket_open(roles: str = "PD") -> AsyncIterator[tuple[FakeCluster, str]]:
    """A cluster and its admin socket under a unique name; closing the socket leaves no connection."""
    name = socket_name("127.0.0.1", 0) + secrets.token_hex(8)
    async with asyncio.timeout(WAIT_S), FakeCluster(roles).serving() as cluster:
        keeping = asyncio.create_task(serve_admin_socket(name, cluster.control.registry))
        await until(lambda: _is_listening(name))
        yield cluster, name
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        assert not _is_listening(name)


def _is_listening(name: str) -> bool:
    return any(line.endswith(f" @{name}") for line in Path("/proc/net/unix").read_text().splitlines())


async def ask(name: str, data: bytes) -> list[dict[str, Any]]:
    """Send bytes to the socket and return its answer up to the end."""
    reader, writer = await asyncio.open_unix_connection("\0" + name)
    writer.write(data)
    reported = await reader.read()
    writer.close()
    return [json.loads(line) for line in reported.splitlines()]


async def test_every_pair_is_reported_before_and_after_measuring() -> None:
    async with admin_socket_open("PDD") as (cluster, name):
        reported = await ask(name, ASK)

        assert [next(iter(one)) for one in reported] == ["measuring", "link", "measuring", "link", "end"]
        assert reported[2] == {
            "measuring": {
                "prefill": "prefill-0", "prefill_address": "10.0.0.1:8000",
                "decode": "decode-1", "decode_address": "10.0.0.1:8002",
            }, "number": 2, "of": 2,
        }  # fmt: skip
        assert reported[3]["link"] == reported[2]["measuring"] | {
            "transport": "fake", "state": "up", "round_trip_s": 0.0001, "bytes_per_s": 1e9, "bytes_sent": 0,
            "failures": 0, "fallbacks": 0, "digests": True, "passed_over": [],
                "not_offered": [], "error": "",
        }  # fmt: skip
        requests = [command for command in cluster.instances[0].commands if isinstance(command, MeasureLink)]
        peers = [cluster.instances[index].description for index in (1, 2)]
        assert requests == [MeasureLink(peer.instance_id, peer.epoch, peer.endpoints, 1048576) for peer in peers]


async def test_zero_bytes_only_look() -> None:
    async with admin_socket_open() as (cluster, name):
        reported = await ask(name, b'{"ask": "links", "num_bytes": 0}\n')

        assert reported[1]["link"]["error"] == ""
        assert reported[1]["link"]["round_trip_s"] is None
        assert not any(isinstance(command, MeasureLink) for command in cluster.instances[0].commands)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\n", "the line is not JSON"),
        (b"GET / HTTP/1.1\r\n\r\n", "the line is not JSON"),
        (b"[" * 60000 + b"\n", "the line is not JSON"),
        (b"x" * (admin_socket.MAX_LINE_BYTES * 2) + b"\n", f"more than {admin_socket.MAX_LINE_BYTES} bytes"),
        (b'{"ask": "secret", "num_bytes": 1}\n', "the requests are"),
        (b'{"ask": "links", "num_bytes": true}\n', "the requests are"),
        (b'{"ask": "links", "num_bytes": 1e3}\n', "the requests are"),
        (b'{"ask": "links", "num_bytes": 1, "peer": "10.0.0.9:1"}\n', "the requests are"),
        (b'{"ask": "role", "instance": "decode-0"}\n', "the requests are"),
        (b'{"ask": "role", "instance": "decode-0", "role": ["prefill"]}\n', "ROLE being prefill, decode, combined"),
        (b'{"ask": "role", "instance": "decode-0", "role": "combined", "epoch": 1}\n', "the requests are"),
        (b'{"ask": "role", "instance": "decode-9", "role": "combined"}\n', "no instance is called decode-9; the"),
        (b'{"ask": "links", "num_bytes": -1}\n', f"-1 bytes: 0 to {MAX_MEASURE_BYTES} are allowed"),
        (b'{"ask": "links", "num_bytes": 268435457}\n', f"268435457 bytes: 0 to {MAX_MEASURE_BYTES} are allowed"),
    ],
)
async def test_anything_else_is_refused_with_a_reason_and_measures_nothing(data: bytes, words: str) -> None:
    async with admin_socket_open() as (cluster, name):
        (reported,) = await ask(name, data)

        assert words in reported["error"]
        assert not any(isinstance(command, MeasureLink) for command in cluster.instances[0].commands)


async def test_a_silent_client_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_socket, "_REQUEST_TIMEOUT_S", 0.05)
    async with admin_socket_open() as (_, name):
        (reported,) = await ask(name, b'{"ask": ')

        assert "within 0.05 s" in reported["error"]


async def test_a_process_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(admin_socket, "_ROOT", 4712)
    async with admin_socket_open() as (cluster, name):
        try:
            reported = await ask(name, ASK)
        except ConnectionError:
            reported = []

        assert reported == []
        assert not any(isinstance(command, MeasureLink) for command in cluster.instances[0].commands)


async def test_measurements_run_one_at_a_time_and_a_cancel_frees_the_slot() -> None:
    async with admin_socket_open() as (cluster, name):
        cluster.instances[0].behaviour.ignores_commands = True
        reader, writer = await asyncio.open_unix_connection("\0" + name)
        writer.write(ASK)
        await reader.readline()
        (refused,) = await ask(name, ASK)
        cluster.instances[0].behaviour.ignores_commands = False
        writer.close()
        second = await until_measured(name)

        assert "one measurement at a time" in refused["error"]
        assert second[-1] == {"end": True}


async def until_measured(name: str) -> list[dict[str, Any]]:
    """Retry while another client measures: no event reports when the server sees that a connection was closed."""
    while "error" in (reported := await ask(name, ASK))[-1]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return reported


async def test_excess_clients_are_cut_and_the_socket_stays_open() -> None:
    async with admin_socket_open() as (_, name):
        crowd = [await asyncio.open_unix_connection("\0" + name) for _ in range(40)]
        cut = [await asyncio.wait_for(reader.read(1), WAIT_S) for reader, _ in crowd[admin_socket._MAX_CLIENTS :]]
        for _, writer in crowd:
            writer.close()
        reported = await until_measured_or_cut(name)

        assert set(cut) == {b""}
        assert reported[-1] == {"end": True}


async def until_measured_or_cut(name: str) -> list[dict[str, Any]]:
    """As `until_measured`, also while there are too many clients."""
    while True:
        try:
            reported = await ask(name, ASK)
        except ConnectionError:
            reported = []
        if reported and "end" in reported[-1]:
            return reported
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("broken", [MemoryError(), OSError(errno.ENOSPC, "epoll limit")])
async def test_an_unreadable_client_is_cut_and_the_socket_stays_open(
    broken: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect = asyncio.open_unix_connection

    async def fail_for_the_socket(*args: Any, **kwargs: Any) -> Any:
        if "sock" in kwargs:
            raise broken
        return await connect(*args, **kwargs)

    async with admin_socket_open() as (_, name):
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "open_unix_connection", fail_for_the_socket)
            for _ in range(admin_socket._MAX_CLIENTS + 1):  # each gives its place back
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                    client.connect("\0" + name)
                    await until(functools.partial(_is_cut, client))
        reported = await ask(name, ASK)

        assert reported[-1] == {"end": True}
        assert caplog.text.count("admin_client_failed") == admin_socket._MAX_CLIENTS + 1


def _is_cut(client: socket.socket) -> bool:
    try:
        return client.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


async def test_a_taken_socket_name_costs_only_the_admin_socket(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "pdserve.admin")
    async with admin_socket_open() as (cluster, name):
        await asyncio.wait_for(serve_admin_socket(name, cluster.control.registry), WAIT_S)

        assert "admin_socket_unavailable" in caplog.text
        assert (await ask(name, ASK))[-1] == {"end": True}


@pytest.mark.parametrize("num_turns", range(12))
async def test_a_closed_admin_socket_leaves_no_connection_open(num_turns: int) -> None:
    name = socket_name("127.0.0.1", 0) + secrets.token_hex(8)
    keeping = asyncio.create_task(serve_admin_socket(name, FakeCluster("PD").control.registry))
    await until(lambda: _accepts(name))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect("\0" + name)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        for _ in range(8):  # a connection accepted at the last moment is set up and closed in turns of the loop
            await asyncio.sleep(0)

        client.settimeout(2)
        assert _was_cut(client)


def _accepts(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex("\0" + name) == 0


def _was_cut(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


async def test_the_admin_socket_is_named_by_the_schedulers_port(model_folder: Path, free_port: int) -> None:
    fakes, stop = FakeCluster("PD"), asyncio.Event()
    cluster = Cluster(tuple(fakes.expected), fakes.network.connect, TABLE_DIGEST)
    fakes.boot(0)
    config = SchedulerConfig(EngineOptions(model=str(model_folder), port=free_port), SchedulerOptions())
    serving = asyncio.create_task(serve_cluster(config, cluster, stop))
    name = socket_name("127.0.0.1", free_port)
    async with asyncio.timeout(WAIT_S):
        await until(lambda: serving.done() or _is_listening(name))
        while (reported := await ask(name, ASK))[1]["link"]["error"].startswith("10.0.0.1:8000 is connecting"):
            pass
        stop.set()
        await serving

    assert reported[1]["link"]["error"].startswith("10.0.0.1:8001 is connecting")
    assert not _is_listening(name)


@pytest.fixture
def free_port() -> int:
    """A port nothing listens on now."""
    return free_ports(1)[0]


async def test_the_socket_of_a_shared_port_passes_to_another_scheduler() -> None:
    name = socket_name("127.0.0.1", 0) + secrets.token_hex(8)
    async with asyncio.timeout(WAIT_S), FakeCluster("PD").serving() as first, FakeCluster("PPD").serving() as second:
        keeping = [
            asyncio.create_task(serve_admin_socket(name, one.control.registry, shared=True)) for one in (first, second)
        ]
        await until(lambda: _accepts(name))
        assert len(await ask(name, ASK)) == 3, "one pair of the first"
        keeping[0].cancel()
        await asyncio.gather(keeping[0], return_exceptions=True)
        await until(lambda: _accepts(name))
        assert len(await ask(name, ASK)) == 5, "two pairs of the second"
        keeping[1].cancel()
        await asyncio.gather(keeping[1], return_exceptions=True)
