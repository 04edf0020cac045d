"""Allocation in one buffer, freed in the order of allocation. Pure."""

from collections import deque


class Ring:
    """Owner of the allocated ranges of a buffer of `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._spans: deque[tuple[int, int]] = deque()

    def take(self, num_bytes: int) -> int | None:
        """Return the start of `num_bytes` contiguous bytes, or None if there is no space until more is freed."""
        start = self._behind_last(num_bytes)
        if start is not None:
            self._spans.append((start, start + num_bytes))
        return start

    def give_back(self) -> None:
        """Free the oldest range."""
        self._spans.popleft()

    def _behind_last(self, num_bytes: int) -> int | None:
        if not self._spans:
            return 0 if num_bytes <= self._size else None
        tail, head = self._spans[0][0], self._spans[-1][1]
        if head > tail and self._size - head >= num_bytes:
            return head
        if head > tail:
            return 0 if tail >= num_bytes else None
        return head if tail - head >= num_bytes else None
