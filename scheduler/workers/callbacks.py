"""Receives callbacks of decode workers that allocate first and then request the KV: one random path per request.

decode worker --POST http://HOST:PORT/<random> {block ids, remote_host, ...}--> the session that sent it a request
"""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from ranktable_tools.addresses import HostComparer, canonical
from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from wire.errors import HandoffFailed

_capped = CappedLog(EventLogger("workers"))

_MAX_BYTES = 16 * 2**20
_READ_S = 5.0
_FOREIGN_PEER = "it does not come from the worker that got the request"
_FOREIGN_HOST = "the KV is requested for a host other than the one in the worker's URL"


class Callback:
    """One expected callback, from a worker on one of `hosts`."""

    def __init__(self, url: str, hosts: frozenset[str]) -> None:
        self.url = url
        self.hosts = hosts
        self._answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def wait(self) -> dict[str, Any]:
        """Wait for the body of the callback, and return it unchanged. Raises HandoffFailed if it cannot be used."""
        return await self._answer

    def take(self, body: bytes) -> None:
        """Accept the body of the callback."""
        if self._answer.done():
            return
        try:
            self._answer.set_result(self._read(body))
        except HandoffFailed as error:
            self._answer.set_exception(error)

    def cancel(self) -> None:
        """Stop expecting the callback."""
        self._answer.cancel()

    def _read(self, body: bytes) -> dict[str, Any]:
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError:
            found = None
        if not isinstance(found, dict) or not found.get("do_remote_decode"):
            raise HandoffFailed("it called back without requesting any KV")
        host = str(found.get("remote_host"))[:80]
        if canonical(host) not in self.hosts:
            _capped.warning("callback_refused", _FOREIGN_HOST, remote_host=host, reason=_FOREIGN_HOST)
            raise HandoffFailed(f"{_FOREIGN_HOST}: set VLLM_HOST_IP on that worker")
        return found


Expect = Callable[[], contextlib.AbstractAsyncContextManager[Callback]]


class Callbacks:
    """Owner of the listener, which is opened at the first use, and of the expected callbacks."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """`port` 0 is any free port; `host` is an address that decode workers reach."""
        self._host = host
        self._port = port
        self._expected: dict[str, Callback] = {}
        self._runner: web.AppRunner | None = None
        self._opening = asyncio.Lock()

    async def from_host(self, host: str) -> Expect:
        """Return `expect` for callbacks from any address that the name of a worker's host resolves to."""
        return partial(self.expect, await asyncio.to_thread(lambda: HostComparer().resolved(host)))

    @contextlib.asynccontextmanager
    async def expect(self, hosts: frozenset[str]) -> AsyncIterator[Callback]:
        """Expect one callback from a worker on one of `hosts`."""
        await self._open()
        path = f"/{secrets.token_urlsafe(32)}"
        host = f"[{self._host}]" if ":" in self._host else self._host
        callback = self._expected[path] = Callback(f"http://{host}:{self._port}{path}", hosts)
        try:
            yield callback
        finally:
            self._expected.pop(path, None)
            callback.cancel()

    async def close(self) -> None:
        """Close the listener."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _open(self) -> None:
        async with self._opening:
            if self._runner is not None:
                return
            app = web.Application(client_max_size=_MAX_BYTES)
            app.router.add_post("/{path}", self._handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
            await runner.setup()
            await web.TCPSite(runner, self._host, self._port).start()
            self._port = int(runner.addresses[0][1])
            self._runner = runner

    async def _handle(self, request: web.Request) -> web.Response:
        callback = self._expected.get(request.path)
        if callback is None:
            return web.Response(status=404)
        peer = canonical(request.remote or "")
        if peer not in callback.hosts:
            _capped.warning("callback_refused", _FOREIGN_PEER, peer=peer, reason=_FOREIGN_PEER)
            return web.Response(status=403)
        async with asyncio.timeout(_READ_S):
            body = await request.read()
        self._expected.pop(request.path, None)
        callback.take(body)
        return web.Response()
