"""The operator's door: an abstract Unix socket of the scheduler that `pdserve links` asks.

    asker      {"ask": "links", "num_bytes": 67108864} ------------>   one line, then it only listens
               <------ {"measuring": PAIR, "number": 1, "of": 4}       scheduler
               <------ {"link": PAIR with its figures}
               <------ {"end": true}   or   {"error": "words"}

Only processes of this host and network namespace reach it, and only those of the scheduler's user or of root are heard.
An asker that goes away ends what it asked for. Why a door of its own: docs/adr/0005-operator-door.md.
"""

import asyncio
import contextlib
import json
import os
import socket
import struct
from typing import Any

from scheduler.links.probe import LinkProbe, Pair, PairLink
from telemetry.logs import EventLogger
from wire.errors import InvalidRequest, Overloaded, PdserveError

log = EventLogger("door")

MAX_LINE_BYTES = 64 * 2**10
_ASK_TIMEOUT_S = 5.0
_WRITE_TIMEOUT_S = 5.0
_NO_DESCRIPTOR_S = 1.0
_MAX_ASKERS = 8
_ROOT = 0


def door_name(host: str, port: int) -> str:
    """Return the abstract name, without the leading NUL, of the door of the scheduler that listens on host:port."""
    return f"pdserve-scheduler-{host}-{port}"


def is_same_user(sock: socket.socket) -> bool:
    """Tell whether the process at the other end of a Unix socket is of our user or of root."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] in (_ROOT, os.geteuid())


async def keep_door(name: str, links: LinkProbe) -> None:
    """Answer askers until cancelled; a name that is taken costs the scheduler its door and nothing else."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        try:
            bound.bind("\0" + name)
        except OSError as error:
            log.warning("no_door", name=name, reason=error, lost="pdserve links cannot measure")
            return
        bound.listen()
        bound.setblocking(False)
        async with asyncio.TaskGroup() as askers:
            door = _Door(links, askers)
            while True:  # not asyncio's server: of Python 3.11, it loses one that is accepted as it closes
                await _until_readable(bound)
                try:
                    door.take(bound)
                except OSError as error:
                    log.warning("no_asker_taken", reason=error)
                    await asyncio.sleep(_NO_DESCRIPTOR_S)


class _Door:
    """Owner of the askers under way."""

    def __init__(self, links: LinkProbe, askers: asyncio.TaskGroup) -> None:
        self._links, self._askers = links, askers
        self._num_askers = 0

    def take(self, bound: socket.socket) -> None:
        """Hear the next asker in a task of its own; a stranger, or one too many, is cut. Raises OSError."""
        asker, _ = bound.accept()
        if self._num_askers >= _MAX_ASKERS or not is_same_user(asker):
            asker.close()
            return
        self._num_askers += 1
        serving = self._askers.create_task(self._serve(asker))
        serving.add_done_callback(lambda _: self._forget(asker))

    def _forget(self, asker: socket.socket) -> None:
        """Close what never got a transport, cancelled or failed before that; that of any other is closed."""
        self._num_askers -= 1
        asker.close()

    async def _serve(self, asker: socket.socket) -> None:
        try:
            await self._hear(asker)
        except Exception as error:  # noqa: BLE001 - the asker's outermost frame: its defect ends no scheduler
            log.error("asker_failed", exc=error)

    async def _hear(self, asker: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=asker, limit=MAX_LINE_BYTES)
        try:
            with contextlib.suppress(OSError, TimeoutError):
                await self._answer(reader, writer)
        finally:
            await _hang_up(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            num_bytes = await _read_ask(reader)
        except PdserveError as error:
            await _say(writer, {"error": str(error)})
            return
        work = asyncio.create_task(self._tell_links(writer, num_bytes))
        gone = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = [task for task in (work, gone) if not task.cancel()]
            await asyncio.gather(work, gone, return_exceptions=True)
        if work in ended:
            work.result()

    async def _tell_links(self, writer: asyncio.StreamWriter, num_bytes: int) -> None:
        number, of = 0, len(self._links.pairs())
        try:
            async with contextlib.aclosing(self._links.measure(num_bytes)) as told:
                async for one in told:
                    if isinstance(one, Pair):
                        number += 1
                        await _say(writer, {"measuring": pair_json(one), "number": number, "of": of})
                    else:
                        await _say(writer, {"link": link_json(one)})
        except (InvalidRequest, Overloaded) as error:
            await _say(writer, {"error": str(error)})
        else:
            await _say(writer, {"end": True})


def pair_json(pair: Pair) -> dict[str, str]:
    """Return a pair as the door tells it."""
    return {
        "prefill": pair.prefill,
        "prefill_address": pair.sender.expected.address,
        "decode": pair.decode,
        "decode_address": pair.receiver.expected.address,
    }


def link_json(measured: PairLink) -> dict[str, Any]:
    """Return a link as the door tells it; figures are null where none are known."""
    link = measured.link
    figures: dict[str, Any] = dict.fromkeys(
        ("transport", "state", "round_trip_s", "bytes_per_s", "bytes_sent", "failures", "fallbacks")
    )
    if link is not None:
        figures = {name: getattr(link, name) for name in figures}
        for name in ("transport", "round_trip_s", "bytes_per_s"):  # empty or zero: not known
            figures[name] = figures[name] or None
    passed_over = [] if link is None else list(link.passed_over)
    told = {**pair_json(measured.pair), **figures, "digests": measured.digests}
    return {**told, "passed_over": passed_over, "not_offered": list(measured.not_offered), "error": measured.error}


async def _until_readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)


async def _read_ask(reader: asyncio.StreamReader) -> int:
    """Return the bytes to measure with. Raises InvalidRequest."""
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            line = await reader.readline()
    except TimeoutError:
        raise InvalidRequest(f"nothing was asked within {_ASK_TIMEOUT_S:g} s") from None
    except ValueError:
        raise InvalidRequest(f"a line of more than {MAX_LINE_BYTES} bytes") from None
    try:
        asked = json.loads(line)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{len(line)} bytes are no JSON") from None
    match asked:
        case {"ask": "links", "num_bytes": int(num_bytes)} if len(asked) == 2 and not isinstance(num_bytes, bool):
            return num_bytes
        case _:
            raise InvalidRequest('the one thing to ask is {"ask": "links", "num_bytes": N}')


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    """Close, and wait until it is closed: an asker that reads no more, or the scheduler's end, leaves nothing open."""
    writer.close()
    try:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await writer.wait_closed()
    finally:
        writer.transport.abort()


async def _say(writer: asyncio.StreamWriter, told: dict[str, Any]) -> None:
    writer.write(json.dumps(told).encode() + b"\n")
    async with asyncio.timeout(_WRITE_TIMEOUT_S):
        await writer.drain()
