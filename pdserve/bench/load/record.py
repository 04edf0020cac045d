"""What has been measured so far."""

from collections import Counter
from dataclasses import dataclass, field

from pdserve.bench.load.timeline import Timeline


@dataclass(slots=True)
class LoadRecord:
    """Timelines by the request's number, as they end. Owned by the one task that drives the load."""

    num_requests: int
    began_s: float = 0.0
    ended_s: float = 0.0
    lines: dict[int, Timeline] = field(default_factory=dict)
    under_way: dict[int, float] = field(default_factory=dict)
    """When those were sent that have not ended; after a load that was broken off, what it broke off."""

    def begin(self, now_s: float) -> None:
        """Start the clock of the run."""
        self.began_s = self.ended_s = now_s

    def start(self, number: int, now_s: float) -> None:
        """Note that a request is sent now."""
        self.under_way[number] = now_s

    def add(self, number: int, line: Timeline, now_s: float) -> None:
        """Take the timeline of a request that ended."""
        self.under_way.pop(number, None)
        self.lines[number] = line
        self.ended_s = now_s

    @property
    def duration_s(self) -> float:
        """From the start to the last end so far."""
        return self.ended_s - self.began_s

    @property
    def in_order(self) -> list[Timeline]:
        """All that ended, in the order of their requests."""
        return [self.lines[number] for number in sorted(self.lines)]

    @property
    def unfinished(self) -> int:
        """Requests that had not ended when the run did."""
        return self.num_requests - len(self.lines)

    def errors(self) -> Counter[str]:
        """How many failures of each kind."""
        return Counter(line.failure.kind for line in self.lines.values() if line.failure is not None)
