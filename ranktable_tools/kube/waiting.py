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


def wait_for(what: str, look: Callable[[], _Found], patience: WaitLimits) -> _Found:
    """Return the result of `look` once it no longer raises NotYet; on timeout RanktableError with the last reason."""
    began = logged_at = patience.clock()
    while True:
        try:
            return look()
        except NotYet as error:
            now = patience.clock()
            if now - began >= patience.timeout_s:
                raise RanktableError(f"{what} is not there after {patience.timeout_s:g} s: {error}") from error
            if now - logged_at >= _LOG_EVERY_S:
                logged_at = now
                patience.say(f"waiting for {what}: {error}")
        patience.sleep(_POLL_S)
