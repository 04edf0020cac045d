"""A span and the trace that it belongs to; `traceparent` is the header of the W3C's Trace Context that names both."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Attribute = str | bool | int | float | Sequence[str]

_MAX_STATE = 512
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a client's trace stands: its id (16 bytes), the span that calls us (8 bytes), and whether it is kept."""

    trace_id: bytes
    parent_id: bytes
    is_sampled: bool
    state: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work with its times in nanoseconds since 1970. `error` names what failed it, "" where nothing did.

    `parent_id` is empty for a trace's first span; `is_server` marks one that answers a request.
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
    """Return what the headers say, None where they are no trace context: a new trace begins then.

    Source: https://www.w3.org/TR/trace-context/ (version ff and ids of zeros alone are invalid; of versions to come the
    four known parts count).
    """
    match = _PARENT.fullmatch(traceparent.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, parent_id = bytes.fromhex(match[2]), bytes.fromhex(match[3])
    if not any(trace_id) or not any(parent_id):
        return None
    state = tracestate if len(tracestate) <= _MAX_STATE and tracestate.isascii() and tracestate.isprintable() else ""
    return TraceContext(trace_id, parent_id, bool(int(match[4], 16) & _SAMPLED), state)
