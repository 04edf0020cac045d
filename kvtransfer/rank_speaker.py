"""What one end of a rank's socket says: from a queue, by one thread, so that who says something never waits."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from kvtransfer.rank_messages import RankMessage
from wire.rank_channel import Channel

_TICK_S = 0.25
_JOIN_S = 6.0


class Speaker:
    """Owner of the queue and of its thread. Any thread may say something; it goes out in the order of the calls."""

    def __init__(
        self, channel: Channel[RankMessage], name: str, *, say_s: float, failed: Callable[[Exception], None],
        tick: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """The other end has `say_s` to take a message. `tick` is called four times a second, `failed` once, at the end.

        Both are called on the thread; after `failed` nothing is said any more.
        """
        self._channel, self._say_s, self._failed, self._tick = channel, say_s, failed, tick
        self._lines: queue.SimpleQueue[tuple[RankMessage, bytes] | None] = queue.SimpleQueue()
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to say what is in the queue."""
        self._thread.start()

    def say(self, said: RankMessage, payload: bytes = b"") -> None:
        """Say something; silent once that failed."""
        if not self._over:
            self._lines.put((said, payload))

    def close(self) -> None:
        """Say what is still in the queue, and end the thread. Idempotent."""
        self._lines.put(None)
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            self._speak()
        except Exception as error:  # noqa: BLE001  the thread's outermost frame: an end that went mute would hang others
            self._over = True
            self._failed(error)

    def _speak(self) -> None:
        due = time.monotonic()
        while True:
            wait_s = None if self._tick is None else max(0.0, due - time.monotonic())
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=wait_s)
                if line is None:
                    return
                self._channel.send(*line, timeout_s=self._say_s)
            if self._tick is not None and time.monotonic() >= due:
                self._tick()
                due = time.monotonic() + _TICK_S
