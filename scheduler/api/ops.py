"""GET /version, /load and /ping, for monitoring tools."""

import functools
import importlib.metadata

from starlette.requests import Request
from starlette.responses import Response

from scheduler.api.errors import json_response
from scheduler.api.health import health
from scheduler.app_context import AppContext


@functools.cache
def own_version() -> str:
    """Return the version of the installed distribution, `unknown` if it is not installed."""
    try:
        return importlib.metadata.version("pdserve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


async def version(context: AppContext, _: Request) -> Response:
    """Return the version of pdserve."""
    return json_response({"version": own_version()})


async def load(context: AppContext, _: Request) -> Response:
    """Return how many requests for text, vectors or scores this process is running."""
    return json_response({"server_load": context.drain.active})


async def ping(context: AppContext, request: Request) -> Response:
    """Answer as /health does."""
    return await health(context, request)
