"""Encode spans as OTLP protobuf messages and decode a collector's response. Needs the package opentelemetry-proto."""

import os
from collections.abc import Iterator, Mapping, Sequence

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from telemetry.spans import Attribute, Span


def encode(spans: Sequence[Span], service_name: str) -> bytes:
    """Return one ExportTraceServiceRequest."""
    resource = Resource(attributes=_key_values({"service.name": service_name, "process.pid": os.getpid()}))
    scope = ScopeSpans(scope=InstrumentationScope(name="pdserve"), spans=map(_message, spans))
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=resource, scope_spans=[scope])]
    ).SerializeToString()


def rejected(answer: bytes) -> int:
    """Return the number of spans that a collector's successful response reports as rejected."""
    try:
        return int(ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans)
    except DecodeError:
        return 0


def _message(span: Span) -> SpanMessage:
    error = Status(code=Status.STATUS_CODE_ERROR, message=span.error) if span.error else None
    return SpanMessage(
        trace_id=span.trace_id,
        span_id=span.span_id,
        parent_span_id=span.parent_id,
        trace_state=span.state,
        name=span.name,
        kind=SpanMessage.SPAN_KIND_SERVER if span.is_server else SpanMessage.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=_key_values(span.attributes),
        status=error,
    )


def _key_values(attributes: Mapping[str, Attribute]) -> Iterator[KeyValue]:
    return (KeyValue(key=key, value=_value(value)) for key, value in attributes.items())


def _value(value: Attribute) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=value)
        case _:
            return AnyValue(array_value=ArrayValue(values=[AnyValue(string_value=text) for text in value]))
