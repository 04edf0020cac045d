"""An instance's own /health and /metrics, on --http-port (off by default)."""

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

GAUGES = {
    "blocks_total": "KV blocks of the pool",
    "blocks_used": "KV blocks in use, including those of probes",
    "blocks_probe": "KV blocks held by the scheduler's probes",
    "blocks_cached": "KV blocks that hold a reusable prefix",
    "running": "Sequences in the batch",
    "waiting": "Sequences waiting in the instance",
    "uncomputed_tokens": "Prompt tokens accepted and not yet computed",
    "held_prompts": "Prompts that are computed and not yet handed off",
    "progress_age_s": "Seconds since the engine last made progress",
    "slowest_turn_s": "Longest recent time between two progress marks, in seconds",
    "starved_s": "Seconds in which the process was stopped or waited for a CPU, since its start",
    "steps": "Steps of the engine since the start",
    "step_seconds": "Seconds spent in steps since the start",
    "tokens_computed": "Tokens of prompts and outputs computed by the model since the start",
    "kv_bytes_sent": "KV bytes sent over all links since the start",
    "kv_bytes_received": "KV bytes received over all links since the start",
    "preemptions": "Prompts preempted for lack of KV blocks since the start",
    "blocks_swapped": "KV blocks of preempted prompts that have copies outside the pool",
    "prefix_tokens_sought": "Prompt tokens queried in the prefix cache since the start",
    "prefix_tokens_found": "Prompt tokens found in the prefix cache since the start",
}


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
        """Return one gauge for each entry of GAUGES."""
        load = self._load()
        return [
            GaugeMetricFamily(f"pdserve_instance_{name}", help, value=float(getattr(load, name)))
            for name, help in GAUGES.items()
        ]


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
