"""The writer of events by itself: what starts a response and what ends it."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from scheduler.api.sse import ClientGone, EventWriter, until_disconnect
from scheduler.http.exchange import HttpExchange
from tests.scheduler.virtual_time import virtual


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
async def test_work_for_a_disconnected_client_is_not_begun() -> None:
    began, scope = list[str](), {"type": "http", "method": "POST", "http_version": "1.1"}
    transport: Any = None
    exchange = HttpExchange(scope, transport, [], lambda: None, lambda: None, keep_alive=True, expects=False)
    exchange.leave("the client went away")

    async def work() -> None:
        began.append("work")

    with pytest.raises(ClientGone, match="the client went away"):
        await until_disconnect(exchange.receive, work())
    await asyncio.sleep(0)

    assert began == []
