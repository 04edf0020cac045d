"""Sends spans to a collector from its own thread; the thread that queues them never waits.

request --put--> queue (bounded) --thread--> batch --encode, send--> collector
                   full: dropped, counted           not accepted: one retry, then dropped, counted
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from telemetry.capped_logs import CappedLog
from telemetry.logs import EventLogger
from telemetry.otlp_transport import ExportFailed, OtlpTransport
from telemetry.spans import Span

_log = EventLogger("traces")

MAX_QUEUED = 8192
MAX_BATCH = 512
PERIOD_S = 1.0
SEND_S = 5.0
CLOSE_S = 2.0


class SpanExporter:
    """Owns the queue and the thread. `encode` builds a request, `rejected` counts rejected spans in a response."""

    def __init__(
        self, transport: OtlpTransport, encode: Callable[[Sequence[Span]], bytes], rejected: Callable[[bytes], int], *,
        max_queued: int = MAX_QUEUED, period_s: float = PERIOD_S, send_s: float = SEND_S,
    ) -> None:  # fmt: skip
        self._transport, self._encode, self._rejected = transport, encode, rejected
        self._max_queued, self._period_s, self._send_s = max_queued, period_s, send_s
        self._queue: deque[Span] = deque()
        self._lock = threading.Lock()
        self._full, self._closing = threading.Event(), threading.Event()
        self._ends_at: float | None = None
        self._capped_log = CappedLog(_log)
        self.num_sent = self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="span-exporter", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[Span]) -> None:
        """Queue the spans of one trace, or drop them all if they do not fit. Never waits. Safe from any thread."""
        with self._lock:
            if self._closing.is_set() or len(self._queue) + len(spans) > self._max_queued:
                self.num_dropped += len(spans)
                return
            self._queue.extend(spans)
            is_full = len(self._queue) >= MAX_BATCH
        if is_full:
            self._full.set()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send the queued spans within `timeout_s`, drop the rest, and stop the thread. Idempotent."""
        with self._lock:
            self._ends_at = self._ends_at or time.monotonic() + timeout_s
        self._closing.set()
        self._full.set()
        self._thread.join(timeout_s)
        self._transport.close()  # aborts a send in progress
        self._thread.join(timeout_s)
        with self._lock:
            self.num_dropped += len(self._queue)
            self._queue.clear()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._full.wait(self._period_s)
            self._full.clear()
            self._send_all()
        self._send_all()

    def _send_all(self) -> None:
        while batch := self._next():
            try:
                rejected = self._rejected(self._send(self._encode(batch)))
            except ExportFailed as error:
                self._count(0, len(batch))
                self._capped_log.warning("spans_rejected", "collector", error=error, spans=len(batch))
            except Exception as error:  # noqa: BLE001 - the thread's outermost frame: traces may fail, requests not
                self._count(0, len(batch))
                self._capped_log.warning("spans_lost", type(error).__name__, error=repr(error), spans=len(batch))
            else:
                self._count(len(batch) - rejected, rejected)

    def _next(self) -> list[Span]:
        with self._lock:
            if self._left_s() <= 0:
                return []
            return [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]

    def _send(self, payload: bytes) -> bytes:
        """Send a batch; if the collector does not accept it, retry once after a period."""
        try:
            return self._transport.send(payload, self._timeout_s())
        except ExportFailed as error:
            if not error.may_retry or self._closing.wait(self._period_s):
                raise
        return self._transport.send(payload, self._timeout_s())

    def _timeout_s(self) -> float:
        return max(0.001, min(self._send_s, self._left_s()))

    def _left_s(self) -> float:
        """Return the seconds until the deadline set by `close`."""
        return self._send_s if self._ends_at is None else self._ends_at - time.monotonic()

    def _count(self, sent: int, dropped: int) -> None:
        with self._lock:
            self.num_sent += sent
            self.num_dropped += dropped
