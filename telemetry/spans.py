"""Spans, and the trace context of W3C's headers `traceparent` and `tracestate`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Attribute = str | bool | int | float | Sequence[str]

_MAX_STATE = 512
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A client's trace: its id (16 bytes), the id of the calling span (8 bytes), and whether the trace is sampled."""

    trace_id: bytes
    parent_id: bytes
    is_sampled: bool
    state: str = ""

    @property
    def header(self) -> str:
        """The value of `traceparent`."""
        return f"00-{self.trace_id.hex()}-{self.parent_id.hex()}-{_SAMPLED if self.is_sampled else 0:02x}"


@dataclass(frozen=True, slots=True)
class Span:
    """One operation, with its times in nanoseconds since 1970. `error` is the reason for a failure, "" on success.

    `parent_id` is empty for a trace's root span; `is_server` marks the span that serves a request.
    """

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    is_server: bool = False
    error: str = ""
    state: str = ""


def read_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Return the headers' trace context, or None if they are invalid: the caller then starts a new trace.

    Source: https://www.w3.org/TR/trace-context/ (version ff and all-zero ids are invalid; of a later version only the
    four known fields are read).
    """
    match = _PARENT.fullmatch(traceparent.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, parent_id = bytes.fromhex(match[2]), bytes.fromhex(match[3])
    if not any(trace_id) or not any(parent_id):
        return None
    state = tracestate if len(tracestate) <= _MAX_STATE and tracestate.isascii() and tracestate.isprintable() else ""
    return TraceContext(trace_id, parent_id, bool(int(match[4], 16) & _SAMPLED), state)
