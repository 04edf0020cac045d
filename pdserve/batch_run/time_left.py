"""Estimate the remaining time of a batch from its latest lines. Pure: the time is passed in."""

from collections import deque

_MIN_WINDOW = 16  # lines of a window


class TimeLeft:
    """The lines of one run over time. Owns the window: as many lines as are in flight, at least 16.

    Lines finish in waves of `max_inflight`: the speed is unknown until one whole wave, or half of the run, is done.
    """

    def __init__(self, max_inflight: int) -> None:
        self._wave = max_inflight
        self._first: int | None = None
        self._samples: deque[tuple[float, int]] = deque()

    def record(self, now: float, done: int) -> None:
        """Record the number of finished lines."""
        self._first = done if self._first is None else self._first
        self._samples.append((now, done))
        while len(self._samples) > 2 and done - self._samples[1][1] >= max(self._wave, _MIN_WINDOW):
            self._samples.popleft()

    def seconds(self, now: float, total: int) -> float | None:
        """Return the time for the rest of `total` lines, None while it is unknown.

        It is at least the time since the last line finished, so that a hanging line raises it.
        """
        if self._first is None:
            return None
        (began, before), (last, done) = self._samples[0], self._samples[-1]
        if done == total:
            return 0.0
        if done - self._first < min(self._wave, -(-(total - self._first) // 2)) or done == before:
            return None
        return max((total - done) * (now - began) / (done - before), now - last)
