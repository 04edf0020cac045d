"""The frames being received on each link: while one arrives slowly, nothing else can arrive over its link."""

import contextlib
from collections.abc import Callable, Iterator


class Arrivals:
    """Owner of each link's byte counter and frame in progress. Only a link's own thread updates its entries."""

    def __init__(self) -> None:
        self._received: dict[int, Callable[[], int]] = {}
        self._seen: dict[int, list[int]] = {}  # the bytes at the last check, for links in the middle of a frame

    def add_link(self, link: int, received: Callable[[], int]) -> None:
        """Register a link; `received` returns the number of bytes received over its stream."""
        self._received[link] = received

    def lost(self, link: int) -> None:
        """Remove a link."""
        self._seen.pop(link, None)
        self._received.pop(link, None)

    @contextlib.contextmanager
    def frame(self, link: int) -> Iterator[None]:
        """Mark a frame as in progress from its header until it is received or skipped."""
        received = self._received.get(link)
        if received is not None:
            self._seen[link] = [received()]
        try:
            yield
        finally:
            self._seen.pop(link, None)

    def moving(self) -> Iterator[int]:
        """Yield the links that received bytes of a frame since the last call. Only one thread at a time may call it."""
        for link, seen in self._seen.copy().items():
            received = self._received.get(link)
            count = 0 if received is None else received()
            if count > seen[0]:
                seen[0] = count
                yield link
