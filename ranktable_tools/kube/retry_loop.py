"""Repeat a function until a signal, and log each problem once."""

import queue
import signal
from collections.abc import Callable, Iterable
from types import FrameType

from ranktable_tools.errors import RanktableError

Say = Callable[[str], None]


class Changes:
    """Prints lines that differ from the previous call's. Owns the previous lines."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._last: tuple[str, ...] = ()

    def say(self, lines: Iterable[str]) -> None:
        """Print the lines that the previous call did not have."""
        now = tuple(lines)
        for line in now:
            if line not in self._last:
                self._say(line)
        self._last = now


class Stop:
    """Set by a signal handler. The handler may interrupt `wait` or itself, so `set` takes no lock that `wait` holds."""

    def __init__(self) -> None:
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wake up one wait, the current or the next one."""
        self._wakeups.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it was set within `timeout_s`."""
        try:
            self._wakeups.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True


def until_signal() -> Stop:
    """Return the event that SIGTERM and SIGINT set."""
    stop = Stop()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stop


def repeat(turn: Callable[[], Iterable[str]], stop: Stop, every_s: float, say: Say) -> None:
    """Call `turn` periodically until `stop`; its lines and its errors are printed once."""
    changes, wait_s = Changes(say), 0.0
    while not stop.wait(wait_s):
        wait_s = every_s
        try:
            changes.say(turn())
        except RanktableError as error:
            changes.say((f"trying again: {error}",))
