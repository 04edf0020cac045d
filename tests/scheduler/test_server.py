"""The app on a real socket: clients that disconnect, shutting down, busy ports, and the official openai client."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Receive, Scope, Send

from scheduler.app import build_app
from scheduler.http.drain import Drain
from scheduler.http.listener import listen
from scheduler.http.server import SharedSocket
from scheduler.http.server import serve as serve_app
from testing.scheduler.scripted_dispatcher import ScriptedDispatcher
from wire.errors import ConfigError, HandoffFailed

pytestmark = pytest.mark.anyio

DEADLINE_S = 300.0
MESSAGES: Any = [{"role": "user", "content": "hello"}]


class Listening:
    """A server on a free port, the dispatcher behind it and how to stop it."""

    def __init__(self, served: Any, port: int, stop: asyncio.Event, task: "asyncio.Task[None]") -> None:
        self.context, self.port, self.stop, self.task = served.context, port, stop, task
        self.dispatcher: ScriptedDispatcher = served.dispatcher
        self.model: str = served.model
        self.url = f"http://127.0.0.1:{port}"

    async def post_raw(self, path: str, body: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request over its own socket and return the socket."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write((head + body).encode())
        await writer.drain()
        return reader, writer

    def body(self, stream: bool) -> str:
        """Return a completion request."""
        flag = "true" if stream else "false"
        return f'{{"model": "{self.model}", "prompt": "hi", "stream": {flag}}}'


Listen = Callable[..., AbstractAsyncContextManager[Listening]]


@pytest.fixture
def listening(serve: Any) -> Listen:
    """Return `listening(says, timeout_s=…)`."""
    return _listening(serve)


def _listening(opened: Any) -> Listen:
    @asynccontextmanager
    async def run(answer: str = "hello world", *, timeout_s: float = DEADLINE_S) -> AsyncIterator[Listening]:
        async with opened(answer) as served:
            bound = listen("127.0.0.1", 0)
            port, stop = bound.getsockname()[1], asyncio.Event()
            app = build_app(served.context)
            task = asyncio.create_task(
                serve_app(app, bound, served.context.drain, shutdown_timeout_s=timeout_s, stop=stop)
            )
            try:
                yield Listening(served, port, stop, task)
            finally:
                stop.set()
                served.dispatcher.released.set()
                await asyncio.wait_for(task, DEADLINE_S)

    return run


async def within(waited: Any) -> Any:
    """Wait for something, until the deadline."""
    return await asyncio.wait_for(waited, DEADLINE_S)


@pytest.mark.covers("B.cancel.1")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 1])
async def test_a_client_that_goes_away_cancels_its_request(listening: Listen, stream: bool, tokens_before: int) -> None:
    async with listening() as server:
        server.dispatcher.hold_after = tokens_before
        _, writer = await server.post_raw("/v1/completions", server.body(stream))
        await within(server.dispatcher.held.wait())
        writer.transport.abort()
        await within(server.dispatcher.closed.wait())

        assert server.dispatcher.outcomes == ["cancelled"]
        assert await server.context.drain.wait_idle(DEADLINE_S)
        assert b'pdserve_request_endings_total{ending="cancelled"} 1.0' in server.context.metrics.render()


async def test_an_error_in_mid_stream_ends_it_without_done(listening: Listen) -> None:
    async with listening() as server:
        server.dispatcher.fail_after, server.dispatcher.error = 1, HandoffFailed("lost")
        reader, writer = await server.post_raw("/v1/completions", server.body(stream=True))
        answer = await within(reader.readuntil(b"0\r\n\r\n"))
        writer.close()

        assert b'"message":"lost"' in answer
        assert b"[DONE]" not in answer


@pytest.mark.covers("B.shutdown.1", "B.shutdown.2")
async def test_shutting_down_lets_streams_finish_and_refuses_new_requests(listening: Listen) -> None:
    async with listening("hello world") as server:
        server.dispatcher.hold_after = 1
        reader, writer = await server.post_raw("/v1/completions", server.body(stream=True))
        await within(server.dispatcher.held.wait())
        server.stop.set()
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            server.context.drain.begin()
            refused = await client.post("/v1/completions", content=server.body(False))
            ready = await client.get("/ready")
        server.dispatcher.released.set()
        answer = await within(reader.readuntil(b"[DONE]"))
        writer.close()
        await within(server.task)

        assert (refused.status_code, ready.status_code) == (503, 503)
        assert b"world" in answer
        assert server.dispatcher.outcomes == ["finished"]


@pytest.mark.parametrize("timeout_s", [0.01, 0.0])
async def test_a_stream_beyond_the_shutdown_timeout_is_cancelled(listening: Listen, timeout_s: float) -> None:
    async with listening(timeout_s=timeout_s) as server:
        server.dispatcher.hold_after = 1
        reader, writer = await server.post_raw("/v1/completions", server.body(stream=True))
        await within(server.dispatcher.held.wait())
        server.stop.set()
        await within(server.task)
        answer = await within(reader.read())
        writer.close()

        assert b"shutting down" in answer
        assert b"[DONE]" not in answer
        assert server.dispatcher.outcomes == ["cancelled"]


async def test_a_second_signal_does_not_wait(listening: Listen) -> None:
    async with listening(timeout_s=1000) as server:
        server.dispatcher.hold_after = 1
        _, writer = await server.post_raw("/v1/completions", server.body(stream=True))
        await within(server.dispatcher.held.wait())
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        await within(server.task)
        writer.close()

        assert server.dispatcher.outcomes == ["cancelled"]


@pytest.mark.parametrize("drains", [False, True])
async def test_a_cancelled_server_ends_its_requests_and_leaves_no_task(drains: bool) -> None:
    before, drain, stop = asyncio.all_tasks(), Drain(), asyncio.Event()
    begun, ended = asyncio.Event(), asyncio.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        with drain:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    bound = listen("127.0.0.1", 0)
    address = bound.getsockname()[:2]
    serving = asyncio.create_task(serve_app(answer, bound, drain, shutdown_timeout_s=DEADLINE_S, stop=stop))
    _, writer = await asyncio.open_connection(*address)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await within(begun.wait())
    if drains:
        stop.set()
        async with asyncio.timeout(DEADLINE_S):
            while not drain.draining:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)

    serving.cancel()
    await within(asyncio.wait({serving}))
    await within(ended.wait())
    writer.close()
    await writer.wait_closed()

    assert serving.cancelled()
    async with asyncio.timeout(DEADLINE_S):
        while asyncio.all_tasks() - before:  # noqa: ASYNC110 - the last ones are about to end
            await asyncio.sleep(0)


async def test_a_busy_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            listen("127.0.0.1", port)


async def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 9000)


async def test_the_official_client_chats_streams_completes_and_lists(listening: Listen) -> None:
    async with listening("hello 你好") as server:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="EMPTY", http_client=openai.DefaultAsyncHttpxClient(trust_env=False)
        ) as client:
            chat = await client.chat.completions.create(model=server.model, messages=MESSAGES)
            stream = await client.chat.completions.create(
                model=server.model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            text = await client.completions.create(model=server.model, prompt="hi", max_tokens=1, temperature=0)
            models = [model.id async for model in client.models.list()]
            model = await client.models.retrieve(server.model)
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.completions.create(model="gpt-9", prompt="hi")

        assert chat.choices[0].message.content == "hello 你好"
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello 你好"
        assert chunks[-1].usage == chat.usage
        assert text.choices[0].text == "hello"
        assert (models, model.id) == ([server.model], server.model)
        assert unknown.value.param == "model"


async def test_the_official_client_sees_an_error_in_mid_stream(listening: Listen) -> None:
    async with listening() as server:
        server.dispatcher.fail_after, server.dispatcher.error = 1, HandoffFailed("the KV did not arrive whole")
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="EMPTY", http_client=openai.DefaultAsyncHttpxClient(trust_env=False)
        ) as client:
            stream = await client.completions.create(model=server.model, prompt="hi", stream=True)
            with pytest.raises(openai.APIError, match="the KV did not arrive whole"):
                async for _ in stream:
                    pass


async def test_a_reader_that_stops_reading_is_disconnected(serve: Any, model_folder: Path) -> None:
    async with serve("hello " * 60, client_timeout=0.05) as served:
        bound = listen("127.0.0.1", 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        stop = asyncio.Event()
        task = asyncio.create_task(
            serve_app(
                build_app(served.context),
                bound,
                served.context.drain,
                shutdown_timeout_s=1,
                stop=stop,
                client_timeout_s=0.05,
            )
        )
        body = f'{{"model": "{model_folder}", "prompt": {["hi"] * 60}, "n": 16, "max_tokens": 400, "stream": true}}'
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            reader.connect(bound.getsockname())
            content = body.replace("'", '"')
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            reader.sendall((head + content).encode())
            await within(served.dispatcher.closed.wait())
        stop.set()
        await within(task)

        assert served.dispatcher.outcomes == ["cancelled"]


async def test_a_shared_socket_is_served_while_this_scheduler_can_serve(serve: Any) -> None:
    async with serve("hello") as served:
        bound, shared = (listen("127.0.0.1", 0) for _ in range(2))
        url, stop, ready = f"http://127.0.0.1:{shared.getsockname()[1]}", asyncio.Event(), asyncio.Event()
        for_others = shared.dup()
        task = asyncio.create_task(
            serve_app(
                build_app(served.context), bound, served.context.drain, shutdown_timeout_s=DEADLINE_S, stop=stop,
                shared=SharedSocket(shared, ready.is_set),
            )
        )  # fmt: skip
        async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
            early = asyncio.create_task(client.get(f"{url}/health"))
            assert (await client.get(f"http://127.0.0.1:{bound.getsockname()[1]}/health")).status_code == 200
            assert not early.done(), "another scheduler may take it, until this one is ready"
            ready.set()
            assert (await early).status_code == 200
        stop.set()
        await within(task)

        with socket.create_connection(for_others.getsockname()):  # the others' socket still listens
            for_others.accept()[0].close()
        for_others.close()
