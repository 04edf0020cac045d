"""--sse-keep-alive-interval: comments while a stream is silent, and none while it is not."""

import asyncio
import json
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
from scheduler.text.pieces import TextOptions
from scheduler.text_output import TextOutput
from scheduler.tokens import Tokens
from tests.scheduler.conftest import Serve, Served
from tests.scheduler.virtual_time import VirtualTimeLoop
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
    assert served.dispatcher.endings == ["finished"]


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

        assert served.dispatcher.endings == ["cancelled"]


async def test_without_the_flag_a_silent_stream_has_no_comments(serve: Serve) -> None:
    async with serve("hello world") as served:
        assert COMMENT not in await streamed(served, comments=0)


def test_a_comment_is_due_an_interval_after_the_last_write(tokens: Tokens) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        written = runner.run(_written_at(tokens))

    assert written == [(2.0, b"a"), (5.0, COMMENT), (8.0, COMMENT), (9.0, b"b"), (12.0, COMMENT)]


async def _written_at(tokens: Tokens) -> list[tuple[float, bytes]]:
    """Write after 2 s and 9 s, with a comment due every 3 s; return the time of each write."""
    loop, written = asyncio.get_running_loop(), list[tuple[float, bytes]]()
    began = loop.time()

    class Stream:
        def start(self, status: int, headers: object) -> None: ...

        def write(self, content: bytes) -> None:
            written.append((loop.time() - began, content))

        async def end(self, content: bytes) -> None: ...

    async def send(message: Message) -> None: ...

    request = GenerationRequest("r", ((1,),), SamplingParams(max_tokens=1), 9.0, 9.0)
    output = TextOutput(request, TextOptions(), tokens, SchedulerCounters())
    shape: Any = SimpleNamespace(stream_format=SSE)
    writer = PieceWriter(shape, AnswerOptions(), output, AnswerWriter(Stream(), send, "an-id", {}))
    loop.call_later(2.0, writer.write, b"a")
    loop.call_later(9.0, writer.write, b"b")
    with writer.comments(3.0):
        await asyncio.sleep(13.0)
    return written
