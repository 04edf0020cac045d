"""The writer of events by itself: what starts and ends a response, and comments in silence, on a virtual clock."""

import asyncio

import orjson
import pytest
from starlette.types import Message, Receive, Scope

from scheduler.api.sse import COMMENT, DONE, EventWriter
from scheduler.app import build_app
from tests.scheduler.conftest import Serve
from tests.scheduler.virtual_time import virtual
from wire.errors import HandoffFailed


class Sent:
    """What was sent, and when."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.at: list[float] = []

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)
        self.at.append(asyncio.get_running_loop().time())

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


@virtual
async def test_the_response_starts_with_the_first_event_and_ends_once() -> None:
    sent = Sent()
    writer = EventWriter(sent)
    await writer.write(b"a")
    await writer.write(b"b")
    await writer.end()

    assert [message["type"].rpartition(".")[2] for message in sent.messages] == ["start", "body", "body", "body"]
    assert [message.get("more_body") for message in sent.messages] == [None, True, True, False]


@virtual
async def test_silence_carries_a_comment_at_every_interval_and_events_put_it_off() -> None:
    sent, loop = Sent(), asyncio.get_running_loop()
    began = loop.time()
    writer = EventWriter(sent)
    async with writer.kept_alive(5.0):
        await asyncio.sleep(12)
        await writer.write(b"event")
        await asyncio.sleep(4.9)
        await writer.write(b"event")
        await asyncio.sleep(5.1)
        await writer.write(DONE)
        await writer.end()
    await asyncio.sleep(60)

    assert sent.body == COMMENT * 2 + b"event" * 2 + COMMENT + DONE
    times = [at - began for at, message in zip(sent.at, sent.messages, strict=True) if message.get("body") == COMMENT]
    assert times == pytest.approx([5, 10, 21.9])


@virtual
async def test_without_an_interval_nothing_is_said() -> None:
    sent = Sent()
    writer = EventWriter(sent)
    async with writer.kept_alive(None):
        await asyncio.sleep(1000)

    assert sent.messages == []


@pytest.mark.anyio
async def test_an_error_behind_a_comment_is_an_event(serve: Serve) -> None:
    async with serve("hello", sse_keep_alive_interval=0.01) as served:
        served.dispatcher.hold_after = served.dispatcher.fail_after = 0
        served.dispatcher.error = HandoffFailed("lost")
        sent, commented = Sent(), asyncio.Event()

        async def send(message: Message) -> None:
            await sent(message)
            if message.get("body") == COMMENT:
                commented.set()

        body = orjson.dumps({"model": served.model, "prompt": "hi", "stream": True})
        asking = asyncio.ensure_future(build_app(served.front)(_post(body), _told(body), send))
        async with asyncio.timeout(10.0):
            await commented.wait()
            served.dispatcher.released.set()
            await asking

    assert sent.messages[0]["status"] == 200
    assert sent.body.startswith(COMMENT)
    assert b'"message":"lost"' in sent.body
    assert b"[DONE]" not in sent.body


def _post(body: bytes) -> Scope:
    return {
        "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"", "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))], "root_path": "",
    }  # fmt: skip


def _told(body: bytes) -> Receive:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Future()

    return receive
