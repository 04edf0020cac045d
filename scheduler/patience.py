"""Limits that count the time in which both sides could run: a starved process is slow, not dead."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Starved = Callable[[], float]
"""Returns the seconds in which a process was kept from running since some moment; they never become fewer."""

MOST_SLOWNESS = 20.0
"""The most that a measured slowness lengthens a limit (ticker.c: LEAST_RUN_SHARE)."""
_LEAST_SPAN_S = 0.9
_KEPT = 0.8


@asynccontextmanager
async def patient(seconds: float, *starved: Starved) -> AsyncIterator[None]:
    """As asyncio.timeout, later by the longest time that one of the processes is starved meanwhile."""
    loop = asyncio.get_running_loop()
    began, before = loop.time(), [one() for one in starved]
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        lost_s = max((one() - then for one, then in zip(starved, before, strict=True)), default=0.0)
        due = began + seconds + max(0.0, lost_s)
        if due > loop.time():
            timer = loop.call_at(due, look)
        else:
            timeout.reschedule(due)

    async with asyncio.timeout(None) as timeout:
        look()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


class Slowness:
    """How many times longer than it needs an instance takes for everything: 1 unless it is starved.

    Measured over about a second, and kept a while: the machine that starved it may do so again.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._since: tuple[float, float] | None = None

    def measure(self, now: float, starved_s: float) -> None:
        """Take the loop's time and the instance's seconds starved so far, of which only differences count."""
        if self._since is None or starved_s < self._since[1]:
            self._since = now, starved_s
            return
        then, before = self._since
        if now - then < _LEAST_SPAN_S:
            return
        ran = max(now - then - (starved_s - before), (now - then) / MOST_SLOWNESS)
        self.factor = max((now - then) / ran, 1.0 + _KEPT * (self.factor - 1.0))
        self._since = now, starved_s
