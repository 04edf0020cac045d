"""Wait with a deadline for files that others write, and log now and then what is missing."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ranktable_tools.errors import RanktableError
from ranktable_tools.kube.retry_loop import Say

_POLL_S = 0.2
_LOG_EVERY_S = 30.0

_Found = TypeVar("_Found")


class NotYet(RanktableError):
    """The expected content does not exist yet; the message describes what is missing."""


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """How long to wait, the clock, and the function that logs."""

    timeout_s: float
    say: Say
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def wait_for(what: str, read: Callable[[], _Found], limits: WaitLimits) -> _Found:
    """Return the result of `read` once it no longer raises NotYet; on timeout RanktableError with the last reason."""
    began = logged_at = limits.clock()
    while True:
        try:
            return read()
        except NotYet as error:
            now = limits.clock()
            if now - began >= limits.timeout_s:
                raise RanktableError(f"{what} is not there after {limits.timeout_s:g} s: {error}") from error
            if now - logged_at >= _LOG_EVERY_S:
                logged_at = now
                limits.say(f"waiting for {what}: {error}")
        limits.sleep(_POLL_S)
