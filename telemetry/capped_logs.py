"""A rate limit for log lines that unauthenticated peers can trigger: a few per reason and window, the rest counted."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from telemetry.logs import EventLogger

LINES = 16
WINDOW_S = 60.0


@dataclass(slots=True)
class _Window:
    """`written` holds the texts logged in this window; `left_out` counts the lines that were suppressed."""

    ends: float
    written: set[str] = field(default_factory=set)
    left_out: int = 0


class CappedLog:
    """Writes each text once per window, and at most `lines` texts per reason. Thread-safe.

    A window starts with the first line of its reason. The number of suppressed lines is logged with the next line, of
    any reason, after the window's end. A reason must be a constant of the caller, never a peer's text: each one uses
    memory until its window ends.
    """

    def __init__(
        self, log: EventLogger, *, lines: int = LINES, window_s: float = WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._log, self._lines, self._window_s, self._clock = log, lines, window_s, clock
        self._windows: dict[str, _Window] = {}
        self._lock = threading.Lock()

    def warning(self, event: str, reason: str, /, **fields: object) -> None:
        """Log an event an operator should look at, unless its reason has reached the limit of this window."""
        if self._may_write(reason, fields):
            self._log.warning(event, **fields)

    def info(self, event: str, reason: str, /, **fields: object) -> None:
        """Log an event an operator may want, unless its reason has reached the limit of this window."""
        if self._may_write(reason, fields):
            self._log.info(event, **fields)

    def _may_write(self, reason: str, fields: dict[str, object]) -> bool:
        text, now = " ".join(map(str, fields.values())), self._clock()
        with self._lock:
            ended = {name: one.left_out for name, one in self._windows.items() if now >= one.ends}
            for name in ended:
                del self._windows[name]
            window = self._windows.setdefault(reason, _Window(now + self._window_s))
            is_allowed = text not in window.written and len(window.written) < self._lines
            if is_allowed:
                window.written.add(text)
            else:
                window.left_out += 1
        for name, left_out in ended.items():
            if left_out:
                self._log.warning("log_lines_suppressed", of=name, lines=left_out, within_s=self._window_s)
        return is_allowed
