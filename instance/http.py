"""An instance's own /health and /metrics, on --http-port. Off by default."""

import contextlib
from collections.abc import Callable, Iterator

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from wire.types import LoadSnapshot

GAUGES = (
    "blocks_total", "blocks_used", "blocks_probe", "blocks_cached", "running", "waiting", "uncomputed_tokens",
    "held_prompts", "progress_age_s", "steps", "step_seconds", "kv_bytes_sent", "kv_bytes_received", "preemptions",
)  # fmt: skip


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


class _LoadCollector:
    """Turns the load of now into gauges."""

    def __init__(self, load: Callable[[], LoadSnapshot]) -> None:
        self._load = load

    def collect(self) -> list[Metric]:
        """Return one gauge a figure."""
        load = self._load()
        return [
            GaugeMetricFamily(f"pdserve_instance_{name}", f"LoadSnapshot.{name}", value=float(getattr(load, name)))
            for name in GAUGES
        ]


def build_server(
    host: str, port: int, *, load: Callable[[], LoadSnapshot], healthy: Callable[[], bool]
) -> uvicorn.Server:
    """Return a server to be run as a task; `should_exit` ends it."""
    registry = CollectorRegistry()
    registry.register(_LoadCollector(load))

    async def answer_health(_: Request) -> Response:
        return PlainTextResponse("" if healthy() else "the engine makes no progress", 200 if healthy() else 503)

    async def answer_metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    app = Starlette(routes=[Route("/health", answer_health), Route("/metrics", answer_metrics)])
    return _Server(uvicorn.Config(app, host=host, port=port, log_level="warning", lifespan="off"))
