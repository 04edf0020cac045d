"""A histogram that one thread writes: an observation is one binary search and two additions, without a lock.

prometheus_client's histogram walks its buckets under a lock, which is too slow for every token. This one can be read
with several sets of bucket boundaries, so that one observation serves several metrics.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.utils import floatToGoString

Bucket = tuple[str, float]
"""(upper boundary in Prometheus' notation, number of values less than or equal to it)."""


class BucketHistogram:
    """Counts values per bucket. Its boundaries are the union of all sets that `buckets` will be called with."""

    __slots__ = ("_boundaries", "_counts", "sum")

    def __init__(self, *boundary_sets: Iterable[float]) -> None:
        self._boundaries = sorted({float(boundary) for boundaries in boundary_sets for boundary in boundaries})
        self._counts = [0] * (len(self._boundaries) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Number of values observed."""
        return sum(self._counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of values in each bucket, not cumulative; the last bucket is +Inf. Safe from any thread."""
        return tuple(self._counts)

    def observe(self, value: float) -> None:
        """Count one value; a value equal to a boundary belongs to the bucket below it."""
        self._counts[bisect_left(self._boundaries, value)] += 1
        self.sum += value

    def buckets(self, boundaries: Sequence[float] | None = None) -> list[Bucket]:
        """Return cumulative buckets with these upper boundaries (None: all), ascending, then `+Inf`.

        Raises ValueError for a boundary that was not given at construction.
        """
        wanted = self._boundaries if boundaries is None else sorted(float(boundary) for boundary in boundaries)
        if unknown := set(wanted).difference(self._boundaries):
            raise ValueError(f"{min(unknown)} is not a bucket boundary of this histogram: {self._boundaries}")
        found, total = dict.fromkeys(wanted, 0), 0
        for boundary, count in zip(self._boundaries, self._counts, strict=False):
            total += count
            if boundary in found:
                found[boundary] = total
        text = [floatToGoString(boundary) for boundary in found]  # type: ignore[no-untyped-call]
        return [*zip(text, map(float, found.values()), strict=True), ("+Inf", float(self.count))]
