"""The CPU usage of the benchmark client: a client that is too slow measures itself."""

import resource
from dataclasses import dataclass

BUSY = 0.8


def cpu_s() -> float:
    """Return the CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, slots=True)
class ClientCpu:
    """CPU seconds and wall-clock seconds of a measurement."""

    cpu_s: float
    wall_s: float

    @property
    def share(self) -> float:
        """The share of one core: the client has one thread."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def warning(self) -> str | None:
        """A warning if the client was too busy for the figures to be trusted, else None."""
        if self.share <= BUSY:
            return None
        return (
            f"this client used {self.share:.0%} of a core: above {BUSY:.0%} it measures itself as much as the server "
            "(send fewer requests per second, or use several clients on other cores)"
        )
