"""Do something again and again until a signal, and say each thing that is wrong once."""

import queue
import signal
from collections.abc import Callable, Iterable
from types import FrameType

from ranktable_tools.errors import RanktableError

Say = Callable[[str], None]


class Changes:
    """Says lines when they are others than the time before. Owns what was said last."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._last: tuple[str, ...] = ()

    def say(self, lines: Iterable[str]) -> None:
        """Say those lines that the last call did not have."""
        now = tuple(lines)
        for line in now:
            if line not in self._last:
                self._say(line)
        self._last = now


class Stop:
    """Set by a signal's handler, which may run within `wait` and within itself: it takes no lock that `wait` holds."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """End one wait, that of now or the next."""
        self._told.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Return whether it was set, after `timeout_s` at most."""
        try:
            self._told.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True


def until_signal() -> Stop:
    """Return what SIGTERM and SIGINT set."""
    stop = Stop()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stop


def repeat(turn: Callable[[], Iterable[str]], stop: Stop, every_s: float, say: Say) -> None:
    """Call `turn` until `stop`, every so many seconds; its lines, and the errors of bad turns, are said once."""
    changes, wait_s = Changes(say), 0.0
    while not stop.wait(wait_s):
        wait_s = every_s
        try:
            changes.say(turn())
        except RanktableError as error:
            changes.say((f"trying again: {error}",))
