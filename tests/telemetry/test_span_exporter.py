"""Spans reach a collector, over HTTP and gRPC; a collector that is slow, broken or gone only loses spans."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from telemetry.otlp_endpoint import read_endpoint
from telemetry.otlp_messages import encode, rejected
from telemetry.otlp_transport import ExportFailed, open_transport
from telemetry.span_exporter import SpanExporter
from telemetry.spans import Span
from tests.telemetry.collector import WAIT_S, Collector, grpc_collector, http_collector

Serve = Callable[[Collector], AbstractContextManager[Collector]]
KINDS = pytest.mark.parametrize(("serve", "scheme", "path"), [
    (http_collector, "http", "/v1/traces"), (grpc_collector, "grpc", ""),
])  # fmt: skip


def _span(number: int = 1) -> Span:
    return Span(b"t" * 16, number.to_bytes(8), b"", f"span {number}", 1, 2)


@contextmanager
def _exporter_to(url: str, *, environ: dict[str, str] | None = None, max_queued: int = 100) -> Iterator[SpanExporter]:
    transport = open_transport(read_endpoint(url, environ or {}))
    exporter = SpanExporter(
        transport, lambda spans: encode(spans, "test"), rejected, max_queued=max_queued, period_s=0.01
    )
    try:
        yield exporter
    finally:
        exporter.close(WAIT_S)


@KINDS
def test_spans_arrive_unchanged(serve: Serve, scheme: str, path: str) -> None:
    parent = Span(
        b"t" * 16, b"a" * 8, b"p" * 8, "request", 1_000, 9_000, {"text": "x", "count": 3, "share": 0.5, "is": True,
        "all": ("stop", "length")}, is_server=True, error="InstanceLost", state="k=v",
    )  # fmt: skip
    with serve(Collector()) as collector:
        environ = {"OTEL_EXPORTER_OTLP_HEADERS": "x-team=a"}
        with _exporter_to(f"{scheme}://127.0.0.1:{collector.port}{path}", environ=environ) as exporter:
            exporter.put([parent, _span()])
            assert collector.arrived.wait(WAIT_S)
        assert (exporter.num_sent, exporter.num_dropped) == (2, 0)

    found, other = collector.spans
    assert (found.trace_id, found.span_id, found.parent_span_id) == (b"t" * 16, b"a" * 8, b"p" * 8)
    assert (found.name, found.start_time_unix_nano, found.end_time_unix_nano) == ("request", 1_000, 9_000)
    assert (found.kind, found.status.code, found.status.message, found.trace_state) == (
        SpanMessage.SPAN_KIND_SERVER, Status.STATUS_CODE_ERROR, "InstanceLost", "k=v",
    )  # fmt: skip
    values = {pair.key: pair.value for pair in found.attributes}
    assert (values["text"].string_value, values["count"].int_value, values["share"].double_value) == ("x", 3, 0.5)
    assert values["is"].WhichOneof("value") == "bool_value"
    assert [value.string_value for value in values["all"].array_value.values] == ["stop", "length"]
    assert (other.kind, other.status.code) == (SpanMessage.SPAN_KIND_INTERNAL, Status.STATUS_CODE_UNSET)
    (sent,) = collector.requests[0].resource_spans
    assert {pair.key: pair.value.string_value for pair in sent.resource.attributes}["service.name"] == "test"
    assert collector.headers[0]["x-team"] == "a"


@KINDS
def test_a_rejected_batch_is_sent_once_more(serve: Serve, scheme: str, path: str) -> None:
    with serve(Collector(statuses=[503])) as collector:
        with _exporter_to(f"{scheme}://127.0.0.1:{collector.port}{path}") as exporter:
            exporter.put([_span()])
            collector.arrived.wait(WAIT_S)
            _until(lambda: exporter.num_sent)
        assert [span.name for span in collector.spans] == ["span 1"]


def test_a_batch_rejected_for_good_is_dropped_and_counted() -> None:
    with http_collector(Collector(statuses=[400])) as collector:
        with _exporter_to(f"http://127.0.0.1:{collector.port}/v1/traces") as exporter:
            exporter.put([_span(1), _span(2)])
            _until(lambda: exporter.num_dropped)
            exporter.put([_span(3)])
            _until(lambda: exporter.num_sent)
        assert (exporter.num_sent, exporter.num_dropped) == (1, 2)
        assert [span.name for span in collector.spans] == ["span 3"]


def test_spans_a_collector_rejects_from_a_batch_are_dropped() -> None:
    with http_collector(Collector(rejects=2)) as collector:
        with _exporter_to(f"http://127.0.0.1:{collector.port}/v1/traces") as exporter:
            exporter.put([_span(number) for number in range(1, 6)])
            _until(lambda: exporter.num_sent)
        assert (exporter.num_sent, exporter.num_dropped) == (3, 2)


@KINDS
def test_a_silent_collector_leaves_no_thread_and_drops_spans(serve: Serve, scheme: str, path: str) -> None:
    hold = threading.Event()
    with serve(Collector(hold=hold)) as collector:
        transport = open_transport(read_endpoint(f"{scheme}://127.0.0.1:{collector.port}{path}", {}))
        exporter = SpanExporter(
            transport, lambda spans: encode(spans, "test"), rejected, max_queued=4, period_s=0.01, send_s=WAIT_S
        )
        exporter.put([_span()])
        assert collector.arrived.wait(WAIT_S)
        for _ in range(10):
            exporter.put([_span(), _span(), _span()])  # one trace fits; a trace is kept whole or dropped

        exporter.close(0.1)
        exporter._thread.join(WAIT_S / 2)  # shorter than the collector delays its answer

        assert not exporter._thread.is_alive()
        assert (exporter.num_sent, exporter.num_dropped) == (0, 31)
        hold.set()


@KINDS
def test_an_absent_collector_only_loses_spans(serve: Serve, scheme: str, path: str) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        with _exporter_to(f"{scheme}://127.0.0.1:{reserved.getsockname()[1]}{path}") as exporter:
            exporter.put([_span()])
            _until(lambda: exporter.num_dropped)
    assert not exporter._thread.is_alive()


def test_an_unexpected_error_does_not_end_the_thread() -> None:
    def encode_once(spans: object) -> bytes:
        if not broken:
            broken.append(True)
            raise RuntimeError("a defect")
        return b""

    broken: list[bool] = []
    taken: list[bytes] = []

    class Taking:
        def send(self, payload: bytes, timeout_s: float) -> bytes:
            taken.append(payload)
            return b""

        def close(self) -> None: ...

    exporter = SpanExporter(Taking(), encode_once, rejected, period_s=0.01)
    exporter.put([_span()])
    _until(lambda: exporter.num_dropped)
    exporter.put([_span()])
    exporter.close(WAIT_S)

    assert (taken, exporter.num_sent, exporter.num_dropped) == ([b""], 1, 1)


def test_queued_spans_are_sent_at_close_and_none_after() -> None:
    with http_collector(Collector()) as collector:
        transport = open_transport(read_endpoint(f"http://127.0.0.1:{collector.port}/v1/traces", {}))
        exporter = SpanExporter(transport, lambda spans: encode(spans, "test"), rejected, period_s=WAIT_S)
        exporter.put([_span()])

        exporter.close(WAIT_S)
        exporter.put([_span()])

        assert (exporter.num_sent, exporter.num_dropped) == (1, 1)
        assert not exporter._thread.is_alive()


def test_an_error_contains_no_header() -> None:
    with http_collector(Collector(statuses=[401])) as collector:
        environ = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret"}
        transport = open_transport(read_endpoint(f"http://127.0.0.1:{collector.port}/v1/traces", environ))
        with pytest.raises(ExportFailed, match=r"^status 401$") as refused:
            transport.send(b"", 5.0)
    assert not refused.value.may_retry


def _until(condition: Callable[[], object]) -> None:
    ticks = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if condition():
            return
        ticks.wait(0.01)
    raise TimeoutError("the condition never held")
