"""An ASGI app behind a real server on a free port of this loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Generator

import uvicorn
from starlette.types import ASGIApp

from security.tls import TlsFiles

DEADLINE_S = 300.0


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the signals to the test."""
        yield


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, files: TlsFiles | None = None) -> AsyncIterator[str]:
    """Serve `app`, with `files` by HTTPS, and yield its URL."""
    config = uvicorn.Config(
        app, port=0, lifespan="off", ws="none", log_config=None, timeout_graceful_shutdown=1,
        ssl_certfile=None if files is None else files.cert, ssl_keyfile=None if files is None else files.key,
    )  # fmt: skip
    server = _Server(config)
    task = asyncio.ensure_future(server.serve())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not server.started:  # noqa: ASYNC110 - uvicorn reports it in no other way
                await asyncio.sleep(0.001)
        yield f"{'http' if files is None else 'https'}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        async with asyncio.timeout(DEADLINE_S):
            await task
