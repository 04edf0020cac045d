"""--sse-keep-alive-interval: comments while a stream is silent, and none while it is not."""

import asyncio
import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message

from scheduler.api.answer_options import AnswerOptions
from scheduler.api.answer_writer import AnswerWriter
from scheduler.api.piece_writer import PieceWriter
from scheduler.api.sse import SSE
from scheduler.app import build_app
from scheduler.observability.counters import SchedulerCounters
from scheduler.request import GenerationRequest
from scheduler.text.pieces import TextOptions, TextPiece
from scheduler.text_output import TextOutput
from scheduler.tokens import Tokens
from simulation.virtual_time import VirtualTimeLoop
from tests.scheduler.conftest import Serve, Served
from wire.errors import HandoffFailed
from wire.types import SamplingParams

pytestmark = pytest.mark.anyio
DEADLINE_S = 300.0
COMMENT = SSE.comment


async def streamed(served: Served, comments: int, *, leaves: bool = False) -> bytes:
    """Stream a completion; after so many comments let its tokens continue, or disconnect."""
    body = json.dumps({"model": served.model, "prompt": "San", "stream": True}).encode()
    requested, sent, gone = [{"type": "http.request", "body": body, "more_body": False}], bytearray(), asyncio.Event()

    async def receive() -> Message:
        if not requested:
            await gone.wait()
            return {"type": "http.disconnect"}
        return requested.pop()

    async def send(message: Message) -> None:
        sent.extend(message.get("body", b""))
        if sent.count(COMMENT) >= comments:
            (gone if leaves else served.dispatcher.released).set()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "",
        "query_string": b"", "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
        "scheme": "http", "server": ("test", 80), "client": ("test", 1),
    }  # fmt: skip
    async with asyncio.timeout(DEADLINE_S):
        await build_app(served.context)(scope, receive, send)
    return bytes(sent)


@pytest.mark.covers("B.stream.7")
@pytest.mark.parametrize("before", [0, 1])
async def test_a_silent_stream_carries_comments_before_and_between_tokens(serve: Serve, before: int) -> None:
    async with serve("hello world", sse_keep_alive_interval=0.01) as served:
        served.dispatcher.hold_after = before
        text = await streamed(served, comments=2)

    *events, done, end = text.replace(COMMENT, b"").split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in events) == "hello world"
    assert text.startswith(COMMENT) == (before == 0)
    assert served.dispatcher.outcomes == ["finished"]


async def test_an_error_after_a_comment_is_an_event(serve: Serve) -> None:
    async with serve(sse_keep_alive_interval=0.01) as served:
        served.dispatcher.hold_after = served.dispatcher.fail_after = 0
        served.dispatcher.error = HandoffFailed("lost")
        text = await streamed(served, comments=1)

    assert json.loads(text.replace(COMMENT, b"").removeprefix(b"data: "))["error"]["message"] == "lost"


async def test_a_client_that_disconnects_in_silence_cancels_its_request(serve: Serve) -> None:
    async with serve("hello world", sse_keep_alive_interval=0.01) as served:
        served.dispatcher.hold_after = 1
        await streamed(served, comments=1, leaves=True)

        assert served.dispatcher.outcomes == ["cancelled"]


async def test_without_the_flag_a_silent_stream_has_no_comments(serve: Serve) -> None:
    async with serve("hello world") as served:
        assert COMMENT not in await streamed(served, comments=0)


def test_a_comment_is_due_an_interval_after_the_last_write(tokens: Tokens) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        written = runner.run(_written_at(tokens))

    assert written == [(2.0, b"a"), (5.0, COMMENT), (8.0, COMMENT), (9.0, b"b"), (12.0, COMMENT)]


@pytest.mark.parametrize(("turns", "writes"), [(0, [b"ab"]), (1, [b"ab"]), (9, [b"a", b"b"])])
async def test_the_last_piece_is_written_with_the_end_that_follows(
    turns: int, writes: list[bytes], tokens: Tokens
) -> None:
    written: list[bytes] = []
    writer = _writer(tokens, written.append)
    writer.put(TextPiece(0, "a", finish_reason="stop"))
    for _ in range(turns):
        await asyncio.sleep(0)
    await writer.end(None)

    assert written == writes


async def _written_at(tokens: Tokens) -> list[tuple[float, bytes]]:
    """Write after 2 s and 9 s, with a comment due every 3 s; return the time of each write."""
    loop, written = asyncio.get_running_loop(), list[tuple[float, bytes]]()
    began = loop.time()
    writer = _writer(tokens, lambda content: written.append((loop.time() - began, content)))
    loop.call_later(2.0, writer.write, b"a")
    loop.call_later(9.0, writer.write, b"b")
    with writer.comments(3.0):
        await asyncio.sleep(13.0)
    return written


def _writer(tokens: Tokens, write: Callable[[bytes], None]) -> PieceWriter:
    """Return a writer of pieces as their text, with the end mark b."""

    class Stream:
        def start(self, status: int, headers: object) -> None: ...

        def write(self, content: bytes) -> None:
            write(content)

        async def end(self, content: bytes) -> None:
            write(content)

    async def send(message: Message) -> None: ...

    request = GenerationRequest("r", ((1,),), SamplingParams(max_tokens=1), 9.0, 9.0)
    output = TextOutput(request, TextOptions(), tokens, SchedulerCounters())
    ended_by_b = dataclasses.replace(SSE, end=b"b")
    shape: Any = SimpleNamespace(
        stream_format=ended_by_b, opening=lambda *_: b"", event=lambda piece, *_: piece.text.encode()
    )
    return PieceWriter(shape, AnswerOptions(), output, AnswerWriter(Stream(), send, "an-id", {}))
