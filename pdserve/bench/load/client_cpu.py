"""How much of a core this process took while it measured: a client that is too slow measures itself."""

import resource
from dataclasses import dataclass

BUSY = 0.8


def cpu_s() -> float:
    """Return the processor seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, slots=True)
class ClientCpu:
    """Processor seconds over so many of the clock."""

    cpu_s: float
    wall_s: float

    @property
    def share(self) -> float:
        """Of one core: the client is one thread."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def warning(self) -> str | None:
        """What to know before believing the figures; None where the client had time."""
        if self.share <= BUSY:
            return None
        return (
            f"this client took {self.share:.0%} of a core: above {BUSY:.0%} it measures itself as much as the server "
            "(fewer requests a second, or several clients on other cores)"
        )
