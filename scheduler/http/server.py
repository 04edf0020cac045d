"""Serve the app on one address until a signal, then let running requests finish."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from scheduler.http.certificate import Https
from scheduler.http.drain import Drain
from scheduler.http.listener import BACKLOG
from scheduler.http.protocol import HttpProtocol
from telemetry.logs import EventLogger

_log = EventLogger("server")
_KEEP_ALIVE_S = 30
_CLOSE_S = 2
_READY_POLL_S = 0.05
_JOIN_S = 5.0
"""After this a scheduler accepts clients even if it is not ready, so that they get a reason if no scheduler is."""


@dataclass(frozen=True, slots=True)
class SharedSocket:
    """The listening socket of several schedulers, and whether this one is ready to serve its clients."""

    socket: socket.socket
    is_ready: Callable[[], bool]


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: pdserve's handlers drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no signal handlers."""
        yield


async def serve(
    app: ASGIApp, bound: socket.socket, drain: Drain, *, shutdown_timeout_s: float, stop: asyncio.Event | None = None,
    https: Https | None = None, client_timeout_s: float = 30.0, shared: SharedSocket | None = None,
) -> None:  # fmt: skip
    """Serve until SIGTERM, SIGINT or `stop`; then refuse new requests and give running ones `shutdown_timeout_s`.

    A second signal ends them at once. The socket is closed on return. With `https`, plain HTTP is not served. A client
    that reads too little in `client_timeout_s` is disconnected. Clients of `shared`, on which other schedulers
    also listen, are served too, once this one is ready or `_JOIN_S` has passed, until the first signal.
    """
    tls: dict[str, Any] = {} if https is None else {
        "ssl_keyfile": https.keyfile, "ssl_certfile": https.certfile, "ssl_ca_certs": https.ca_certs,
        "ssl_cert_reqs": https.cert_reqs,
    }  # fmt: skip
    protocol: Any = functools.partial(HttpProtocol, reader_s=client_timeout_s)
    server = _Uvicorn(
        uvicorn.Config(
            app, http=protocol, ws="none", lifespan="off", access_log=False, log_config=None, server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_CLOSE_S, **tls,
        )
    )  # fmt: skip
    logging.getLogger("uvicorn").addHandler(logging.NullHandler())  # the gate logs failures
    first, second = stop or asyncio.Event(), asyncio.Event()
    with bound, _handle_signals(first, second):
        serving = asyncio.create_task(server.serve([bound]))
        stopping = asyncio.create_task(_wait_drained(first, second, drain, shutdown_timeout_s))
        sharing = None if shared is None else asyncio.create_task(_share(server, shared, first))
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if sharing is not None:
                sharing.cancel()
            server.config.timeout_graceful_shutdown = 0 if drain.active else _CLOSE_S  # 0: cancel them now
            server.should_exit = True
            await serving


async def _share(server: uvicorn.Server, shared: SharedSocket, first: asyncio.Event) -> None:
    """Accept clients of the shared socket beside other schedulers, once ready or after `_JOIN_S`, until draining."""
    with shared.socket as bound:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_S):
                while not shared.is_ready():  # noqa: ASYNC110 - readiness also changes with time alone
                    await asyncio.sleep(_READY_POLL_S)
        config = server.config
        protocol_class: Any = config.http_protocol_class
        protocol = functools.partial(
            protocol_class, config=config, server_state=server.server_state, app_state=server.lifespan.state
        )
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(protocol, sock=bound, ssl=config.ssl, backlog=BACKLOG)
        try:
            await first.wait()
        finally:
            listening.close()


async def _wait_drained(first: asyncio.Event, second: asyncio.Event, drain: Drain, timeout_s: float) -> None:
    """Return when the process may exit: no request is running, time is up, or a second signal arrived."""
    await first.wait()
    drain.begin()
    _log.info("draining", active=drain.active, timeout_s=timeout_s)
    idle, hurried = asyncio.create_task(drain.wait_idle(timeout_s)), asyncio.create_task(second.wait())
    try:
        await asyncio.wait((idle, hurried), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (idle, hurried):
            task.cancel()
    _log.info("drained", active=drain.active)


@contextlib.contextmanager
def _handle_signals(first: asyncio.Event, second: asyncio.Event) -> Generator[None, None, None]:
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        (second if first.is_set() else first).set()

    for number in handled:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
