"""A server on a real socket that sends a script piece by piece, on a clock that it moves itself.

It moves the clock before each piece, then waits until the client has read the clock. So the gaps are those of the
script, on any machine.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

DEADLINE_S = 300.0


class SteppedClock:
    """Seconds that only `move` changes; `looked` is set whenever the clock is read."""

    def __init__(self) -> None:
        self.now = 100.0
        self.looked = asyncio.Event()

    def __call__(self) -> float:
        self.looked.set()
        return self.now


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes sent `after_s` seconds after those before; None: the connection is cut."""

    after_s: float
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and the pieces sent, one after the other."""

    pieces: Sequence[Sent]
    status: int = 200


@dataclass(slots=True)
class Requests:
    """What was received: paths, headers in lower case and bodies."""

    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)


def event(fields: object) -> bytes:
    """Return a server-sent event."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def completion(text: str = "", finish: str | None = None) -> bytes:
    """Return an event of /v1/completions."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(prompt: int, output: int) -> bytes:
    """Return the usage event and the last line."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}}) + b"data: [DONE]\n\n"


def streamed(gaps_s: Sequence[float], *, prompt: int = 7, tokens_per_piece: int = 1) -> Answer:
    """Return an answer with a piece after each gap, the last of which ends it."""
    pieces = [Sent(gap_s, completion(f"w{i} ")) for i, gap_s in enumerate(gaps_s[:-1])]
    end = completion("end", "length") + usage(prompt, tokens_per_piece * len(gaps_s))
    return Answer([*pieces, Sent(gaps_s[-1], end)])


@contextlib.asynccontextmanager
async def serving(answer: Callable[[str], Answer], clock: SteppedClock) -> AsyncIterator[tuple[str, Requests]]:
    """Serve `answer` of each path; yield the base URL and what was received."""
    requests, handlers = Requests(), set[asyncio.Task[None]]()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path = await _read(reader, requests)
            await _write(writer, answer(path), clock)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(handle(reader, writer))
        handlers.add(task)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", requests
        finally:
            for task in handlers:
                task.cancel()
            await asyncio.gather(*handlers, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, requests: Requests) -> str:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    requests.paths.append(head[0].split()[1])
    requests.headers.append(headers)
    requests.bodies.append(json.loads(body or b"{}"))
    return requests.paths[-1]


async def _write(writer: asyncio.StreamWriter, answer: Answer, clock: SteppedClock) -> None:
    head = f"HTTP/1.1 {answer.status} X\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
    for piece in answer.pieces:
        if piece.data is None:
            await writer.drain()
            return
        clock.now += piece.after_s
        clock.looked.clear()
        writer.write(f"{len(piece.data):x}\r\n".encode() + piece.data + b"\r\n")
        await writer.drain()
        if answer.status == 200 and b"\n\n" in piece.data:
            await asyncio.wait_for(clock.looked.wait(), DEADLINE_S)
    writer.write(b"0\r\n\r\n")
    await writer.drain()
