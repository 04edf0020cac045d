"""The record of a running load."""

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
    """Send times of requests in progress; after an interrupted load, of the interrupted requests."""

    def begin(self, now_s: float) -> None:
        """Start the clock of the run."""
        self.began_s = self.ended_s = now_s

    def start(self, number: int, now_s: float) -> None:
        """Record that a request is sent."""
        self.under_way[number] = now_s

    def add(self, number: int, line: Timeline, now_s: float) -> None:
        """Add the timeline of an ended request."""
        self.under_way.pop(number, None)
        self.lines[number] = line
        self.ended_s = now_s

    @property
    def duration_s(self) -> float:
        """Seconds from the start to the latest end."""
        return self.ended_s - self.began_s

    @property
    def in_order(self) -> list[Timeline]:
        """The ended requests, by number."""
        return [self.lines[number] for number in sorted(self.lines)]

    @property
    def unfinished(self) -> int:
        """The number of requests that have not ended."""
        return self.num_requests - len(self.lines)

    def errors(self) -> Counter[str]:
        """Count the failures of each kind."""
        return Counter(line.failure.kind for line in self.lines.values() if line.failure is not None)
