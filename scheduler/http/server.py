"""Serve the app on one address until a signal, then let running requests finish."""

import asyncio
import contextlib
import errno
import functools
import logging
import signal
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from scheduler.http.certificate import Https
from scheduler.http.drain import Drain
from scheduler.http.protocol import HttpProtocol
from telemetry.logs import EventLogger
from wire.errors import ConfigError

_log = EventLogger("server")
_KEEP_ALIVE_S = 30
_CLOSE_S = 2


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: pdserve's drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Install no signal handlers."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Return a bound, listening socket; port 0 is any free one. Raises ConfigError naming a busy port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} cannot be resolved: {error.strerror}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(2048)
    except OSError as error:
        bound.close()
        in_use = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be opened: {error.strerror}"
        raise ConfigError(f"port {port} on {host} {in_use}") from error
    return bound


async def serve(
    app: ASGIApp, bound: socket.socket, drain: Drain, *, shutdown_timeout_s: float, stop: asyncio.Event | None = None,
    https: Https | None = None, client_timeout_s: float = 30.0,
) -> None:  # fmt: skip
    """Serve until SIGTERM, SIGINT or `stop`; then refuse new requests and give running ones `shutdown_timeout_s`.

    A second signal ends them at once. The socket is closed on return. With `https`, plain HTTP is not served. A client
    that reads nothing for `client_timeout_s` is disconnected.
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
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            server.config.timeout_graceful_shutdown = 0 if drain.active else _CLOSE_S  # 0: cancel them now
            server.should_exit = True
            await serving


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
