"""Time that passes only during sleeps."""

from collections.abc import Callable


class SleptClock:
    """`at` is called with the time after each sleep."""

    def __init__(self, at: Callable[[float], None] = lambda now: None) -> None:
        self.now, self._at = 0.0, at

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self._at(self.now)


def no_lines(line: str) -> None:
    """Log nothing."""
