"""The frames that links are in the middle of: while one arrives slowly, nothing else can come over its link."""

import contextlib
from collections.abc import Callable, Iterator


class Arrivals:
    """Owner of each link's count of bytes and of the frame under way on it. Each link is told of by its own thread."""

    def __init__(self) -> None:
        self._received: dict[int, Callable[[], int]] = {}
        self._seen: dict[int, list[int]] = {}  # of the links with a frame under way: bytes at the last look

    def meet(self, link: int, received: Callable[[], int]) -> None:
        """`received` tells how many bytes have come over the link's stream."""
        self._received[link] = received

    def lost(self, link: int) -> None:
        """The link is gone."""
        self._seen.pop(link, None)
        self._received.pop(link, None)

    @contextlib.contextmanager
    def frame(self, link: int) -> Iterator[None]:
        """A frame's header came; with the end of this the frame is here, or skipped."""
        received = self._received.get(link)
        if received is not None:
            self._seen[link] = [received()]
        try:
            yield
        finally:
            self._seen.pop(link, None)

    def moving(self) -> Iterator[int]:
        """Yield the links on which bytes of a frame came since the last look. Any one thread."""
        for link, seen in self._seen.copy().items():
            received = self._received.get(link)
            count = 0 if received is None else received()
            if count > seen[0]:
                seen[0] = count
                yield link
