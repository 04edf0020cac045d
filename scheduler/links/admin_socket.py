"""The admin socket: an abstract Unix socket of the scheduler, used by `pdserve links` and `pdserve role`.

    to the scheduler   {"ask": "links", "num_bytes": 67108864}
    to the client      {"measuring": PAIR, "number": 1, "of": 4}, then {"link": PAIR with its figures}; so for each pair
                       {"end": true}   or   {"error": "message"}

    to the scheduler   {"ask": "role", "instance": "decode-0", "role": "prefill"}
    to the client      {"before": "decode", "role": "prefill", "epoch": 1}   or   {"error": "message", "invalid": true}

Each message is one line; a client sends one request and then only reads. Only processes in this host's network
namespace can connect, and only the scheduler's user and root are served. A client that disconnects cancels its
measurement. Reasons for a separate socket: `docs/adr/0005-operator-door.md`.
"""

import asyncio
import contextlib
import json
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

from scheduler.links.probe import LinkProbe, Pair, PairLink
from scheduler.registry import Registry
from scheduler.role_changes import change_role
from telemetry.logs import EventLogger
from wire.errors import InvalidRequest, PdserveError
from wire.types import Role

_log = EventLogger("admin")

MAX_LINE_BYTES = 64 * 2**10
_REQUEST_TIMEOUT_S = 5.0
_WRITE_TIMEOUT_S = 5.0
_NO_DESCRIPTOR_S = 1.0
_TAKE_OVER_S = 0.5
_MAX_CLIENTS = 8
_ROOT = 0
_ROLES = tuple(role.value for role in Role)
_REQUESTS = (
    'the requests are {"ask": "links", "num_bytes": N} and {"ask": "role", "instance": NAME, "role": ROLE}, ROLE being '
    f"{', '.join(_ROLES)}"
)


def socket_name(host: str, port: int) -> str:
    """Return the abstract name, without the leading NUL, of the admin socket of the scheduler on host:port."""
    return f"pdserve-scheduler-{host}-{port}"


def is_same_user(sock: socket.socket) -> bool:
    """Return whether the process at the other end of a Unix socket runs as our user or as root."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] in (_ROOT, os.geteuid())


async def serve_admin_socket(name: str, registry: Registry, *, shared: bool = False) -> None:
    """Serve clients until cancelled; if the name is taken, the scheduler runs without an admin socket.

    The name of a `shared` port belongs to one of its schedulers; when that scheduler ends, another takes the name.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        while True:
            try:
                bound.bind("\0" + name)
                break
            except OSError as error:
                if not shared:
                    lost = "pdserve links and pdserve role"
                    _log.warning("admin_socket_unavailable", name=name, error=error, lost=lost)
                    return
            await asyncio.sleep(_TAKE_OVER_S)
        bound.listen()
        bound.setblocking(False)
        async with asyncio.TaskGroup() as clients:
            server = _AdminServer(registry, clients)
            while True:  # not asyncio's server: Python 3.11's loses a connection accepted while closing
                await _until_readable(bound)
                try:
                    server.take(bound)
                except OSError as error:
                    _log.warning("admin_accept_failed", error=error)
                    await asyncio.sleep(_NO_DESCRIPTOR_S)


class _AdminServer:
    """Owner of the running clients."""

    def __init__(self, registry: Registry, clients: asyncio.TaskGroup) -> None:
        self._registry, self._links, self._clients = registry, LinkProbe(registry), clients
        self._num_clients = 0

    def take(self, bound: socket.socket) -> None:
        """Serve the next client in its own task; close it if it is another user's or one too many. Raises OSError."""
        client, _ = bound.accept()
        if self._num_clients >= _MAX_CLIENTS or not is_same_user(client):
            client.close()
            return
        self._num_clients += 1
        serving = self._clients.create_task(self._serve(client))
        serving.add_done_callback(lambda _: self._close_unused(client))

    def _close_unused(self, client: socket.socket) -> None:
        """Close a socket whose task ended before it got a transport; a transport closes its own socket."""
        self._num_clients -= 1
        client.close()

    async def _serve(self, client: socket.socket) -> None:
        try:
            await self._handle(client)
        except Exception as error:  # noqa: BLE001 - the client's outermost frame: the scheduler must survive
            _log.error("admin_client_failed", error)

    async def _handle(self, client: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=client, limit=MAX_LINE_BYTES)
        try:
            with contextlib.suppress(OSError, TimeoutError):
                await self._answer(reader, writer)
        finally:
            await _hang_up(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            requested = await _read_request(reader)
        except PdserveError as error:
            await _send(writer, {"error": str(error)})
            return
        work = asyncio.create_task(self._carry_out(writer, requested))
        gone = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = [task for task in (work, gone) if not task.cancel()]
            await asyncio.gather(work, gone, return_exceptions=True)
        if work in ended:
            work.result()

    async def _carry_out(self, writer: asyncio.StreamWriter, requested: "_Links | _NewRole") -> None:
        try:
            if isinstance(requested, _NewRole):
                before, held = await change_role(self._registry, requested.instance, requested.role)
                await _send(writer, {"before": before.value, "role": held.role.value, "epoch": held.epoch})
            else:
                await self._send_links(writer, requested.num_bytes)
        except PdserveError as error:
            await _send(writer, {"error": str(error), "invalid": isinstance(error, InvalidRequest)})

    async def _send_links(self, writer: asyncio.StreamWriter, num_bytes: int) -> None:
        number, of = 0, len(self._links.pairs())
        async with contextlib.aclosing(self._links.measure(num_bytes)) as measured:
            async for one in measured:
                if isinstance(one, Pair):
                    number += 1
                    await _send(writer, {"measuring": pair_json(one), "number": number, "of": of})
                else:
                    await _send(writer, {"link": link_json(one)})
        await _send(writer, {"end": True})


@dataclass(frozen=True, slots=True)
class _Links:
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _NewRole:
    instance: str
    role: Role


def pair_json(pair: Pair) -> dict[str, str]:
    """Return a pair as JSON for the client."""
    return {
        "prefill": pair.prefill,
        "prefill_address": pair.sender.expected.address,
        "decode": pair.decode,
        "decode_address": pair.receiver.expected.address,
    }


def link_json(measured: PairLink) -> dict[str, Any]:
    """Return a link as JSON for the client; unknown figures are null."""
    link = measured.link
    figures: dict[str, Any] = dict.fromkeys(
        ("transport", "state", "round_trip_s", "bytes_per_s", "bytes_sent", "failures", "fallbacks")
    )
    if link is not None:
        figures = {name: getattr(link, name) for name in figures}
        for name in ("transport", "round_trip_s", "bytes_per_s"):  # empty or zero: not known
            figures[name] = figures[name] or None
    passed_over = [] if link is None else list(link.passed_over)
    known = {**pair_json(measured.pair), **figures, "digests": measured.digests}
    return {**known, "passed_over": passed_over, "not_offered": list(measured.not_offered), "error": measured.error}


async def _until_readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)


async def _read_request(reader: asyncio.StreamReader) -> _Links | _NewRole:
    """Read a request. Raises InvalidRequest."""
    try:
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            line = await reader.readline()
    except TimeoutError:
        raise InvalidRequest(f"no request within {_REQUEST_TIMEOUT_S:g} s") from None
    except ValueError:
        raise InvalidRequest(f"the line has more than {MAX_LINE_BYTES} bytes") from None
    try:
        requested = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidRequest("the line is not JSON") from None
    match requested:
        case {"ask": "links", "num_bytes": int(num_bytes)} if len(requested) == 2 and not isinstance(num_bytes, bool):
            return _Links(num_bytes)
        case {"ask": "role", "instance": str(instance), "role": role, **more} if role in _ROLES and not more:
            return _NewRole(instance, Role(role))
        case _:
            raise InvalidRequest(_REQUESTS)


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close and wait until closed; abort on timeout or cancellation, so that no transport stays open."""
    writer.close()
    try:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await writer.wait_closed()
    finally:
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    writer.write(json.dumps(answer).encode() + b"\n")
    async with asyncio.timeout(_WRITE_TIMEOUT_S):
        await writer.drain()
