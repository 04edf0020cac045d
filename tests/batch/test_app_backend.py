"""An app in this process: its exceptions are reported, and one that does not end is cancelled."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from batch.app_backend import AppBackend
from tests.batch.app_server import DEADLINE_S
from wire.errors import Unavailable

pytestmark = pytest.mark.anyio


async def test_an_error_of_the_app_is_unavailable_and_names_only_its_kind() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("a secret")

    with pytest.raises(Unavailable, match=r"POST /x: the app failed with ZeroDivisionError$"):
        await AppBackend(app).send("POST", "/x", b"{}")


async def test_a_silent_app_is_unavailable() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    with pytest.raises(Unavailable, match="before its answer was complete"):
        await AppBackend(app).send("GET", "/x")


async def test_an_app_that_ignores_a_disconnect_is_cancelled() -> None:
    requested, cancelled = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        requested.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    sending = asyncio.ensure_future(AppBackend(app, grace_s=0.01).send("POST", "/x", b"{}"))
    async with asyncio.timeout(DEADLINE_S):
        await requested.wait()
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

    assert cancelled.is_set()


async def test_after_the_answer_the_app_gets_a_disconnect() -> None:
    reported = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})
        reported.append((await receive())["type"])

    answer = await AppBackend(app).send("POST", "/x", b"{}")

    assert (answer.status, answer.body, reported) == (204, b"", ["http.disconnect"])
