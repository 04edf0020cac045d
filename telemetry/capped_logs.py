"""Log lines that a stranger can cause as often as it likes: few of each reason in a window, the rest counted."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from telemetry.logs import EventLogger

LINES = 16
WINDOW_S = 60.0


@dataclass(slots=True)
class _Window:
    """`said` are the texts of this window; `left_out` lines more were not written."""

    ends: float
    said: set[str] = field(default_factory=set)
    left_out: int = 0


class CappedLog:
    """Writes each text once a window, and no more than `lines` texts of one reason. Thread-safe.

    A window starts with the first line of its reason. What it left out is said with the next line of any reason that
    comes after its end. Reasons are words of the caller's own, never a peer's: each one costs memory till its window
    ends.
    """

    def __init__(
        self, log: EventLogger, *, lines: int = LINES, window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._log, self._lines, self._window_s, self._clock = log, lines, window_s, clock
        self._windows: dict[str, _Window] = {}
        self._lock = threading.Lock()

    def warning(self, event: str, reason: str, /, **fields: object) -> None:
        """Log an event an operator should look at, unless its reason's lines of this window are written."""
        if self._may_say(reason, fields):
            self._log.warning(event, **fields)

    def info(self, event: str, reason: str, /, **fields: object) -> None:
        """Log an event an operator may want, unless its reason's lines of this window are written."""
        if self._may_say(reason, fields):
            self._log.info(event, **fields)

    def _may_say(self, reason: str, fields: dict[str, object]) -> bool:
        text, now = " ".join(map(str, fields.values())), self._clock()
        with self._lock:
            over = {name: one.left_out for name, one in self._windows.items() if now >= one.ends}
            for name in over:
                del self._windows[name]
            window = self._windows.setdefault(reason, _Window(now + self._window_s))
            said = text not in window.said and len(window.said) < self._lines
            if said:
                window.said.add(text)
            else:
                window.left_out += 1
        for name, left_out in over.items():
            if left_out:
                self._log.warning("log_lines_left_out", of=name, lines=left_out, within_s=self._window_s)
        return said
