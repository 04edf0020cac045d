"""Timeouts that count only time in which both sides could run: a starved process is slow, not dead."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

Starved = Callable[[], float]
"""Returns the seconds for which a process was kept from running since some moment; never decreases."""

MAX_SLOWNESS = 20.0
"""The largest factor by which slowness extends a limit (ticker.c: MIN_RUN_SHARE)."""
_MIN_SPAN_S = 0.9
_MEMORY_S = 5.0


@asynccontextmanager
async def extended_timeout(seconds: float, *starved: Starved) -> AsyncIterator[None]:
    """Like asyncio.timeout, extended by the longest time for which one of the processes was starved meanwhile."""
    async with asyncio.timeout(None) as timeout:
        deadline = _ExtendedDeadline(timeout, seconds, starved)
        deadline.check()
        try:
            yield
        finally:
            deadline.stop()


class _ExtendedDeadline:
    """Owner of the timer that ends `timeout`."""

    def __init__(self, timeout: asyncio.Timeout, seconds: float, starved: Sequence[Starved]) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._due = self._loop.time() + seconds
        self._starved = [(one, one()) for one in starved]
        self._timer: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """End the timeout, or check again at the time extended by the starvation so far."""
        due = self._due + max([0.0, *(one() - before for one, before in self._starved)])
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self.check)
        else:
            self._timeout.reschedule(due)

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Slowness:
    """The factor by which starvation slows an instance down: 1 unless it is starved.

    It is the larger of the last second's factor and that of the last five seconds: it rises at once, and a stop is
    forgotten after five seconds.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._samples: deque[tuple[float, float]] = deque()

    def measure(self, now: float, starved_s: float) -> None:
        """Add a sample: the loop's time and the instance's starved seconds so far; only differences count."""
        samples = self._samples
        if samples and starved_s < samples[-1][1]:  # a new process, which counts from 0
            samples.clear()
        if samples and now - samples[-1][0] < _MIN_SPAN_S:
            return
        samples.append((now, starved_s))
        while len(samples) > 2 and samples[1][0] <= now - _MEMORY_S:
            samples.popleft()
        self.factor = max(_slowdown(samples[0], samples[-1]), _slowdown(samples[max(-2, -len(samples))], samples[-1]))


def _slowdown(earlier: tuple[float, float], later: tuple[float, float]) -> float:
    passed_s, starved_s = later[0] - earlier[0], later[1] - earlier[1]
    if passed_s <= 0.0:
        return 1.0
    return passed_s / max(passed_s - starved_s, passed_s / MAX_SLOWNESS)
