"""Collectors on loopback, over HTTP and over gRPC, that keep the spans they receive."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_S = 300.0


@dataclass(slots=True)
class Collector:
    """The received spans, and how to answer: `statuses` first, then 200. Answers wait until `hold` is set."""

    port: int = 0
    statuses: list[int] = field(default_factory=list)
    rejects: int = 0
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)
    hold: threading.Event | None = None

    @property
    def spans(self) -> list[Span]:
        """All spans so far."""
        scopes = [scope for request in self.requests for sent in request.resource_spans for scope in sent.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def take(self, payload: bytes, headers: dict[str, str]) -> int:
        """Record a request; return the status to answer."""
        self.headers.append(headers)
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 200:
            self.requests.append(ExportTraceServiceRequest.FromString(payload))
        self.arrived.set()
        if self.hold is not None:
            self.hold.wait(WAIT_S)
        return status

    def answer(self) -> bytes:
        """Return the answer to an export."""
        answer = ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = self.rejects
        return answer.SerializeToString()


@contextmanager
def http_collector(collector: Collector) -> Iterator[Collector]:
    """Serve POST /v1/traces."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            payload = self.rfile.read(int(self.headers["content-length"]))
            status = collector.take(payload, {name.lower(): value for name, value in self.headers.items()})
            status = status if self.path == "/v1/traces" else 404
            body = collector.answer()
            try:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # the client has closed the connection

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    collector.port = server.server_port
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def grpc_collector(collector: Collector) -> Iterator[Collector]:
    """Serve TraceService/Export."""

    def export(payload: bytes, context: Any) -> bytes:
        status = collector.take(payload, dict(context.invocation_metadata()))
        if status != 200:
            context.abort(grpc.StatusCode.UNAVAILABLE, "later")
        return collector.answer()

    name = "opentelemetry.proto.collector.trace.v1.TraceService"
    handlers = grpc.method_handlers_generic_handler(name, {"Export": grpc.unary_unary_rpc_method_handler(export)})
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((handlers,))
        collector.port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield collector
        finally:
            server.stop(0).wait(WAIT_S)
