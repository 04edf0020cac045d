"""uvicorn's HTTP protocol, less patient: no client holds a connection for ever with half a head or an unwanted body."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 15.0
"""Seconds for a request's head, and for the rest of a body whose request is already answered (413, 404 and the like).

What lies between has its own limits: keep-alive when nothing comes, the body's and the reader's in scheduler/api.
"""


class BoundedProtocol(H11Protocol):
    """Owns one more timer beside uvicorn's keep-alive one, which every byte of a slow client stops."""

    head_s = HEAD_S
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect a head."""
        super().connection_made(transport)
        self._expect(True)

    def data_received(self, data: bytes) -> None:
        """Take bytes; go on waiting if they were not what is expected."""
        super().data_received(data)
        self._expect(self._is_owed)

    def on_response_complete(self) -> None:
        """Wait for what the client still owes."""
        super().on_response_complete()
        self._expect(self._is_owed)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(exc)
        self._expect(False)

    @property
    def _is_owed(self) -> bool:
        """Whether a head has begun, or a body goes on behind its answer."""
        if self.conn.their_state is h11.IDLE:
            return bool(self.conn.trailing_data[0])
        return self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete

    def _expect(self, owed: bool) -> None:
        if owed and self._timer is None:
            self._timer = self.loop.call_later(self.head_s, self.transport.abort)
        elif not owed and self._timer is not None:
            self._timer.cancel()
            self._timer = None
