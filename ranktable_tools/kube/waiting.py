"""Wait for what others write, with a deadline, and say now and then what is missing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ranktable_tools.errors import RanktableError
from ranktable_tools.kube.retry_loop import Say

_POLL_S = 0.2
_SAY_EVERY_S = 30.0

_Found = TypeVar("_Found")


class NotYet(RanktableError):
    """What is waited for is not there; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """How long to wait, by which clock, and where it is said."""

    timeout_s: float
    say: Say
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def wait_for(what: str, look: Callable[[], _Found], patience: WaitLimits) -> _Found:
    """Return what `look` finds once it raises NotYet no more; RanktableError with the last reason when that is late."""
    began = said = patience.clock()
    while True:
        try:
            return look()
        except NotYet as error:
            now = patience.clock()
            if now - began >= patience.timeout_s:
                raise RanktableError(f"{what} is not there after {patience.timeout_s:g} s: {error}") from error
            if now - said >= _SAY_EVERY_S:
                said = now
                patience.say(f"waiting for {what}: {error}")
        patience.sleep(_POLL_S)
