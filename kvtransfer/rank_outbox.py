"""The outgoing messages of one end of a rank's socket: sent from a queue by one thread, so that callers never block."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from kvtransfer.rank_messages import RankMessage
from processes.rank_channel import Channel

_TICK_S = 0.25
_JOIN_S = 6.0


class RankOutbox:
    """Owner of the queue and of its thread. Any thread may queue messages; they are sent in the order of the calls."""

    def __init__(
        self, channel: Channel[RankMessage], name: str, *, send_s: float, failed: Callable[[Exception], None],
        tick: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """A send fails after `send_s`. `tick` is called four times a second, `failed` once, after an error.

        Both are called on the thread; after `failed` nothing is sent any more.
        """
        self._channel, self._send_s, self._failed, self._tick = channel, send_s, failed, tick
        self._messages: queue.SimpleQueue[tuple[RankMessage, bytes] | None] = queue.SimpleQueue()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start sending the queued messages."""
        self._thread.start()

    def send(self, kind: RankMessage, payload: bytes = b"") -> None:
        """Queue a message; dropped after a send has failed."""
        if not self._over:
            self._messages.put((kind, payload))

    def close(self) -> None:
        """Send the queued messages, and end the thread. Idempotent."""
        self._messages.put(None)
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._send_queued()
        except Exception as error:  # noqa: BLE001  the thread's outermost frame: peers would wait forever
            self._over = True
            self._failed(error)

    def _send_queued(self) -> None:
        due = time.monotonic()
        while True:
            wait_s = None if self._tick is None else max(0.0, due - time.monotonic())
            with contextlib.suppress(queue.Empty):
                message = self._messages.get(timeout=wait_s)
                if message is None:
                    return
                self._channel.send(*message, timeout_s=self._send_s)
            if self._tick is not None and time.monotonic() >= due:
                self._tick()
                due = time.monotonic() + _TICK_S
