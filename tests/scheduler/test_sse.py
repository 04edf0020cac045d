"""Writing an answer without waiting, under our server and any other, and clients that disconnect."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from scheduler.api.answer_writer import AnswerWriter, QueuedSend
from scheduler.api.sse import ClientGone, until_disconnect
from scheduler.app import build_app
from scheduler.http.exchange import HttpExchange
from tests.scheduler.conftest import Serve
from tests.scheduler.mixed_ends import Pipe
from tests.scheduler.virtual_time import virtual

SCOPE = {"type": "http", "method": "POST", "http_version": "1.1", "path": "/"}


def own_exchange(transport: Any) -> HttpExchange:
    return HttpExchange(SCOPE, transport, [], lambda: None, lambda: None, keep_alive=True, expects=False)


async def sent_messages(answer: AnswerWriter) -> None:
    answer.start(200, [(b"content-type", b"text/plain")])
    answer.write(b"a")
    answer.write(b"b")
    await answer.end(b"")


@virtual
async def test_under_any_server_the_answer_starts_once_and_ends_once() -> None:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    await sent_messages(answer := AnswerWriter(QueuedSend(send), send, "an-id", {"warning": "careful"}))

    assert [message["type"].rpartition(".")[2] for message in messages] == ["start", "body", "body", "body"]
    assert [message.get("more_body") for message in messages] == [None, True, True, False]
    assert [name for name, _ in messages[0]["headers"]] == [b"content-type", b"x-request-id", b"warning"]
    assert (answer.status, answer.complete) == (200, True)


@virtual
async def test_under_our_server_the_same_answer_is_written_at_once() -> None:
    exchange = own_exchange(pipe := Pipe())
    answer = AnswerWriter(exchange, exchange.send, "an-id", {})
    exchange.pause()  # a client that reads slowly delays only the end
    ending = asyncio.create_task(sent_messages(answer))
    await asyncio.sleep(0)
    before = bytes(pipe.written)
    exchange.resume()
    await ending

    assert before.endswith(b"x-request-id: an-id\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n")
    assert pipe.written == before + b"0\r\n\r\n"
    assert (answer.status, answer.complete, exchange.complete) == (200, True, True)


@virtual
async def test_output_for_a_client_that_has_left_is_dropped() -> None:
    exchange = own_exchange(pipe := Pipe())
    exchange.leave("the client went away")
    await sent_messages(AnswerWriter(exchange, exchange.send, "an-id", {}))

    assert not pipe.written


@virtual
async def test_work_for_a_disconnected_client_is_not_started() -> None:
    began, exchange = list[str](), own_exchange(None)
    exchange.leave("the client went away")

    async def work() -> None:
        began.append("work")

    with pytest.raises(ClientGone, match="the client went away"):
        await until_disconnect(exchange.receive, work())
    await asyncio.sleep(0)

    assert began == []


@pytest.mark.parametrize("is_own_server", [True, False])
@pytest.mark.parametrize("kept_s", [0.0, 5.0])
@virtual
async def test_kept_work_outlives_its_client_for_a_while(kept_s: float, is_own_server: bool) -> None:
    exchange, clock, left = own_exchange(Pipe()), asyncio.get_running_loop().time, list[float]()
    began = clock()

    async def receive() -> Message:
        await asyncio.sleep(1.0)
        return {"type": "http.disconnect"}

    asyncio.get_running_loop().call_later(1.0, exchange.leave, "the client went away")
    with pytest.raises(ClientGone):
        await until_disconnect(
            exchange.receive if is_own_server else receive,
            asyncio.sleep(100.0), kept_s, lambda: left.append(clock() - began),
        )  # fmt: skip

    assert clock() - began == pytest.approx(1.0 + kept_s)
    assert left == ([pytest.approx(1.0)] if kept_s else [])


@pytest.mark.anyio
async def test_a_client_that_leaves_during_its_body_gets_no_answer(serve: Serve) -> None:
    received: list[Message] = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{", "more_body": True}]
    sent = list[Message]()

    async def receive() -> Message:
        return received.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    async with serve() as served:
        await build_app(served.context)({**SCOPE, "path": "/v1/completions", "headers": []}, receive, send)
        page = served.context.metrics.render()

    assert sent == []
    assert b'pdserve_http_requests_total{method="POST",route="/v1/completions",status="499"} 1.0' in page
