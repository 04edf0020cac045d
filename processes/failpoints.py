"""Named places at which a test makes a process fail, read once at startup from `PDSERVE_FAILPOINTS`.

    PDSERVE_FAILPOINTS="kv.send.mid=corrupt*1;kv.before_ack=delay:0.5;decode.token=kill9@5"

Actions: kill9, stop (SIGSTOP), raise, delay:SECONDS, corrupt (the caller corrupts its data, at places that have some).
`*N` means the first N times only, `@N` the N-th time only. A place that is in neither POINTS nor BATCH_POINTS is
refused. Each action is logged before it is taken. Unset, a failpoint costs one call and one truth test.

One more name is not a fault: `engine.preempt=after:N` makes the engine preempt each prompt once, as a full pool does,
when it has N output tokens.
"""

import functools
import os
import signal
import threading
import time
from dataclasses import dataclass

from telemetry.logs import EventLogger
from wire.errors import ConfigError, InternalError

_log = EventLogger("failpoints")

VARIABLE = "PDSERVE_FAILPOINTS"
ACTIONS = ("kill9", "stop", "raise", "delay", "corrupt")
PREEMPT, AFTER = "engine.preempt", "after"


@dataclass(frozen=True, slots=True)
class Point:
    """One place: which process passes it and when; what `corrupt` changes there, None where there is no data."""

    who: str
    when: str
    corrupts: str | None = None

    @property
    def actions(self) -> tuple[str, ...]:
        """The actions that can be set at this place."""
        return tuple(action for action in ACTIONS if action != "corrupt" or self.corrupts is not None)


POINTS: dict[str, Point] = {
    "decode.reserve": Point("D", "has received Reserve and allocated no block"),
    "prefill.before_chunk": Point("P", "has accepted the prompt and computed nothing of it"),
    "prefill.in_chunk": Point("P", "has computed a layer of a chunk and not offered it for sending"),
    "prefill.between_chunks": Point("P", "has computed a chunk, but not the last one of the prompt"),
    "kv.send.mid": Point("P", "is about to announce a frame", "the frame's digest"),
    "scheduler.first_token": Point("scheduler", "has P's first token and has not passed it on"),
    "kv.before_send_commit": Point("P", "has sent every frame but not the COMMIT", "the digest of the description"),
    "kv.after_send_commit": Point("P", "has sent the COMMIT but has no answer"),
    "scheduler.between": Point("scheduler", "has passed P's first token on and just received D's first"),
    "kv.before_commit": Point("D", "has every frame but has not admitted the prompt", "the description"),
    "kv.before_ack": Point("D", "has admitted the prompt but not sent the ACK", "the ticket id in the ACK"),
    "kv.after_ack": Point("D", "has sent the ACK"),
    "decode.token": Point("D", "has computed a token but not sent it; @N is the N-th one"),
}
"""Every place by name, in the order one prompt passes them."""

BATCH_POINTS: dict[str, Point] = {
    "batch.before_write": Point("batch", "has a line's answer but nothing of it in its journal"),
    "batch.after_write": Point("batch", "has a line's answer in its journal; @N is the N-th one"),
    "batch.before_rename": Point("batch", "has written the whole output to a temporary file"),
    "batch.between_renames": Point("batch", "has renamed the error file but not the output"),
    "batch.after_rename": Point("batch", "has renamed the output; the journal still exists"),
}
"""The places in a run of a batch file, in the order it passes them."""
_ALL_POINTS = POINTS | BATCH_POINTS


@dataclass(frozen=True, slots=True)
class Failpoint:
    """The action at one named place, on hits `first` to `last` (1-based; last None is unlimited).

    For PREEMPT, `first` is the number of output tokens.
    """

    name: str
    action: str
    seconds: float = 0.0
    first: int = 1
    last: int | None = None


class Failpoints:
    """The failpoints of one process and each one's number of hits."""

    def __init__(self, points: tuple[Failpoint, ...] = ()) -> None:
        self._points = {point.name: point for point in points}
        self._hits = dict.fromkeys(self._points, 0)
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Return whether any is set."""
        return bool(self._points)

    @classmethod
    def parse(cls, text: str) -> "Failpoints":
        """Parse `name=action[:seconds][*count|@hit];…`, one setting per name. Raises ConfigError."""
        points = tuple(_parse_one(part.strip()) for part in text.split(";") if part.strip())
        names = [point.name for point in points]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{VARIABLE}: {name} is set {names.count(name)} times: set it once")
        return cls(points)

    @property
    def preempt_after(self) -> int | None:
        """Number of output tokens at which each prompt is preempted once; None if only a full pool preempts."""
        point = self._points.get(PREEMPT)
        return None if point is None else point.first

    def hit(self, name: str) -> bool:
        """Pass the place `name` and take its action, if any. Return whether the caller must corrupt its data."""
        if not self._points:
            return False
        return self._trigger(name)

    def _trigger(self, name: str) -> bool:
        assert name in _ALL_POINTS, name
        point = self._points.get(name)
        if point is None:
            return False
        with self._lock:
            self._hits[name] += 1
            hits = self._hits[name]
        if hits < point.first or (point.last is not None and hits > point.last):
            return False
        _log.warning("failpoint", point=name, action=point.action, hit=hits)
        if point.action == "raise":
            raise InternalError(f"failpoint {name}")
        if point.action == "delay":
            time.sleep(point.seconds)
        elif point.action == "kill9":
            os.kill(os.getpid(), signal.SIGKILL)
        elif point.action == "stop":
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # stops before this thread continues
        return point.action == "corrupt"


@functools.cache
def process_failpoints() -> Failpoints:
    """Return this process's failpoints, read from the environment at the first call. Raises ConfigError."""
    return Failpoints.parse(os.environ.get(VARIABLE, ""))


def failpoint(name: str) -> bool:
    """Pass the place `name` in this process; see Failpoints.hit."""
    return process_failpoints().hit(name)


def _parse_one(part: str) -> Failpoint:
    name, equals, rest = (piece.strip() for piece in part.partition("="))
    if name == PREEMPT:
        return _parse_preempt(part, rest)
    first, last = 1, None
    try:
        if "@" in rest:
            rest, _, hit = rest.partition("@")
            first = last = _parse_positive(hit)
        elif "*" in rest:
            rest, _, count = rest.partition("*")
            last = _parse_positive(count)
        action, _, argument = rest.partition(":")
        seconds = _seconds(argument) if action == "delay" else 0.0
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {part!r}: {error}") from error
    if not name or not equals or action not in ACTIONS or (argument and action != "delay"):
        raise ConfigError(f"{VARIABLE}: {part!r} is not name=action with an action of {', '.join(ACTIONS)}")
    if name not in _ALL_POINTS:
        raise ConfigError(f"{VARIABLE}: {name!r} is not a failpoint; choose from {', '.join((*_ALL_POINTS, PREEMPT))}")
    if action not in _ALL_POINTS[name].actions:
        corrupting = ", ".join(known for known, point in _ALL_POINTS.items() if point.corrupts is not None)
        raise ConfigError(f"{VARIABLE}: {name} has nothing to corrupt; corrupt works at {corrupting}")
    return Failpoint(name, action, seconds, first, last)


def _parse_preempt(part: str, rest: str) -> Failpoint:
    action, _, count = rest.partition(":")
    try:
        if action != AFTER:
            raise ValueError(f"its only action is {AFTER}:N, with N output tokens")
        return Failpoint(PREEMPT, AFTER, first=_parse_positive(count))
    except ValueError as error:
        raise ConfigError(f"{VARIABLE}: {part!r}: {error}") from error


def _parse_positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"the number is {number}, but must be at least 1")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 3600:
        raise ValueError(f"a delay of {seconds:g} s is not in [0, 3600]")
    return seconds
