"""When to restart a dead process, and when to give up. Pure: the time is passed in."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """At most `max_restarts` restarts of one process in `window_s`; the wait doubles each time, up to a limit."""

    max_restarts: int = 5
    window_s: float = 300.0
    first_wait_s: float = 0.5
    longest_wait_s: float = 15.0


class Restarts:
    """Owns the times at which one process died. `total` counts all its restarts, also before the window."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._died_at: list[float] = []
        self.total = 0

    @property
    def deaths(self) -> int:
        """The number of deaths within the window that ends at the last one."""
        return len(self._died_at)

    def died(self, now: float) -> float | None:
        """Record a death; return the seconds until the restart, None when it died too often."""
        limits = self._limits
        self._died_at = [*(at for at in self._died_at if now - at < limits.window_s), now]
        if self.deaths > limits.max_restarts:
            return None
        self.total += 1
        return float(min(limits.first_wait_s * 2 ** (self.deaths - 1), limits.longest_wait_s))
