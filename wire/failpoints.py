"""Named places where a test makes a process fail, set once by `PDSERVE_FAILPOINTS` when it starts.

    PDSERVE_FAILPOINTS="kv.send.mid=corrupt*1;kv.before_ack=delay:0.5;kv.before_commit=kill9@3"

Actions: kill9, stop (SIGSTOP), raise, delay:SECONDS, corrupt (the caller spoils what it holds). `*N` means the first
N times only, `@N` the N-th time only. Unset, a failpoint costs one call and one truth test.
"""

import functools
import os
import signal
import threading
import time
from dataclasses import dataclass

from wire.errors import ConfigError, InternalError

VARIABLE = "PDSERVE_FAILPOINTS"
_ACTIONS = ("kill9", "stop", "raise", "delay", "corrupt")


@dataclass(frozen=True, slots=True)
class Failpoint:
    """What happens at one named place, on hits `first` to `last` (1-based; last None is for ever)."""

    name: str
    action: str
    seconds: float = 0.0
    first: int = 1
    last: int | None = None


class Failpoints:
    """The failpoints of one process and how often each was hit."""

    def __init__(self, points: tuple[Failpoint, ...] = ()) -> None:
        self._points = {point.name: point for point in points}
        self._hits = dict.fromkeys(self._points, 0)
        self._lock = threading.Lock()

    @classmethod
    def parse(cls, text: str) -> "Failpoints":
        """Read `name=action[:seconds][*count|@hit];…`. Raises ConfigError."""
        return cls(tuple(_parse_one(part.strip()) for part in text.split(";") if part.strip()))

    def hit(self, name: str) -> bool:
        """Pass the place `name`: act as set there. True means that the caller is to corrupt what it holds."""
        if not self._points:
            return False
        return self._act(name)

    def _act(self, name: str) -> bool:
        point = self._points.get(name)
        if point is None:
            return False
        with self._lock:
            self._hits[name] += 1
            hits = self._hits[name]
        if hits < point.first or (point.last is not None and hits > point.last):
            return False
        if point.action == "raise":
            raise InternalError(f"failpoint {name}")
        if point.action == "delay":
            time.sleep(point.seconds)
        elif point.action in ("kill9", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if point.action == "kill9" else signal.SIGSTOP)
        return point.action == "corrupt"


@functools.cache
def process_failpoints() -> Failpoints:
    """Return this process's failpoints, read from the environment at the first call. Raises ConfigError."""
    return Failpoints.parse(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> bool:
    """Pass the place `name` of this process; see Failpoints.hit."""
    return process_failpoints().hit(name)


def _parse_one(part: str) -> Failpoint:
    name, equals, rest = part.partition("=")
    first, last = 1, None
    try:
        if "@" in rest:
            rest, _, hit = rest.partition("@")
            first = last = _positive(hit)
        elif "*" in rest:
            rest, _, count = rest.partition("*")
            last = _positive(count)
        action, _, argument = rest.partition(":")
        seconds = float(argument) if action == "delay" else 0.0
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {part!r}: {error}") from error
    if not name or not equals or action not in _ACTIONS or (argument and action != "delay"):
        raise ConfigError(f"{VARIABLE}: {part!r} is not name=action with an action of {', '.join(_ACTIONS)}")
    return Failpoint(name, action, seconds, first, last)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{number} is below 1")
    return number
