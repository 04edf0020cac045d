"""A client's trace context is continued as OpenTelemetry's own propagator does."""

import pytest
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from telemetry.spans import read_context

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = [
    f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00", f"00-{TRACE}-{PARENT}-ff", f" 00-{TRACE}-{PARENT}-03 ",
    f"cc-{TRACE}-{PARENT}-01", f"cc-{TRACE}-{PARENT}-01-more", f"00-{TRACE}-{PARENT}-01-more",
    f"ff-{TRACE}-{PARENT}-01",
    f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE[:-1]}-{PARENT}-01", f"00-{TRACE}-{PARENT}",
    f"00-{TRACE.upper()}-{PARENT}-01", f"00-{TRACE}-{PARENT}-1", "", "00", "hello", f"00-{TRACE}-{PARENT}-01\n",
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_headers_are_read_as_opentelemetry_reads_them(header: str) -> None:
    reported = trace.get_current_span(
        TraceContextTextMapPropagator().extract({"traceparent": header})
    ).get_span_context()

    found = read_context(header)

    if not reported.is_valid:
        assert found is None
        return
    assert found is not None
    assert (int.from_bytes(found.trace_id), int.from_bytes(found.parent_id)) == (reported.trace_id, reported.span_id)
    assert found.is_sampled == reported.trace_flags.sampled


def test_a_valid_tracestate_is_kept() -> None:
    states = {state: read_context(HEADERS[0], state) for state in ("a=1,b=2", "x" * 513, "a=ü", "a=1\nb")}

    assert {state: found and found.state for state, found in states.items()} == {
        "a=1,b=2": "a=1,b=2", "x" * 513: "", "a=ü": "", "a=1\nb": "",
    }  # fmt: skip
