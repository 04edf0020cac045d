"""A server that stores responses, over a scripted dispatcher."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from scheduler.app import build_app
from scheduler.app_context import AppContext
from scheduler.http.keys import Keys
from scheduler.http.listener import listen
from scheduler.http.server import serve as serve_app
from scheduler.responses_store.sqlite_rows import StoreLimits
from scheduler.responses_store.sqlite_store import SqliteStore
from testing.scheduler.scripted_dispatcher import ScriptedDispatcher
from tests.scheduler.test_tool_calls import ended

LIMITS = StoreLimits(max_responses=100, max_bytes=10**6, ttl_s=1000.0)
DEADLINE_S = 10.0


@dataclasses.dataclass(slots=True)
class StoringServer:
    """A server on a socket, the store behind it, and how to stop it."""

    url: str
    context: AppContext
    store: SqliteStore
    dispatcher: ScriptedDispatcher
    model: str
    stop: asyncio.Event
    task: "asyncio.Task[None]"
    limits: StoreLimits = LIMITS

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        """Return the official client with this key."""
        http = openai.DefaultAsyncHttpxClient(trust_env=False)
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, http_client=http, max_retries=0)

    async def write_protect(self, is_protected: bool) -> None:
        """Let all writes to the file fail, or work again."""
        connection = self.store._opened._connection
        await self.store._call(lambda: connection.execute(f"PRAGMA query_only = {is_protected}").fetchall())

    async def stored_ids(self) -> list[str]:
        """Return the ids of all stored responses, of all owners."""
        connection = self.store._opened._connection
        return await self.store._call(lambda: [one for (one,) in connection.execute("SELECT id FROM response")])


@asynccontextmanager
async def storing(
    serve: Any, folder: Path, answer: str = "hello world", *, keys: Keys | None = None, stores: bool = True,
    limits: StoreLimits = LIMITS, stops_in_s: float = DEADLINE_S, **options: Any,
) -> AsyncIterator[StoringServer]:  # fmt: skip
    """A server whose store is in `folder`; when it is closed nothing runs."""
    store, got = await SqliteStore.open(folder / "store", limits), list[Any]()
    async with serve(ended(answer, got), **options) as served:
        got.append(served)
        context = dataclasses.replace(served.context, responses=store if stores else None, keys=keys or Keys())
        stop, bound = asyncio.Event(), listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        running = serve_app(build_app(context), bound, context.drain, shutdown_timeout_s=stops_in_s, stop=stop)
        task = asyncio.create_task(running)
        try:
            yield StoringServer(url, context, store, served.dispatcher, served.model, stop, task)
        finally:
            stop.set()
            served.dispatcher.released.set()
            await asyncio.wait_for(task, DEADLINE_S)
            await context.background.close()
            await store.close()
        assert context.drain.active == 0
