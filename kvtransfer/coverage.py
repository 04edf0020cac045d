"""Which token ranges have been seen, as sorted disjoint intervals. Pure."""

from bisect import bisect_left, bisect_right


class Coverage:
    """Owner of the intervals of one tensor of one ticket. Neighbours are joined, so in-order chunks stay one."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def overlaps(self, start: int, end: int) -> bool:
        """Tell whether any token of [start, end) was added."""
        at = bisect_right(self._ends, start)
        return at < len(self._starts) and self._starts[at] < end

    def add(self, start: int, end: int) -> None:
        """Add [start, end), of which no token may be there yet."""
        assert not self.overlaps(start, end), f"[{start}, {end}) overlaps"
        low, high = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if low < high:
            start, end = min(start, self._starts[low]), max(end, self._ends[high - 1])
        self._starts[low:high] = [start]
        self._ends[low:high] = [end]

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of [start, end) that were not added, ascending."""
        gaps = []
        at = bisect_right(self._ends, start)
        while start < end:
            next_start = self._starts[at] if at < len(self._starts) else end
            if start < next_start:
                gaps.append((start, min(end, next_start)))
            if next_start >= end:
                break
            start = self._ends[at]
            at += 1
        return gaps
