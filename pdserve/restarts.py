"""When a process that died may start again, and when that is given up. Pure: the time is passed in."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """At most `most` restarts of one process in `window_s`; the wait before each is twice the one before it."""

    most: int = 5
    window_s: float = 300.0
    first_wait_s: float = 0.5
    longest_wait_s: float = 15.0


class Restarts:
    """Owns when one process died. `total` counts all its restarts, those before the window too."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._died_at: list[float] = []
        self.total = 0

    @property
    def deaths(self) -> int:
        """How often it died within the window that ended with its last death."""
        return len(self._died_at)

    def died(self, now: float) -> float | None:
        """Note a death; return the seconds until the next start, None when it died too often to be started again."""
        limits = self._limits
        self._died_at = [*(at for at in self._died_at if now - at < limits.window_s), now]
        if self.deaths > limits.most:
            return None
        self.total += 1
        return float(min(limits.first_wait_s * 2 ** (self.deaths - 1), limits.longest_wait_s))
