"""Two schedulers of the same instances, and clients of their HTTP APIs."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from flags.options import EngineOptions
from scheduler.config import SchedulerConfig, SchedulerOptions
from scheduler.serving import Cluster, Serving, open_serving
from tests.scheduler.fake_cluster import TABLE_DIGEST, FakeCluster

DEADLINE_S = 60.0
KEEP = {"X-Pdserve-Keep-Stream": "true"}
COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "San", "max_tokens": 40, "return_token_ids": True},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "return_token_ids": True},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40},
}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


class Client:
    """Sends one request, and reads the events of the answer until it is complete, or the client leaves."""

    def __init__(
        self, app: ASGIApp, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str], key: str,
        method: str = "",
    ) -> None:  # fmt: skip
        self.status, self.headers = 0, dict[str, str]()
        self.content = b""
        self._requested = [] if body is None else [json.dumps({"stream": True, **body}).encode()]
        self._gone, self._changed = asyncio.Event(), asyncio.Event()
        path, _, query = path.partition("?")
        given = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
        scope: Scope = {
            "type": "http", "method": method or ("GET" if body is None else "POST"), "path": path,
            "raw_path": path.encode(), "root_path": "", "query_string": query.encode(), "http_version": "1.1",
            "scheme": "http",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "server": ("test", 80), "client": ("test", 1),
        }  # fmt: skip
        self._task: asyncio.Task[None] = asyncio.create_task(self._run(app, scope))
        self._task.add_done_callback(lambda _: self._changed.set())

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events so far, without the end mark."""
        lines = [line for line in self.content.decode().splitlines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    @property
    def stream_id(self) -> str:
        """The id by which it can be resumed."""
        return self.headers["x-pdserve-stream"]

    async def read(self, num_events: int) -> list[dict[str, Any]]:
        """Return the events once there are so many."""
        async with asyncio.timeout(DEADLINE_S):
            while len(self.events) < num_events:
                assert not self._task.done(), self.content
                self._changed.clear()
                await self._changed.wait()
        return self.events

    async def whole(self) -> list[dict[str, Any]]:
        """Return all events of the complete answer."""
        async with asyncio.timeout(DEADLINE_S):
            await self._task
        return self.events

    async def _run(self, app: ASGIApp, scope: Scope) -> None:
        await app(scope, self._receive, self._send)

    def leave(self) -> None:
        """Disconnect."""
        self._gone.set()

    async def _receive(self) -> Message:
        if self._requested:
            return {"type": "http.request", "body": self._requested.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        self.content += message.get("body", b"")
        self._changed.set()


@dataclass
class Pair:
    """Two schedulers of the same instances."""

    instances: FakeCluster
    schedulers: list[Serving]
    running: list["asyncio.Task[None]"]

    def die(self, at: int) -> None:
        """Simulate the death of a scheduler: its sessions end."""
        self.running[at].cancel()

    def post(self, path: str, *, at: int = 0, key: str = "a", keep: bool = True, **changes: Any) -> Client:
        body = BODIES[path] | changes
        return Client(self.schedulers[at].app, path, body, KEEP if keep else {}, key)

    def resume(self, stream_id: str, after: object, *, at: int = 1, key: str = "a") -> Client:
        return Client(self.schedulers[at].app, f"/v1/streams/{stream_id}?after={after}", None, {}, key)

    async def metrics(self) -> Counter[str]:
        """Return the sums of both schedulers' metrics without buckets."""
        values = Counter[str]()
        for serving in self.schedulers:
            page = Client(serving.app, "/metrics", None, {}, "a")
            await page.whole()
            lines = [line for line in page.content.decode().splitlines() if line[0] != "#" and "_bucket" not in line]
            values.update({name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)})
        return values

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110 - what instances do has no event
                await asyncio.sleep(0.005)

    async def freed(self) -> None:
        """Return when no prompt is on an instance."""
        await self.until(lambda: not any(instance.prompts for instance in self.instances.instances))


@asynccontextmanager
async def pair(model: Path, roles: str = "PD", **options: Any) -> AsyncIterator[Pair]:
    instances = FakeCluster(roles, vocab_size=250)
    for index in range(len(roles)):
        instances.boot(index)
    config = SchedulerConfig(EngineOptions(model=str(model)), SchedulerOptions(**{"orphan_limit": 10.0} | options))
    cluster = Cluster(tuple(instances.expected), instances.network.connect, TABLE_DIGEST)
    async with AsyncExitStack() as opened, asyncio.TaskGroup() as tasks:
        schedulers = [
            await opened.enter_async_context(open_serving(config, cluster, {"PDSERVE_API_KEY": "a\nb"}))
            for _ in range(2)
        ]
        running = [tasks.create_task(serving.run()) for serving in schedulers]
        served = Pair(instances, schedulers, running)
        await served.until(lambda: all(serving.control.ready() for serving in schedulers))
        yield served
        for task in running:
            task.cancel()
