"""Do something again and again until a signal, and say each thing that is wrong once."""

import signal
import threading
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


def until_signal() -> threading.Event:
    """Return what SIGTERM and SIGINT set."""
    stop = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stop


def repeat(turn: Callable[[], Iterable[str]], stop: threading.Event, every_s: float, say: Say) -> None:
    """Call `turn` until `stop`, every so many seconds; its lines, and the errors of bad turns, are said once."""
    changes = Changes(say)
    while not stop.is_set():
        try:
            changes.say(turn())
        except RanktableError as error:
            changes.say((f"trying again: {error}",))
        stop.wait(every_s)
