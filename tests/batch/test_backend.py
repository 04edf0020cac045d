"""What every BatchBackend does, over an app in this process and over a live server."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from batch.app_backend import AppBackend
from batch.backend import BatchBackend
from batch.url_backend import UrlBackend
from tests.batch.app_server import DEADLINE_S, serving
from wire.errors import Unavailable

pytestmark = pytest.mark.anyio
OpenBackend = Callable[[ASGIApp], AbstractAsyncContextManager[BatchBackend]]


@asynccontextmanager
async def _by_app(app: ASGIApp) -> AsyncIterator[BatchBackend]:
    yield AppBackend(app)


@asynccontextmanager
async def _by_url(app: ASGIApp) -> AsyncIterator[BatchBackend]:
    async with serving(app) as url, UrlBackend(url, "key-0123456789") as backend:
        yield backend


@pytest.fixture(params=[_by_app, _by_url], ids=["app", "url"])
def open_backend(request: pytest.FixtureRequest) -> OpenBackend:
    """Return `over(app)`, which opens a BatchBackend."""
    opened: OpenBackend = request.param
    return opened


class App:
    """Returns the request it got; /hold holds the answer back until the client leaves, /half ends in the middle."""

    def __init__(self) -> None:
        self.requested, self.gone = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        body = message["body"]
        while message["more_body"]:
            message = await receive()
            body += message["body"]
        self.requested.set()
        if scope["path"] == "/hold":
            assert (await receive())["type"] == "http.disconnect"
            self.gone.set()
            return
        if scope["path"] == "/error":
            raise ZeroDivisionError("not for the caller")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        reported = {"method": scope["method"], "path": scope["path"], "query": scope["query_string"].decode()}
        content = json.dumps(reported | {"body": body.decode(), "headers": headers}).encode()
        start: dict[str, Any] = {"type": "http.response.start", "status": 418, "headers": [(b"X-Told", b"yes")]}
        if scope["path"] == "/half":
            start["headers"] = [(b"content-length", b"100000")]
            await send(start)
            await send({"type": "http.response.body", "body": content, "more_body": True})
            return
        await send(start)
        await send({"type": "http.response.body", "body": content[:5], "more_body": True})
        await send({"type": "http.response.body", "body": content[5:]})


async def test_the_answer_is_the_apps_own_whatever_its_status(open_backend: OpenBackend) -> None:
    async with open_backend(App()) as backend:
        answer = await backend.send("POST", "/v1/x?a=b", '{"text": "café"}'.encode(), {"X-Request-Id": "r1"})

    reported = json.loads(answer.body)
    assert (answer.status, answer.headers["x-told"]) == (418, "yes")
    assert (reported["method"], reported["path"], reported["query"]) == ("POST", "/v1/x", "a=b")
    assert json.loads(reported["body"]) == {"text": "café"}
    assert reported["headers"]["content-type"] == "application/json"
    assert reported["headers"]["content-length"] == "17"
    assert reported["headers"]["x-request-id"] == "r1"


async def test_a_get_has_no_body_and_no_content_type(open_backend: OpenBackend) -> None:
    async with open_backend(App()) as backend:
        reported = json.loads((await backend.send("GET", "/health")).body)

    assert (reported["method"], reported["body"]) == ("GET", "")
    assert "content-type" not in reported["headers"]


async def test_a_large_body_arrives_whole(open_backend: OpenBackend) -> None:
    body = json.dumps({"text": "x" * 2**20}).encode()

    async with open_backend(App()) as backend:
        reported = json.loads((await backend.send("POST", "/", body)).body)

    assert reported["body"].encode() == body


async def test_many_requests_are_answered_at_once(open_backend: OpenBackend) -> None:
    async with open_backend(App()) as backend:
        answers = await asyncio.gather(*(backend.send("POST", f"/{i}", b"{}") for i in range(50)))

    assert [json.loads(answer.body)["path"] for answer in answers] == [f"/{i}" for i in range(50)]


async def test_a_cancelled_request_is_cancelled_at_the_server(open_backend: OpenBackend) -> None:
    app = App()
    async with open_backend(app) as backend, asyncio.timeout(DEADLINE_S):
        sending = asyncio.ensure_future(backend.send("POST", "/hold", b"{}"))
        await app.requested.wait()
        sending.cancel()

        with pytest.raises(asyncio.CancelledError):
            await sending
        await app.gone.wait()


async def test_an_answer_cut_in_the_middle_is_unavailable(open_backend: OpenBackend) -> None:
    async with open_backend(App()) as backend:
        with pytest.raises(Unavailable):
            await backend.send("POST", "/half", b"{}")


async def test_the_request_after_a_cut_one_is_answered(open_backend: OpenBackend) -> None:
    async with open_backend(App()) as backend:
        with pytest.raises(Unavailable):
            await backend.send("POST", "/half", b"{}")

        assert (await backend.send("POST", "/whole", b"{}")).status == 418
