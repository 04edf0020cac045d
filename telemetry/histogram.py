"""A histogram that one thread feeds and reads: to count a value is one search and two additions, and takes no lock.

prometheus_client's walks its buckets under a lock, which is too much for every token. This one can show its numbers
under several sets of edges, so that one observation serves several metrics.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.utils import floatToGoString

Bucket = tuple[str, float]
"""An upper edge as Prometheus writes it, and how many values are at most that."""


class BucketHistogram:
    """Counts values between `edges`, the union of all sets it will be shown under."""

    __slots__ = ("_counts", "_edges", "sum")

    def __init__(self, *edge_sets: Iterable[float]) -> None:
        self._edges = sorted({float(edge) for edges in edge_sets for edge in edges})
        self._counts = [0] * (len(self._edges) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Values so far."""
        return sum(self._counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many values lie up to each edge and above the one before, then how many above all. Any thread."""
        return tuple(self._counts)

    def observe(self, value: float) -> None:
        """Count one value; one that lies on an edge belongs below it."""
        self._counts[bisect_left(self._edges, value)] += 1
        self.sum += value

    def buckets(self, edges: Sequence[float] | None = None) -> list[Bucket]:
        """Return the buckets with these upper edges (None: all there are), ascending, and `+Inf`. Raises ValueError.

        An edge that was not given at construction is an error: nothing is known of it.
        """
        wanted = self._edges if edges is None else sorted(float(edge) for edge in edges)
        if unknown := set(wanted).difference(self._edges):
            raise ValueError(f"{min(unknown)} is no edge of this histogram: {self._edges}")
        found, total = dict.fromkeys(wanted, 0), 0
        for edge, count in zip(self._edges, self._counts, strict=False):
            total += count
            if edge in found:
                found[edge] = total
        text = [floatToGoString(edge) for edge in found]  # type: ignore[no-untyped-call]
        return [*zip(text, map(float, found.values()), strict=True), ("+Inf", float(self.count))]
