"""Prometheus metrics of a running batch, and of the engine in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from batch.backend import BatchBackend
from batch.runner import BatchProgress
from wire.errors import ConfigError, PdserveError

_ENGINE_S = 5.0
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@contextlib.asynccontextmanager
async def serve_metrics(
    host: str, port: int, progress: Callable[[], BatchProgress | None], engine: BatchBackend | None
) -> AsyncIterator[int]:
    """Serve GET /metrics on a separate thread; yield the port. Raises ConfigError if it cannot listen."""
    registry, loop = CollectorRegistry(), asyncio.get_running_loop()
    registry.register(_BatchCollector(progress))

    def page() -> bytes:
        own = generate_latest(registry)
        if engine is None:
            return own
        scrape = asyncio.run_coroutine_threadsafe(engine.send("GET", "/metrics"), loop)
        try:
            return own + scrape.result(_ENGINE_S).body
        except (PdserveError, FutureTimeout, CancelledError):  # CancelledError: the batch has ended meanwhile
            scrape.cancel()
            return own

    try:
        server = _Server((host, port), page)
    except OSError as error:
        raise ConfigError(f"the metrics cannot be served on {host}:{port}: {error.strerror}") from error
    serving = loop.run_in_executor(None, server.serve_forever, 0.1)
    try:
        yield server.server_port
    finally:
        await loop.run_in_executor(None, server.shutdown)
        await serving
        server.server_close()


class _BatchCollector(Collector):
    def __init__(self, progress: Callable[[], BatchProgress | None]) -> None:
        self._progress = progress

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the last BatchProgress."""
        last = self._progress()
        if last is None:
            return
        yield GaugeMetricFamily("pdserve_batch_file_lines", "lines of the input", value=last.total)
        lines = CounterMetricFamily("pdserve_batch_lines", "answered lines by outcome", labels=["outcome"])
        lines.add_metric(["good"], last.done - last.errors)
        lines.add_metric(["error"], last.errors)
        yield lines
        tokens = CounterMetricFamily(
            "pdserve_batch_tokens", "tokens of the answers, as counted in usage", labels=["kind"]
        )
        tokens.add_metric(["prompt"], last.prompt_tokens)
        tokens.add_metric(["completion"], last.completion_tokens)
        yield tokens


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], page: Callable[[], bytes]) -> None:
        self.page = page
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0
    server: _Server

    def do_GET(self) -> None:
        """Send the metrics page."""
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(404)
            return
        body = self.server.page()
        self.send_response(200)
        self.send_header("Content-Type", _TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: stderr shows the progress bar."""
