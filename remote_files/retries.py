"""Retry an exchange after errors that may be temporary."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from remote_files.limits import Retries
from telemetry.logs import EventLogger
from wire.errors import DeadlineExceeded, Unavailable

_log = EventLogger("remote_files")
T = TypeVar("T")


class Transient(Exception):
    """An exchange failed, but a retry may succeed; `wait_s` is the delay that the server requested."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


async def retried(attempt: Callable[[], Awaitable[T]], *, what: str, retries: Retries, whole_s: float) -> T:
    """Return what `attempt` returns, tried again after each Transient; `what` names the file in messages.

    Raises Unavailable after the last try and DeadlineExceeded when `whole_s` has passed; other errors pass at once.
    """
    deadline = asyncio.timeout(whole_s)
    try:
        async with deadline:
            return await _run_with_retries(attempt, what, retries)
    except TimeoutError:
        if not deadline.expired():
            raise
        raise DeadlineExceeded(f"{what}: not done within {whole_s:g} s") from None


async def _run_with_retries(attempt: Callable[[], Awaitable[T]], what: str, retries: Retries) -> T:
    failures = 0
    while True:
        try:
            return await attempt()
        except Transient as error:
            failures += 1
            if failures >= retries.tries:
                raise Unavailable(f"{what}: {error} (tried {failures} time{'s' * (failures > 1)})") from error
            jittered = retries.delay_s(failures, random.random())  # noqa: S311 - jitter, not a secret
            delay_s = max(jittered, min(error.wait_s, retries.max_delay_s))
            _log.info("transfer_retried", url=what, error=str(error), failures=failures, delay_s=round(delay_s, 1))
        await asyncio.sleep(delay_s)
