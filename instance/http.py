"""An instance's own /health and /metrics, on --http-port (off by default)."""

import contextlib
from collections.abc import Callable, Iterator

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from telemetry.metric_families import Namespace, families
from wire.load import LOADS, LoadSnapshot


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


class LoadCollector:
    """Export the current load as gauges."""

    def __init__(self, load: Callable[[], LoadSnapshot]) -> None:
        self._load = load

    def collect(self) -> list[Metric]:
        """Return one gauge for each number of the load."""
        return list(families(LOADS, Namespace.INSTANCE, [((), self._load())]))


def build_server(
    host: str, port: int, *, load: Callable[[], LoadSnapshot], healthy: Callable[[], bool]
) -> uvicorn.Server:
    """Return a server whose `serve` runs as a task; set `should_exit` to end it."""
    registry = CollectorRegistry()
    registry.register(LoadCollector(load))

    async def answer_health(_: Request) -> Response:
        return PlainTextResponse("" if healthy() else "the engine makes no progress", 200 if healthy() else 503)

    async def answer_metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    app = Starlette(routes=[Route("/health", answer_health), Route("/metrics", answer_metrics)])
    return _Server(uvicorn.Config(app, host=host, port=port, log_level="warning", lifespan="off"))
